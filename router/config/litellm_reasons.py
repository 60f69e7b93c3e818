"""What LiteLLM's configuration has and ours has not, and why."""

from __future__ import annotations

from collections.abc import Mapping

_NO_COUNTERPART = "has no counterpart here"
_LIMITS = "limits are a tenant's, project's or key's, not an engine's (POST /admin/v1/limits)"
_COOLDOWN = "after three failures in a row an engine is avoided for 5 to 20 s at a time"
_ELSEWHERE = "metrics are at :4001/metrics, costs in `warmroute report`"
_SAID_BY_CLIENTS = "requests go to engines as clients wrote them"
_REASONS: Mapping[str, str] = {
    "rpm": _LIMITS,
    "tpm": _LIMITS,
    "max_parallel_requests": _LIMITS,
    "weight": "a request goes where it is answered soonest (policy)",
    "order": "a request goes where it is answered soonest (policy)",
    "routing_strategy": "a request goes where it is answered soonest; policy.name has other rules",
    "allowed_fails": _COOLDOWN,
    "cooldown_time": _COOLDOWN,
    "drop_params": _SAID_BY_CLIENTS,
    "modify_params": _SAID_BY_CLIENTS,
    "temperature": _SAID_BY_CLIENTS,
    "max_tokens": _SAID_BY_CLIENTS,
    "extra_body": _SAID_BY_CLIENTS,
    "cache": "answers are not cached; prefixes are, by the engines",
    "cache_params": "answers are not cached; prefixes are, by the engines",
    "callbacks": _ELSEWHERE,
    "success_callback": _ELSEWHERE,
    "failure_callback": _ELSEWHERE,
    "database_url": "keys, teams and spend stay in LiteLLM's; give ours a database of its own as store.url",
    "store_model_in_db": "models are in the configuration file",
    "default_fallbacks": "write them under each model (models.NAME.fallbacks)",
    "content_policy_fallbacks": "engines of one's own have no content policy",
    "environment_variables": "set them where the gateway is started",
    "include": "import that file too, and join the two",
    "mode": "an engine's routes are what it serves",
    "base_model": "prices are taken from this file only",
}


def reason(key: str) -> str:
    return _REASONS.get(key, _NO_COUNTERPART)
