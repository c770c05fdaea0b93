"""Durable conversations: the frozen baseline, the pure replay, the store on disk, and explicit repair (SPEC 2)."""
