"""Turns: limits as pure functions, the loop that goes from what was said to its end, and compaction (SPEC 5)."""
