"""Turns: limits as pure functions, and the loop that goes from what was said to the end of the turn (SPEC 5)."""
