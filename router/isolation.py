"""How caches are kept apart, put together for reports and metrics from what the parts know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from router.config import Isolation
from router.prover import Prover
from router.routing.fleet import Fleet
from router.routing.footprint import Footprints
from router.serving.isolation.shadow import IsolationShadow

_SHOWN = 200  # domains on the metrics page, those that hold most


class IsolationView:
    """settings: as they are in force now."""

    def __init__(
        self,
        settings: Callable[[], Isolation],
        *,
        fleet: Fleet,
        prover: Prover,
        footprints: Footprints,
        shadow: IsolationShadow,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._prover = prover
        self._footprints = footprints
        self._shadow = shadow

    def report(self) -> dict[str, Any]:
        """`core.Live.isolation`."""
        settings = self._settings()
        return {
            "salt_version": settings.version,
            "unverified": settings.unverified,
            "cold_share": settings.cold_share,
            "engines": self._prover.rows(),
            "domains": self._domains(),
        }

    def _domains(self) -> dict[str, dict[str, Any]]:
        """By name: KV tokens and share of each model's memory, and what the domain loses by being apart."""
        found: dict[str, dict[str, Any]] = {}
        for model, ranks in self._fleet.models().items():
            for domain, tokens in self._footprints.tokens(ranks).items():
                share = round(self._footprints.share(domain, ranks), 4)
                held = {"kv_tokens": tokens, "kv_share": share}
                found.setdefault(domain, _nothing())["models"][model] = held
        for domain, counts in self._shadow.counts.items():
            shadow = {**msgspec.structs.asdict(counts), "lost_tokens": counts.lost_tokens}
            found.setdefault(domain, _nothing())["shadow"] = shadow
        found.pop("", None)  # of callers of no domain
        return found

    def figures(self) -> dict[str, dict[str, float]]:
        """What becomes `warmroute_isolation_…`, by name and label."""
        held: dict[str, float] = {}
        for ranks in self._fleet.models().values():
            for domain, tokens in self._footprints.tokens(ranks).items():
                held[domain] = held.get(domain, 0.0) + tokens
        held.pop("", None)
        most = sorted(held, key=held.__getitem__, reverse=True)[:_SHOWN]
        lost = {domain: float(counts.lost_tokens) for domain, counts in self._shadow.counts.items() if domain in held}
        return {
            "kv_tokens": {domain: held[domain] for domain in most},
            "lost_tokens": {domain: lost[domain] for domain in most if domain in lost},
            "verified": {row["instance"]: float(row["verified"]) for row in self._prover.rows()} if held else {},
        }


def _nothing() -> dict[str, Any]:
    return {"models": {}, "shadow": None}
