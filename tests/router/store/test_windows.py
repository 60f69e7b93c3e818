from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.store.windows import Window, read_window


def seconds(text: str) -> int:
    return int(datetime.fromisoformat(text).timestamp())


@pytest.mark.parametrize(
    ("text", "at", "begins", "ends"),
    [
        ("60s", "2026-11-30T14:19:59+00:00", "2026-11-30T14:19:00+00:00", "2026-11-30T14:20:00+00:00"),
        ("1m", "2026-11-30T14:20:00+00:00", "2026-11-30T14:20:00+00:00", "2026-11-30T14:21:00+00:00"),
        ("1h", "2026-11-30T14:59:59+00:00", "2026-11-30T14:00:00+00:00", "2026-11-30T15:00:00+00:00"),
        ("1d", "2026-11-30T23:59:59+00:00", "2026-11-30T00:00:00+00:00", "2026-12-01T00:00:00+00:00"),
        ("1d+05:30", "2026-11-30T18:29:59+00:00", "2026-11-30T00:00:00+05:30", "2026-12-01T00:00:00+05:30"),
        ("1d+05:30", "2026-11-30T18:30:00+00:00", "2026-12-01T00:00:00+05:30", "2026-12-02T00:00:00+05:30"),
        ("month", "2028-02-29T23:59:59+00:00", "2028-02-01T00:00:00+00:00", "2028-03-01T00:00:00+00:00"),
        ("month", "2026-12-31T23:59:59+00:00", "2026-12-01T00:00:00+00:00", "2027-01-01T00:00:00+00:00"),
        ("month-08:00", "2027-01-01T07:59:59+00:00", "2026-12-01T00:00:00-08:00", "2027-01-01T00:00:00-08:00"),
    ],
)
def test_a_window_has_a_first_second_and_an_end(text: str, at: str, begins: str, ends: str) -> None:
    assert read_window(text).span(seconds(at)) == (seconds(begins), seconds(ends))


@pytest.mark.parametrize("text", ["", "0m", "1", "m", "1w", "1m ", "months", "1d+5:30", "1d+05:60", "100000s", "-1m"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be such as 60s"):
        read_window(text)


WINDOWS = st.builds(
    Window, st.sampled_from([0, 1, 60, 3600, 86400, 30 * 86400, 7 * 3600]), st.integers(-15 * 3600, 15 * 3600)
)


@given(WINDOWS, st.floats(0, 4e9))
def test_every_moment_is_in_one_window_and_windows_follow_one_another(window: Window, at: float) -> None:
    begins, ends = window.span(at)
    assert begins <= at < ends
    assert window.span(begins) == window.span(ends - 1) == (begins, ends)
    assert window.span(ends)[0] == ends
    assert window.around(at) == (window.span(begins - 1)[0], begins, ends, window.span(ends)[1])


@pytest.mark.parametrize(
    ("text", "kept"), [("1m", False), ("59m", False), ("60m", True), ("1d", True), ("month", True)]
)
def test_windows_of_an_hour_and_more_are_kept(text: str, kept: bool) -> None:
    assert read_window(text).is_kept is kept
