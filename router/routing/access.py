"""Which engines a request may use: its tenant's own, those with its caller's labels, those that keep its cache apart,
those that take what it carries.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from router.core import Ask

if TYPE_CHECKING:
    from router.routing.fleet import Rank

Unverified = Literal["refuse", "dedicated", "allow"]

OWNER = "tenant"
"""The label of an engine that is for one tenant alone."""
NOT_APART = "isolation: "
"""How a reason begins why a rank may not be used by somebody whose cache must be kept apart."""
NO_SALT = f"{NOT_APART}takes no cache salt on "
TAKES_NO = "takes no "
"""How a reason begins why a rank cannot serve a request that carries something beside text."""


def access_of(ask: Ask) -> tuple[object, ...]:
    """Equal for those who may use the same engines."""
    return ask.tenant, _is_of_tenant(ask), ask.isolated_on, ask.needs, *ask.labels.items()


def closed_to(rank: Rank, ask: Ask, unverified: Unverified) -> str:
    """Why the caller may not use it; empty if it may."""
    for need in ask.needs:
        if need in rank.lacks:
            return f"{TAKES_NO}{need}"
    labels = rank.instance.labels
    owner = labels.get(OWNER)
    if owner is not None and owner not in (ask.tenant, ask.labels.get(OWNER)):
        return "is kept for one tenant"
    for name, value in ask.labels.items():
        if labels.get(name) != value:
            return f"does not have the label {name}: {value}"
    if not ask.isolated_on or not rank.caches or ask.isolated_on in rank.kept_apart_on:
        return ""
    if unverified == "allow" or (unverified == "dedicated" and owner is not None and _is_of_tenant(ask)):
        return ""
    if rank.kept_apart_on:
        return f"{NO_SALT}{ask.isolated_on}"
    return f"{NOT_APART}{rank.isolation or 'not yet seen to honour cache salts'}"


def _is_of_tenant(ask: Ask) -> bool:
    """What its tenant has for itself is its own: not where each key has a domain."""
    return not ask.domain.startswith("key:")
