"""What a client may know of its limits: lines for the head of every answer, as the SDKs of each API read them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import NamedTuple

from router.serving.limits.meters import Meter


class Room(NamedTuple):
    """What is left of the limit that leaves least."""

    limit: int
    remaining: int
    resets_at: int  # seconds since 1970


Dialect = Callable[[Room | None, Room | None, float], bytes]
"""Lines about requests and tokens, and the time now."""


def tightest(meters: Sequence[Meter], now: float) -> Room | None:
    """Of meters of one measure. None: there are none."""
    found: Room | None = None
    for meter in meters:
        used, ends = (meter.used, meter.ends) if now < meter.ends or meter.window is None else (0, int(now))
        remaining = meter.amount - used
        if found is None or remaining < found.remaining:
            found = Room(meter.amount, remaining if remaining > 0 else 0, ends)
    return found


def openai_lines(requests: Room | None, tokens: Room | None, now: float) -> bytes:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}`; resets as durations, e.g. 6m0s."""
    lines = b""
    for name, room in ((b"requests", requests), (b"tokens", tokens)):
        if room is not None:
            lines += (
                b"\r\nx-ratelimit-limit-%b: %d\r\nx-ratelimit-remaining-%b: %d\r\nx-ratelimit-reset-%b: %b"
                % (name, room.limit, name, room.remaining, name, duration(room.resets_at - now))
            )  # fmt: skip
    return lines


def anthropic_lines(requests: Room | None, tokens: Room | None, now: float) -> bytes:
    """`anthropic-ratelimit-{requests,tokens}-{limit,remaining,reset}`; resets as times of RFC 3339."""
    lines = b""
    for name, room in ((b"requests", requests), (b"tokens", tokens)):
        if room is not None:
            reset = datetime.fromtimestamp(room.resets_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ").encode()
            head = b"\r\nanthropic-ratelimit-" + name
            lines += b"%b-limit: %d%b-remaining: %d%b-reset: %b" % (
                head, room.limit, head, room.remaining, head, reset,
            )  # fmt: skip
    return lines


def duration(seconds: float) -> bytes:
    """As OpenAI writes it: 1s, 6m0s, 23h59m59s; whole seconds, rounded up."""
    left = max(0, ceil(seconds))
    if left < 60:
        return b"%ds" % left
    minutes, left = divmod(left, 60)
    if minutes < 60:
        return b"%dm%ds" % (minutes, left)
    return b"%dh%dm%ds" % (*divmod(minutes, 60), left)
