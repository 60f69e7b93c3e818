"""How much of the engines' KV memory each tenant's requests will hold by the ends of their answers.

Answers fill the memory, and only their ends free it: a tenant that sends many would leave no room for a request of
another until then. So whoever holds much more than the others is let in only where all that has been placed there still
fits once every answer is as long as answers of its tenant are; others may use what is free now (`room_memory.py`). Who
has least of a resource is to get it first: DRF (Ghodsi et al., NSDI '11).
"""

from __future__ import annotations

from collections import OrderedDict

LEAD = 1.25
"""Who holds more than so many times the mean holds much more: where two are here, 5 of 8 parts of what both hold."""
HERE_S = 600.0
"""A tenant counts as here for so long after its last request: others are not to fill what it will need."""
EXPECTED_OUTPUT_TOKENS = 256
"""Of an answer nothing is known of; a request's own limit counts where it is lower."""
MOST_ASSUMED_TOKENS = 1_024
"""The first answers of a tenant are thought to be as long as it allows them to be, up to this."""
ANSWER_GAIN = 0.05
"""How much of a tenant's mean a further answer makes up."""
_TENANTS = 10_000
"""So many are remembered at most."""


def expected_output(limit: int | None) -> int:
    """Tokens of an answer nothing is known of but what its request allows."""
    return EXPECTED_OUTPUT_TOKENS if limit is None or limit > EXPECTED_OUTPUT_TOKENS else limit


class TenantMemory:
    """Tokens of KV cache by tenant. Times by any one clock, in seconds."""

    __slots__ = ("_answers", "_held", "_here", "_total")

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total = 0
        self._here: OrderedDict[str, float] = OrderedDict()  # when it last sent something, the longest ago first
        self._answers: OrderedDict[str, float] = OrderedDict()  # mean length, the longest unheard of first

    def answer_tokens(self, tenant: str, limit: int | None) -> int:
        """How long the tenant's next answer will be: like those before, and no longer than `limit`."""
        unknown = EXPECTED_OUTPUT_TOKENS if limit is None else MOST_ASSUMED_TOKENS
        expected = int(self._answers.get(tenant, unknown))
        return expected if limit is None or limit > expected else limit

    def answered(self, tenant: str, output_tokens: int) -> None:
        """An answer of the tenant has been written to its end."""
        mean = self._answers.pop(tenant, float(output_tokens))
        self._answers[tenant] = mean + ANSWER_GAIN * (output_tokens - mean)
        if len(self._answers) > _TENANTS:
            self._answers.popitem(last=False)

    def came(self, tenant: str, now: float) -> None:
        """The tenant has sent a request."""
        here = self._here
        here[tenant] = now
        here.move_to_end(tenant)
        while len(here) > _TENANTS or here[next(iter(here))] < now - HERE_S:
            here.popitem(last=False)

    def hold(self, tenant: str, tokens: int) -> None:
        """A request of the tenant was placed, which will hold so much that nobody does yet."""
        self._held[tenant] = self._held.get(tenant, 0) + tokens
        self._total += tokens

    def free(self, tenant: str, tokens: int) -> None:
        """It is over."""
        left = self._held[tenant] - tokens
        self._total -= tokens
        if left:
            self._held[tenant] = left
        else:
            del self._held[tenant]

    def lead(self, tenant: str) -> float:
        """How many times the mean of those who are here it holds; 1 for one that is here alone."""
        here = len(self._here)
        return self._held.get(tenant, 0) * here / self._total if here > 1 and self._total else 1.0
