"""Which limits a caller has: all of its key, its project and its tenant."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

from router.core import Caller
from router.serving.limits.holds import CallerLimits
from router.serving.limits.meters import Meter
from router.store.limits import Limit

log = logging.getLogger("warmroute")

_CALLERS = 100_000


class LimitBook:
    """In memory, whole; changed by `learn`. A limit whose amount changes keeps its meter.

    is_read: what the tables say has been seen once.
    """

    def __init__(self) -> None:
        self.is_read = False
        self._meters: dict[str, Meter] = {}
        self._of_owner: dict[str, list[Meter]] = {}
        self._of_caller: dict[str, CallerLimits | None] = {}

    def of(self, caller: Caller) -> CallerLimits | None:
        """None: nothing limits it."""
        try:
            return self._of_caller[caller.key or caller.tenant]
        except KeyError:
            return self._find(caller)

    def new_meters(self, limits: Iterable[Limit]) -> dict[str, Meter]:
        """For limits that are not known yet; not used before `learn` is given them."""
        made: dict[str, Meter] = {}
        for limit in limits:
            if limit.id not in self._meters and not limit.is_archived:
                try:
                    made[limit.id] = Meter(limit)
                except ValueError as error:
                    log.error("limit %s is not enforced: its window %s", limit.id, error)
        return made

    def learn(self, limits: Iterable[Limit], new: dict[str, Meter]) -> None:
        """Rows that are newer than what is known, and the meters of those among them that are new."""
        self._meters |= new
        for meter in new.values():
            self._of_owner.setdefault(meter.limit.owner, []).append(meter)
        for limit in limits:
            known = self._meters.get(limit.id)
            if known is None:
                continue
            if limit.is_archived:
                del self._meters[limit.id]
                self._of_owner[limit.owner].remove(known)
            else:
                known.become(limit)
        self._of_caller.clear()
        self.is_read = True

    def __iter__(self) -> Iterator[Meter]:
        return iter(self._meters.values())

    def _find(self, caller: Caller) -> CallerLimits | None:
        """Kept for each key; for callers without one for each tenant."""
        if len(self._of_caller) >= _CALLERS:
            self._of_caller.clear()
        owners = (caller.key, caller.project, caller.tenant)
        meters = [meter for owner in owners if owner for meter in self._of_owner.get(owner, ())]
        found = CallerLimits(*[
            tuple([meter for meter in meters if meter.limit.measure == measure]) for measure in CallerLimits._fields
        ])  # fmt: skip
        self._of_caller[caller.key or caller.tenant] = found if meters else None
        return self._of_caller[caller.key or caller.tenant]
