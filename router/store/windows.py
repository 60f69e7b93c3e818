"""Windows of limits: how they are written in the table, and which span of time they are.

    60s  1m  1h  1d  30d    so long, one after the other since 1970-01-01
    month                   a calendar month
    1d+05:30  month-08:00   the same where local time is so far ahead of UTC, or behind it

A window has no moment at which it is set back: its first second is part of the name of what is counted in it.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from functools import lru_cache

import msgspec

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WRITTEN = re.compile(r"(?:([1-9]\d{0,4})([smhd])|month)(?:([+-])(\d\d):([0-5]\d))?")
_DAY_S = 86400
_KEPT_FROM_S = 3600


class Window(msgspec.Struct, frozen=True):
    """length_s: 0 for a calendar month. shift_s: how far local time is ahead of UTC."""

    length_s: int
    shift_s: int = 0

    @property
    def is_kept(self) -> bool:
        """Long enough that a restart must not forget it."""
        return not self.length_s or self.length_s >= _KEPT_FROM_S

    def span(self, at: float) -> tuple[int, int]:
        """Its first second, and the one after its last: seconds since 1970 UTC."""
        local = int(at // 1) + self.shift_s
        if self.length_s:
            begins = local - local % self.length_s
            return begins - self.shift_s, begins + self.length_s - self.shift_s
        begins, ends = _month(local // _DAY_S)
        return begins - self.shift_s, ends - self.shift_s

    def around(self, at: float) -> tuple[int, int, int, int]:
        """Where the window before, this one, the next, and the one after that begin: for a clock that is not ours."""
        begins, ends = self.span(at)
        return self.span(begins - 1)[0], begins, ends, self.span(ends)[1]


def read_window(text: str) -> Window:
    """Raises ValueError."""
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise ValueError("must be such as 60s, 1m, 1h, 1d or month, with +HH:MM or -HH:MM behind it for local time")
    count, unit, sign, hours, minutes = found.groups()
    shift = (int(hours) * 3600 + int(minutes) * 60) * (-1 if sign == "-" else 1) if sign else 0
    return Window(int(count) * _UNITS[unit] if count else 0, shift)


@lru_cache(maxsize=64)
def _month(day: int) -> tuple[int, int]:
    """Of the calendar month that has this day (since 1970)."""
    first = datetime.fromtimestamp(day * _DAY_S, UTC).replace(day=1)
    after = first.replace(year=first.year + first.month // 12, month=first.month % 12 + 1)
    return int(first.timestamp()), int(after.timestamp())
