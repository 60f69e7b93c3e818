"""What an operator sets beside the policy's name: prices, the objective, and shadows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from router.core import Cost, Snapshot
from tests.flows.site import Client, Site, chat, essay, name, until


class Failing:
    def __init__(self, weights: Any, dice: Any) -> None: ...

    def costs(self, snapshot: Snapshot) -> Sequence[Cost]:
        raise RuntimeError("a shadow's own bug")


async def shadow_counts(client: Client) -> dict[tuple[str, ...], float]:
    """(metric, policy, and "yes" or "no" where it is about agreeing) → value."""
    page = (await client.running.live.metrics()).decode()
    counts: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            kind, shadow, what = sample.name.partition("warmroute_shadow_")
            if not kind and shadow:
                agrees = sample.labels.get("agrees")
                counts[(what, sample.labels["policy"], *([agrees] if agrees else []))] = sample.value
    return counts


async def test_shadows_are_scored_on_live_traffic_and_never_felt(site: Site) -> None:
    engines = [await site.engine() for _ in range(3)]
    failing = f"{__name__}:Failing"
    client = await site.gateway(*engines, policy={"shadow": ["lmetric", "round_robin", failing]})
    body = chat(essay("shadows"))
    answers = [await client.ask(body) for _ in range(9)]
    assert len({answer.instance for answer in answers}) == 1  # by cache, whatever round robin says

    async def scored() -> bool:
        return (await shadow_counts(client))["errors_total", failing] == 9

    await until(scored, what="all decisions are scored")
    counts = await shadow_counts(client)
    assert counts["decisions_total", "round_robin", "yes"] == 3
    assert counts["decisions_total", "round_robin", "no"] == 6
    assert counts["regret_total", "round_robin"] > 0
    assert counts["decisions_total", "lmetric", "yes"] + counts["decisions_total", "lmetric", "no"] == 9
    assert counts["decisions_total", failing, "yes"] + counts["decisions_total", failing, "no"] == 0


async def test_price_and_objective_reach_the_policy(site: Site) -> None:
    dear, cheap = [await site.engine() for _ in range(2)]
    client = await site.gateway(
        {"url": dear.url, "price_per_hour": 4.0},
        {"url": cheap.url, "price_per_hour": 1.0},
        policy={"weights": {"price": 1e6}, "ttft_slo_s": 2.0},
    )
    decision = await client.explain(chat(essay("prices")))
    parts = {candidate["instance"]: candidate["cost"]["parts"] for candidate in decision["candidates"]}
    assert decision["candidates"][0]["instance"] == name(cheap)
    assert parts[name(dear)]["price"] > parts[name(cheap)]["price"] > 0
    assert [part["slo"] for part in parts.values()] == [0, 0]
    rows = await client.rows()
    assert [row["price_per_hour"] for row in rows.values()] == [4.0, 1.0]
