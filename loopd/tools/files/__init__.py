"""The port `files`: read, list, search and write below the configured roots, and nothing else (SPEC 6).

- `roots`: which directories there are, which of them a path means, and which can never be one
- `beneath`: how a place below a root is reached; the whole safety is there
- `reading`, `listing`, `searching`, `writing`: one tool each, synchronous, to be run in a thread
- `port`: the definitions that the model finds, and running a call in a thread of its own

What holds, whatever another program does to the directories meanwhile:

- The kernel is never given a path of more than one component and never follows a link. Each component is opened by
  itself below the directory before it (`dir_fd`, `O_NOFOLLOW`) and looked at through its descriptor, so there is no
  moment between a check and a use. A link is read, and where it leads to is walked in the same way from the root, so
  one that stays inside is followed, and one that leaves is refused, magic links of `/proc` among them.
- Only regular files are read and replaced. Anything else is told from its descriptor before it is opened, so that no
  FIFO hangs and no device is touched.
- A write is whole or not at all: a new file in the same directory, synced, takes the old one's place.
- Sizes, counts and times are bounded, and every call ends soon after it is cancelled.

What does not: a hard link below a root to a file elsewhere cannot be told from any other file and is read (a write
puts a new file in its place, and the one elsewhere stays as it is); a file system mounted below a root counts as
inside; a directory that is moved out of its root while a call works in it is worked in to the end of that call; a file
system that does not answer keeps its thread until it does.
"""
