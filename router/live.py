"""`core.Live` over a running relay and brain: what operators may see, put together from what the parts know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from router.config import Config
from router.core import OPEN, Ask, Caller, Decision
from router.errors import BadRequest, Conflict, UnknownInstance, UnknownRoute
from router.roster import Roster
from router.routing.brain import Brain
from router.routing.feed import Feed
from router.routing.fleet import Fleet, Health, Rank
from router.routing.index import BlockIndex
from router.routing.trace_log import TraceLog
from router.routing.waiting_room import WaitingRoom
from router.serving.apis import APIS, FORMS, ROUTES
from router.serving.call import Call
from router.serving.identity import Identity
from router.serving.models import Models, ServedModel
from router.serving.split import Arm
from router.telemetry import Telemetry, in_slices


class LiveView:
    """What operators may see and do; books nothing. `draining`: the gateway itself is about to end."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        brain: Brain,
        models: Models,
        roster: Roster,
        telemetry: Telemetry,
        trace_log: TraceLog,
        clock: Callable[[], float],
        config: Callable[[], Config],
        compare: Callable[[], Awaitable[dict[str, Any]]],
        reload: Callable[[], Awaitable[dict[str, Any]]],
        shadows: Callable[[], Mapping[str, Mapping[str, float]]] = dict,
        identity: Identity | None = None,
        limits: Callable[[], Mapping[str, str]] = dict,
        isolation: Callable[[], dict[str, Any]] = dict,
    ) -> None:
        """`config`: the one in force. `compare`: how its file differs by now. `shadows`: what they found.

        `identity`: None where nobody is asked who they are. `limits`: how they are counted now.
        """
        self.draining = False
        self._fleet = fleet
        self._brain = brain
        self._models = models
        self._roster = roster
        self._telemetry = telemetry
        self._trace_log = trace_log
        self._clock = clock
        self._config = config
        self._compare = compare
        self._reload = reload
        self._shadows = shadows
        self._identity = identity
        self._limits = limits
        self._isolation = isolation

    async def fleet(self) -> list[dict[str, Any]]:
        waiting = [
            {"instance": url, "rank": 0, "health": "pending", "reason": reason}
            for url, reason in self._roster.pending.items()
        ]
        return [*map(dict, await in_slices(self._fleet.rows(self._clock()))), *waiting]

    async def explain(self, path: str, body: bytes, tenant: str | None = None) -> dict[str, Any]:
        """Raises BadRequest and UnknownModel as the route itself would, NoEngine where nobody can serve."""
        path = ROUTES.get(path, path)
        if path not in APIS or path in FORMS:
            raise UnknownRoute("There is no such route with a JSON body.")
        if not body:
            raise BadRequest("The request body is empty.", code="invalid_json")
        call = Call(path, body, headers={}, models=self._models, caller=self._caller(tenant))
        if call.api.reads_prompt:
            prompt = await call.named.model.prompts.prepare(
                path, call.fields, domain=call.caller.domain, salt=call.salt, lora=call.named.lora
            )
        else:
            prompt = call.api.unread_prompt(call.fields, len(body))
        ask = call.ask("explain", prompt)
        decision = await self._brain.explain(ask)
        return {"request": _request(ask), **_decision(decision)}

    def _caller(self, tenant: str | None) -> Caller:
        if tenant is None:
            return OPEN
        caller = None if self._identity is None else self._identity.tenant(tenant)
        if caller is None:
            raise BadRequest(f"There is no tenant {tenant[:100]!r}.", param="tenant", code="unknown_tenant")
        return caller

    async def parity(self, model: str | None) -> list[dict[str, Any]]:
        return await self._roster.compare_again(model)

    async def readiness(self) -> dict[str, Any]:
        """Ready when some model has a ready engine. Says of each model how its prompts are read."""
        models: dict[str, Any] = {}
        for name, ranks in self._fleet.models().items():
            health = [rank.health for rank in ranks]
            prompts = self._roster.parity(name) if name in self._roster.prompts else {"state": "LOADING"}
            models[name] = {"ready": health.count(Health.READY), "ranks": len(ranks), "prompts": prompts}
        auth = {"mode": "open"} if self._identity is None else self._identity.state()
        serving = any(model["ready"] and model["prompts"]["state"] != "LOADING" for model in models.values())
        return {
            "ready": serving and not self.draining and auth.get("database") not in ("unread", "stale"),
            "draining": self.draining,
            "auth": auth,
            "models": models,
            "pending": dict(self._roster.pending),
            **({"limits": dict(limits)} if (limits := self._limits()) else {}),
        }

    # --- engines, and the configuration

    async def instances(self) -> list[dict[str, Any]]:
        joined = [self._instance(instance.id) for instance in self._fleet.instances()]
        pending = [{"id": url, "state": "pending", "reason": reason} for url, reason in self._roster.pending.items()]
        return [*joined, *pending]

    async def models(self) -> list[dict[str, Any]]:
        ranks, aliases = self._fleet.models(), self._config().aliases
        named = [self._model(model, ranks.get(model.name, ())) for model in self._models.served()]
        pending = [{"id": name, "state": "pending"} for name in self._models.missing() if name not in aliases]
        return [*named, *pending]

    def _model(self, model: ServedModel, ranks: Sequence[Rank]) -> dict[str, Any]:
        config = self._config()
        ready = sum(rank.health is Health.READY for rank in ranks)
        return {
            "id": model.name,
            "state": "split" if model.split else "ready" if ready else "unready",
            "aliases": list(model.aliases),
            "adapters": list(model.loras),
            "split": _shares(model.split),
            "fallbacks": list(model.fallbacks),
            "context_window_fallbacks": list(model.larger),
            "max_model_tokens": model.max_model_tokens,
            "policy": config.model(model.name).policy or config.policy.name,
            "instances": list(dict.fromkeys(rank.instance.id for rank in ranks)),
            "ranks": len(ranks),
            "ready": ready,
            "prompts": self._roster.parity(model.name) if model.name in self._roster.prompts else None,
        }

    async def policies(self) -> list[dict[str, Any]]:
        config, found = self._config(), self._shadows()
        models = {name: model.policy for name, model in config.models.items() if model.policy}
        return [
            {
                "id": name,
                "default": name == config.policy.name,
                "models": [model for model, policy in models.items() if policy == name],
                "weights": dict(config.policy.weights) if name == config.policy.name else {},
                "shadow": dict(found.get(name, {})) if name in config.policy.shadow else None,
            }
            for name in dict.fromkeys((config.policy.name, *models.values(), *config.policy.shadow))
        ]

    async def config(self) -> dict[str, Any]:
        return {"config": self._config().model_dump(mode="json"), **await self._compare()}

    async def drain(self, instance_id: str) -> dict[str, Any]:
        self._known(instance_id)
        self._roster.drain(instance_id)
        return self._instance(instance_id)

    async def undrain(self, instance_id: str) -> dict[str, Any]:
        """It takes requests again if its polls say so."""
        self._known(instance_id)
        if self._roster.is_leaving(instance_id):
            raise Conflict(f"The engine {instance_id!r} is no longer configured: it goes when its requests have ended.")
        self._roster.undrain(instance_id)
        return self._instance(instance_id)

    def _known(self, instance_id: str) -> Sequence[Rank]:
        ranks = self._fleet.ranks(instance_id)
        if not ranks:
            raise UnknownInstance(f"There is no engine {instance_id[:100]!r}.")
        return ranks

    def _instance(self, instance_id: str) -> dict[str, Any]:
        ranks = self._known(instance_id)
        first = ranks[0]
        return {
            "id": instance_id,
            "url": first.instance.url,
            "engine": first.instance.engine,
            "model": first.instance.model,
            "state": first.health.value,
            "reason": first.reason,
            "leaving": self._roster.is_leaving(instance_id),
            "ranks": len(ranks),
            "booked_requests": sum(rank.booked.requests for rank in ranks),
        }

    async def reload(self) -> dict[str, Any]:
        return await self._reload()

    async def requests(self, request_id: str | None) -> list[dict[str, Any]]:
        receipts = self._telemetry.recent(request_id)
        if request_id is not None:
            decision = self._brain.receipt(request_id)
            if decision is not None:
                receipts = [receipt | {"decision": _decision(decision)} for receipt in receipts]
        return receipts

    async def metrics(self) -> bytes:
        return await self._telemetry.page()

    async def isolation(self) -> dict[str, Any]:
        return self._isolation()

    async def trace(self, position: int) -> tuple[list[bytes], int | None]:
        return self._trace_log.read(position)


