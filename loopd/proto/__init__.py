"""The words that parts and files exchange: pure, no I/O.

- `canonical`: the one way to turn a value into bytes, and their hash
- `ids`: session ids and idempotency keys
- `records`: the lines of a session log (SPEC 2.1)
- `model_identity`: what tells one model, or one chat template, from another
- `usage`: what a request should have cost and what it did (SPEC 4.3)
- `frames`: the messages of the channel (SPEC 8)
"""
