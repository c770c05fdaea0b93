"""The command lines `loopd` and `bxctl`: parse, call, print; no logic (SPEC 9)."""