def feed_counts(feed: Feed, index: BlockIndex) -> dict[str, int]:
    """What becomes `warmroute_kv_…_total`."""
    counts = feed.counts
    stats = index.stats()
    return {
        "batches": counts.batches,
        "blocks_stored": counts.stored,
        "blocks_removed": counts.removed,
        "blocks_ignored": counts.ignored,
        "events_skipped": counts.skipped,
        "batches_repeated": counts.repeated,
        "batches_unranked": counts.unranked,
        "stream_failures": counts.failures,
        "restarts": counts.lost["restart"],
        "gaps": counts.lost["gap"],
        "silences": counts.lost["silent"],
        "index_evictions": stats.evicted,
        "orphan_blocks_dropped": stats.orphans_expired,
    }


def room_figures(room: WaitingRoom | None, now: float) -> dict[str, float]:
    """What becomes `warmroute_room_…`; nothing where there is no waiting room."""
    if room is None:
        return {}
    held, stats = room.held, room.stats
    return {
        "waiting": len(room) - held,
        "held": held,
        "lacking_memory": room.lacking_memory,
        "oldest_seconds": room.oldest_s(now),
        "longest_seconds": stats.longest_wait_s,
        "placed_at_once_total": stats.placed_at_once,
        "placed_total": stats.placed,
        "refused_total": stats.refused,
        "expired_total": stats.expired,
        "left_total": stats.left,
    }


def _shares(split: Sequence[Arm]) -> dict[str, float]:
    """By model, together 1."""
    begins = (0.0, *(arm.upto for arm in split))
    return {arm.model: round(arm.upto - begin, 6) for arm, begin in zip(split, begins, strict=False)}


def _request(ask: Ask) -> dict[str, Any]:
    prompt = ask.prompt
    return {
        "model": ask.model,
        "lora": ask.lora,
        "tokens": prompt.tokens,
        "known_tokens": prompt.known_tokens,
        "prompt_source": prompt.source,
        "reason": prompt.reason,
        "turn": prompt.turn,
    }


def _decision(decision: Decision) -> dict[str, Any]:
    """Best first: every candidate with what is known of it and the parts of its cost."""
    scored = [
        {
            "cost": msgspec.to_builtins(scored.cost),
            **msgspec.to_builtins(scored.candidate),
        }
        for scored in decision.scored
    ]
    return {
        "policy": decision.policy,
        "reason": decision.reason,
        "took_us": decision.took_us,
        "candidates": scored,
        "filtered": dict(decision.filtered),
    }
