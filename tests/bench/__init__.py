"""Benchmarks: `python -m tests.bench [WORD ...]` runs all, or those whose module's name contains a word.

One table goes to the screen and the same rows to `build/bench.json`. Each benchmark is a function in a module of its
own that measures a thing and, in the same run, the reference it is compared with.
"""
