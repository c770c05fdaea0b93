"""Everyday English and the words of tools: what means the same in a request and in a tool's name.

A person asks to "get rid of a folder", the tool is `delete_directory`. Each line below is one meaning; text is
indexed and asked for by its words and by its meanings, so any word of a line finds any other. The table is general:
verbs and things of everyday computing, in regular and listed irregular forms, `_` joining the words of a phrase.
"""

from collections.abc import Sequence

_MEANINGS = """
# making and changing
create add make made new insert build built generate write wrote written compose draft set_up
delete remove erase drop discard destroy purge trash clear get_rid_of got_rid_of throw_away wipe forget empty take_off
update edit change modify alter adjust set correct fix amend revise replace rewrite
copy duplicate clone
move shift transfer relocate put
rename retitle call
sort order arrange
join merge combine unite
split divide separate
convert transform turn_into turn
translate translation language
restore recover bring_back put_back undelete rollback
undo revert
zip compress pack
# looking
list show display view see enumerate browse all every which
get read fetch retrieve load tell give look_at
search find found look_for look_up query lookup locate seek hunt where
check verify validate test inspect
compare diff difference
filter narrow
explain describe description
summarize summary summarise short_version overview digest gist
monitor watch track observe follow
count number how_many statistics stats total
crawl scrape collect extract
open navigate visit go_to
close shut
# sending
send sent deliver submit publish write_to wrote_to tell told
reply answer respond response
forward pass_on
download export save
upload import
share invite grant permission access
subscribe follow
attach attachment attached
notify notification alert warn
approve accept confirm
reject decline refuse
# running
start run execute launch begin trigger fire
stop halt end kill terminate quit abort cancel
restart reboot reload retry again
pause hold suspend
enable activate turn_on switch_on on
disable deactivate turn_off switch_off off
toggle switch
lock protect
install set_up
deploy release ship publish roll_out
backup snapshot safe_copy
mute silence snooze quiet
status state condition
error failure fail failed exception
log logs output trace
# planning
finish complete done close resolve mark finished transition
schedule plan arrange
reschedule postpone delay push_back put_off later
remind reminder alarm
assign delegate
event appointment meeting calendar
birthday anniversary
task todo to_do chore
deadline due
free available availability busy
oncall on_call duty shift
time clock hour
date day today now current
week month
history past previous earlier
version revision
# documents
folder directory
file document doc
content text
note memo memory remember write_down wrote_down
comment remark feedback
paper citation reference
book library
wiki encyclopedia
paragraph section
heading title headline
slide presentation powerpoint deck
sheet spreadsheet workbook excel
column field
row record entry
cell range
formula expression
chart graph plot diagram
form survey questionnaire
poll vote quiz
font style
width height
size big large
# people and messages
email mail message letter inbox
message chat conversation
channel room
reaction emoji thumbs_up
contact address_book
person people member user account who
team group
colleague coworker employee staff
company organization organisation business
customer client
password login credential secret
key token
# media and the web
picture image photo photograph screenshot
video film movie clip
music song track playlist album
audio sound recording
news headlines
article story
web internet online
website site page url
link url
review rating opinion
# places, travel, shopping
place location restaurant cafe shop
near nearby close_to around local
route directions way walk drive
distance far
weather forecast rain temperature
trip travel journey
flight plane
hotel accommodation stay lodging apartment rental listing
price cost
stock ticker
money payment pay paid
invoice bill receipt
expense spending budget
currency exchange
buy bought purchase order
shopping grocery groceries cart
product item
recipe cook meal dish
# house
device gadget appliance
sensor entity
light lamp bulb
heating thermostat climate temperature
automation routine rule
door gate garage
house home
room area
# work and machines
issue ticket bug problem defect
project sprint iteration milestone
board kanban
list checklist
tag label category
type kind
repository repo
commit revision
pull_request merge_request
pipeline build job workflow
code source
function method
server machine host node computer vm
container docker
database db sql
disk storage space drive
memory ram
processor cpu load
network wifi
process program application app
command shell terminal
metric metrics measurement
dashboard panel
calculate compute sum math percent percentage add_up
"""


def _forms(verb_or_noun: str) -> set[str]:
    """Return a word's regular forms, and some that do not exist and do no harm."""
    word, last = verb_or_noun, verb_or_noun[-1]
    found = {word + ending for ending in ("", "s", "es", "d", "ed", "ing", f"{last}ed", f"{last}ing")}
    if last == "e":
        found.add(f"{word[:-1]}ing")
    if last == "y":
        found |= {f"{word[:-1]}ies", f"{word[:-1]}ied"}
    return found


def _table() -> dict[tuple[str, ...], tuple[str, ...]]:
    """Return the meanings of each word and phrase; a meaning is a token that no text contains."""
    found: dict[tuple[str, ...], dict[str, None]] = {}
    lines = (line for line in _MEANINGS.splitlines() if line and not line.startswith("#"))
    for number, line in enumerate(lines):
        for phrase in line.split():
            first, *rest = phrase.split("_")
            for form in _forms(first):
                found.setdefault((form, *rest), {})[f"qz{number}"] = None
    return {phrase: tuple(tokens) for phrase, tokens in found.items()}


_TOKENS = _table()
_LONGEST = max(map(len, _TOKENS))
_PHRASES = {length: {phrase for phrase in _TOKENS if len(phrase) == length} for length in range(2, _LONGEST + 1)}


def understood(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words that stand for themselves, and a token for each meaning of each word and phrase.

    The words of a phrase do not stand for themselves: who wants to "get rid of" something does not want to get it.

    Args:
        words: in any case, in the text's order.
    """
    lower = [word.lower() for word in words]
    kept: list[str] = []
    tokens: list[str] = []
    place = 0
    while place < len(lower):
        length = next((n for n in range(_LONGEST, 1, -1) if tuple(lower[place : place + n]) in _PHRASES[n]), 1)
        tokens += _TOKENS.get(tuple(lower[place : place + length]), ())
        if length == 1:
            kept.append(words[place])
        place += length
    return kept, tokens
