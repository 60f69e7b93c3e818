"""How long answers become where the client does not say it: a quantile learned for each key and model."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict

_QUANTILE = 0.95
_UNKNOWN_TOKENS = 1024
"""Reserved while fewer than `_ENOUGH` answers were seen."""
_ENOUGH = 8
_FORGETS_AT = 256  # answers, then all counts are halved: what was long ago weighs less and less
_STEPS = 4  # per doubling of length: a quantile is at most 19 % too high
_LONGEST = 24 * _STEPS
_KNOWN = 10_000  # keys and models, the least recently used are forgotten: about 500 bytes each

_UPPERS = sorted({int(2 ** (step / _STEPS)) for step in range(_LONGEST + 1)})
"""The longest answer of each step."""


class OutputLengths:
    """Bounded: `_KNOWN` histograms with steps of a quarter of a doubling."""

    def __init__(self, *, known: int = _KNOWN) -> None:
        self._most = known
        self._seen: OrderedDict[tuple[str, str], _Lengths] = OrderedDict()

    def expected(self, key: str, model: str) -> int:
        """Tokens that 95 of 100 answers do not exceed."""
        lengths = self._seen.get((key, model))
        return lengths.quantile if lengths is not None and lengths.total >= _ENOUGH else _UNKNOWN_TOKENS

    def note(self, key: str, model: str, tokens: int) -> None:
        """An answer that its client did not limit has ended by itself."""
        name = (key, model)
        lengths = self._seen.get(name)
        if lengths is None:
            if len(self._seen) >= self._most:
                self._seen.popitem(last=False)
            lengths = self._seen[name] = _Lengths()
        else:
            self._seen.move_to_end(name)
        lengths.add(tokens)


class _Lengths:
    __slots__ = ("_counts", "quantile", "total")

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self.total = 0
        self.quantile = _UNKNOWN_TOKENS

    def add(self, tokens: int) -> None:
        step = min(bisect_left(_UPPERS, tokens), len(_UPPERS) - 1)
        self._counts[step] = self._counts.get(step, 0) + 1
        self.total += 1
        if self.total >= _FORGETS_AT:
            self._counts = {step: count // 2 for step, count in self._counts.items() if count > 1}
            self.total = sum(self._counts.values())
        self.quantile = self._find()

    def _find(self) -> int:
        above = self.total * (1 - _QUANTILE)
        seen = 0
        for step in sorted(self._counts, reverse=True):
            seen += self._counts[step]
            if seen > above:
                return _UPPERS[step]
        return _UNKNOWN_TOKENS
