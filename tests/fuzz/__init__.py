"""Arbitrary bytes against every reader of bytes from outside.

`targets/` holds one module a reader: `target(data)` raises where a promise is broken, `WORDS` are pieces such input is
made of. `corpus/` holds seeds, and every input that once found a fault. `test_targets.py` runs both with hypothesis on
each `make test`; `make fuzz` runs the same targets under atheris, which looks for inputs that reach new lines.
"""
