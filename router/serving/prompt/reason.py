"""Why a prompt has no keys, or not yet."""

from __future__ import annotations


class Unreadable(Exception):
    """A body whose prompt tokens are not known for sure. `reason` goes into `Prompt.reason`: no text of the prompt.

    Never seen outside this package: a request without keys is placed by load, it does not fail.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class TooLong(Exception):
    """A body that takes too long to be read on the event loop."""
