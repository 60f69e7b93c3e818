"""How a client is told that a limit stands in its way: what limit, whose, and when it is worth another try."""

from __future__ import annotations

from collections.abc import Iterable

from router.errors import BudgetExceeded, RateLimited, StoreUnavailable, WarmrouteError
from router.serving.limits.meters import Meter

_SOON_S = 60.0
"""A client waits so long for its budget; for the rest of a month it must not."""
_SLOT_RETRY_S = 1.0
_AWAY_RETRY_S = 2.0


def refusal(full: Iterable[tuple[Meter, int]], now: float) -> WarmrouteError:
    """`full`: limits that have no room for so much. Told is the one whose window ends last."""
    meter, amount = max(full, key=lambda each: each[0].ends - now if each[0].window is not None else 0.0)
    fits_in_s = max(0.0, meter.ends - now)
    if meter.limit.measure == "money":
        soon = fits_in_s <= _SOON_S
        return BudgetExceeded(
            f"This request does not fit into {meter.name} any more.",
            retry_after_s=fits_in_s if soon else None,
            final=not soon,
        )
    if amount > meter.amount:
        return RateLimited(f"This request alone is more than {meter.name}.", final=True)
    retry_after_s = fits_in_s if meter.window is not None else _SLOT_RETRY_S
    return RateLimited(f"You have reached {meter.name}.", retry_after_s=retry_after_s)


def unchecked(meter: Meter) -> StoreUnavailable:
    """What the gateways share cannot be asked, and the limit wants to be known."""
    return StoreUnavailable("Your limits cannot be checked now; try again.", retry_after_s=_AWAY_RETRY_S)
