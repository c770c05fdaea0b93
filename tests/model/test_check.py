"""What the check finds out about templates, on the real server and on the scripted one."""

import json
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from loopd.home import Home
from loopd.model.check import load_or_check
from loopd.model.client import ModelClient
from loopd.model.forms import find_forms
from loopd.model.identity import FIXED_DATE
from tests.model.conftest import PATIENT, Start
from tests.servers import start_model_server

STRICT = """{%- for message in messages -%}
{%- if message.role == 'system' -%}{{ raise_exception('no system role') }}{%- endif -%}
{%- if message.role == 'tool' -%}{{ raise_exception('no tools') }}{%- endif -%}
[{{ message.role }}]{%- if message.reasoning_content and loop.last -%}{{ message.reasoning_content }}{%- endif -%}
{{ message.content | trim }}
{% endfor -%}
{%- if add_generation_prompt -%}[assistant]{%- endif -%}"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.make()
    return home


async def test_the_bundled_template_takes_everything_and_only_grows(real: ModelClient) -> None:
    facts = await real.facts()
    forms = await find_forms(real, facts.template, {})
    assert forms.model_dump(exclude={"notes"}) == {
        "arguments": "string",
        "system": "message",
        "user_after_tool": True,
        "tools": True,
        "reasoning_kept": True,
        "grows": True,
    }
    assert forms.notes == ("white space: message 2, an answer, tokenises otherwise when it comes back (1 tokens)",), (
        "the server takes white space at an answer's beginning away, so this stays an example"
    )


async def test_the_models_own_template_shows_no_tools(tiny_model: Path, tmp_path: Path) -> None:
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model, template="model") as url:
        client = ModelClient(url, timeouts=PATIENT)
        forms = await find_forms(client, (await client.facts()).template, {})
        await client.close()
    assert not forms.tools
    assert "the template does not show tools to the model" in forms.notes


async def test_a_strict_template_is_described_as_it_is(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "strict.jinja").write_text(STRICT)
    template = str(tmp_path / "strict.jinja")
    with start_model_server(tmp_path / "m.sock", gguf=tiny_model, template=template) as url:
        client = ModelClient(url, timeouts=PATIENT)
        forms = await find_forms(client, (await client.facts()).template, {})
        await client.close()
    # The server itself puts the system prompt before the first user text.
    assert (forms.system, forms.user_after_tool, forms.reasoning_kept, forms.tools) == ("message", False, False, False)
    assert "the template refuses tool calls" in forms.notes
    assert any(note.startswith("one call: refused") for note in forms.notes)


def old_fashioned(asked: httpx.Request) -> httpx.Response:
    """A server whose template has no system role and drops the reasoning of earlier turns; a token is a character."""
    body = json.loads(asked.content)
    if asked.url.path == "/tokenize":
        return httpx.Response(200, json={"tokens": [ord(sign) for sign in body["content"]]})
    if body["messages"][0]["role"] == "system":
        return httpx.Response(500, json={"error": {"message": "no system role"}})
    messages = [json.loads(message) for message in map(json.dumps, body["messages"])]
    last_user = max(number for number, message in enumerate(messages) if message["role"] == "user")
    for message in messages[:last_user]:
        message.pop("reasoning_content", None)
    prompt = "".join(f"[{message.pop('role')}]{sorted(message.values(), key=str)}" for message in messages)
    return httpx.Response(200, json={"prompt": prompt + "[assistant]" * body.get("add_generation_prompt", True)})


async def test_a_template_that_drops_reasoning_is_named_with_the_message() -> None:
    client = ModelClient("http://model", transport=httpx.MockTransport(old_fashioned))
    forms = await find_forms(client, "a template", {})
    await client.close()
    assert (forms.system, forms.reasoning_kept, forms.grows) == ("user", False, False)
    assert any(note.startswith("reasoning: message 2 is rewritten") for note in forms.notes)


async def test_a_server_without_a_template_gets_the_defaults_and_a_note(start: Start, home: Home) -> None:
    _, client = await start(llama_cpp=False, alias="gpt")
    check = await load_or_check(home, client, await client.facts())
    assert (check.model.alias, check.model.sha256, check.forms.arguments) == ("gpt", None, "string")
    assert "shows no chat template" in check.forms.notes[0]


async def test_a_template_that_asks_for_the_time_is_reported(start: Start) -> None:
    _, client = await start()
    forms = await find_forms(client, "{{ strftime_now('%d') }} call_tool", {})
    assert any("asks for the time" in note for note in forms.notes)
    assert "the template's own markup names call_tool" in forms.notes


async def test_a_template_that_takes_a_date_gets_a_fixed_one(start: Start, home: Home) -> None:
    _, client = await start()
    facts = await client.facts()
    dated = replace(facts, template="{{ date_string }}")
    check = await load_or_check(home, client, dated)
    assert check.template.options == {"date_string": FIXED_DATE}


async def test_the_check_is_kept_until_model_template_or_build_change(real: ModelClient, home: Home) -> None:
    facts = await real.facts()
    first = await load_or_check(home, real, facts)
    assert first.model.alias == "tiny"
    assert first.model.sha256 is not None
    assert first.template.name == "chatml-tools"
    blind = ModelClient("http://model", transport=httpx.MockTransport(lambda _: httpx.Response(500)))
    assert await load_or_check(home, blind, facts) == first
    kept = json.loads(home.model_check.read_bytes())
    kept["check"]["build"] = "another"
    home.model_check.write_text(json.dumps(kept))
    assert await load_or_check(home, real, facts) == first
    home.model_check.write_text("not JSON")
    assert await load_or_check(home, real, facts) == first
    await blind.close()


async def test_the_hash_follows_the_file(start: Start, home: Home, tmp_path: Path) -> None:
    _, client = await start()
    path = tmp_path / "model.gguf"
    facts = await client.facts()
    served = replace(facts, model_path=str(path))
    assert (await load_or_check(home, client, served)).model.sha256 is None
    hashes = []
    for content in ("one", "two"):
        path.unlink(missing_ok=True)
        path.write_text(content)
        hashes.append((await load_or_check(home, client, served)).model.sha256)
    assert len(set(hashes)) == 2
    assert None not in hashes
