"""Which tenant has had least of the engines' time: start-time fair queueing over milliseconds of GPU work.

A tenant's next request starts at max(v, what the tenant has had), v being the start of whoever was served last: who has
been away gains no credit by it, and who comes back does not have to catch up. (Goyal, Vin and Cheng, SIGCOMM '96; for
LLM serving with counters instead of tags: VTC, OSDI '24.)
"""

from __future__ import annotations

from operator import itemgetter

_TENANTS = 10_000
"""So many are remembered at most."""


class TenantShares:
    """Milliseconds of work by tenant."""

    __slots__ = ("_had", "_served")

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        self._served = 0.0  # v

    def start(self, tenant: str) -> float:
        """The least goes first."""
        had = self._had.get(tenant, 0.0)
        return had if had > self._served else self._served

    def serve(self, tenant: str, work_ms: float) -> None:
        """A request of `tenant` is served, which will take so much."""
        start = self._served = self.start(tenant)
        self._had[tenant] = start + work_ms
        if len(self._had) > _TENANTS:
            self._forget_half()

    def charge(self, tenant: str, work_ms: float) -> None:
        """What was served took so much more than was thought."""
        self._had[tenant] = self.start(tenant) + work_ms
        if len(self._had) > _TENANTS:
            self._forget_half()

    def _forget_half(self) -> None:
        """Those who have had least: to start at v again is the smallest gain to them."""
        by_had = sorted(self._had.items(), key=itemgetter(1))
        self._had = {name: had for name, had in by_had[len(by_had) // 2 :] if had > self._served}
