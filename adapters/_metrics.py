"""Single series out of a Prometheus page, by a byte scan: some ten names of the 1,500 lines an engine prints.

A full parse takes 9 to 16 ms a page, once a second and engine; finding a name takes some 10 µs.
Only the text format is read (version 0.0.4), as engines send it when no other is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

_DIGITS = 19  # more make no number of blocks, tokens or ranks


def samples(page: bytes, name: bytes) -> Iterator[tuple[bytes, float]]:
    """(labels as written, value) of every sample of a gauge or counter.

    Such samples stand together in a page, so that reading ends with the first other line. (A histogram's do not.)
    """
    start = _first_line(page, name)
    while start >= 0:
        end = page.find(b"\n", start)
        line = page[start + len(name) : end] if end >= 0 else page[start + len(name) :]
        labels, _, rest = line.rpartition(b"}")
        try:
            yield labels[1:], float(rest.split(None, 1)[0])
        except (ValueError, IndexError):
            return
        start = end + 1 if end >= 0 and page.startswith((name + b"{", name + b" "), end + 1) else -1


def _first_line(page: bytes, name: bytes) -> int:
    """Where the first line of `name` begins, -1: nowhere. A longer name that begins alike is another one."""
    start = 0
    while not (page.startswith(name, start) and page.startswith((b"{", b" "), start + len(name))):
        start = page.find(b"\n" + name, start) + 1
        if not start:
            return -1
    return start


def label(labels: bytes, key: bytes) -> str | None:
    """One label's value, escapes left as they are. None where there is none, or no end of it."""
    start = 0 if labels.startswith(key + b'="') else labels.find(b"," + key + b'="') + 1
    if start == 0 and not labels.startswith(key + b'="'):
        return None
    start += len(key) + 2
    end = labels.find(b'"', start)
    return labels[start:end].decode(errors="replace") if end >= 0 else None


def whole(labels: bytes, key: bytes) -> int | None:
    """One label's value as a number; None where it is none, or one that counts nothing."""
    value = label(labels, key)
    return int(value) if value is not None and len(value) < _DIGITS and value.isdecimal() else None


def rank_of(labels: bytes, key: bytes) -> int:
    """The rank in the label `key`; 0 where there is none."""
    return whole(labels, key) or 0


def by_rank(page: bytes, name: bytes, *, rank: bytes) -> dict[int, float]:
    """The sum of a metric for each value of the label `rank`; samples without one are rank 0's.

    Where tensor or pipeline parallel workers report too (SGLang), they repeat the first one's figures.
    """
    sums: dict[int, float] = {}
    for labels, value in samples(page, name):
        if label(labels, b"tp_rank") in (None, "0") and label(labels, b"pp_rank") in (None, "0") and isfinite(value):
            key = rank_of(labels, rank)
            sums[key] = sums.get(key, 0.0) + value
    return sums


def first(page: bytes, name: bytes) -> float | None:
    """The value of the first sample, None where there is none."""
    return next((value for _, value in samples(page, name)), None)
