"""What the configuration means for the parts: each section in the terms of whom it is for."""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable

from router import plugins
from router.admin.serve import AdminSettings
from router.config import Auth, Config, Listen, ListenTls, PolicyChoice, WaitingRoom
from router.config.listen import asks_for_certificates, is_loopback
from router.core import Policy
from router.errors import ConfigError
from router.http.messages import Limits
from router.http.proxies import TrustedProxies
from router.routing.room_rule import RoomRule
from router.routing.shadow import Shadows
from router.routing.waiting_room import RoomLimits
from router.serving.identity import IdentityHeader
from router.state import audit_secret, pepper, store_url
from router.tls import ServerTls

CallAt = Callable[[float, Callable[[], None]], None]
"""Calls back at a time of the gateway's clock."""


def expected_models(config: Config) -> set[str]:
    """Names that clients may use as soon as their engines have joined."""
    named = {engine.model for engine in config.engines if engine.model is not None}
    arms = {arm for model in config.models.values() for arm in model.split}
    return named | arms | set(config.aliases) | (set(config.models) - {"*"})


def http_limits(listen: Listen) -> Limits:
    return Limits(
        head_bytes=int(listen.max_head_bytes),
        headers=listen.max_headers,
        connections=listen.max_connections,
        body_bytes=int(listen.max_body_bytes),
        keep_alive_s=listen.keep_alive_s,
        head_s=listen.head_s,
        body_idle_s=listen.body_idle_s,
        body_bytes_per_s=listen.body_bytes_per_s,
        stall_s=listen.stalled_reader_s,
    )


def identity_header(auth: Auth) -> IdentityHeader | None:
    if auth.header is None:
        return None
    peers = TrustedProxies(map(ipaddress.ip_network, auth.header.peers)) if auth.header.peers else None
    return IdentityHeader(auth.header.name.encode(), peers)


def admin_settings(config: Config) -> AdminSettings:
    admin, folder = config.admin, config.make_state_dir()
    auth = admin.auth
    return AdminSettings(
        host=admin.host,
        port=admin.port,
        tls=_server_tls(admin.tls),
        database_url=store_url(config, folder),
        pepper=pepper(config, folder),
        audit_secret=audit_secret(config, folder),
        bootstrap_key=None if auth.bootstrap_key is None else auth.bootstrap_key.get_secret_value(),
        open=is_loopback(admin.host) or asks_for_certificates(admin.tls),
        metrics_open=auth.metrics_open,
        oidc=None if auth.oidc is None else auth.oidc.model_dump(),
    )


def room_settings(settings: WaitingRoom) -> tuple[RoomRule, RoomLimits]:
    return (
        RoomRule(free_tokens=settings.free_tokens, head_start_max_s=settings.head_start_max_s, gap_s=settings.gap_s),
        RoomLimits(requests=settings.max_requests, body_bytes=int(settings.max_bytes), wait_s=settings.wait_s),
    )


def ttft_slo_ms(settings: PolicyChoice) -> Callable[[int], float] | None:
    """The objective for a prompt of so many tokens, ms. None: there is none."""
    if settings.ttft_slo_s is None:
        return None
    base, per_token = settings.ttft_slo_s * 1e3, settings.ttft_slo_per_1k_tokens_ms / 1e3
    return lambda tokens: base + per_token * tokens


def load_policies(config: Config, dice: random.Random) -> tuple[dict[str, Policy], dict[str, str]]:
    """Every policy the configuration names, and which model has one of its own."""
    by_model = {name: model.policy for name, model in config.models.items() if model.policy}
    policies: dict[str, Policy] = {}
    for name in {config.policy.name, *by_model.values()}:
        try:
            policies[name] = plugins.load(plugins.POLICIES, name)(weights(config.policy, name), dice)
        except ValueError as error:
            raise ConfigError([f"policy.weights: {error}"]) from error
    return policies, by_model


def open_shadows(settings: PolicyChoice, call_at: CallAt, clock: Callable[[], float]) -> Shadows | None:
    """With dice of their own: those of the policies that act do not feel them. None: there are none."""
    dice = random.Random()
    policies: dict[str, Policy] = {}
    for name in settings.shadow:
        try:
            policies[name] = plugins.load(plugins.POLICIES, name)({}, dice)
        except ValueError as error:
            raise ConfigError([f"policy.shadow: {name}: {error}"]) from error
    return Shadows(policies, call_at=call_at, clock=clock, dice=dice) if policies else None


def weights(settings: PolicyChoice, name: str) -> dict[str, float]:
    """Only the policy that is chosen for all has any."""
    return settings.weights if name == settings.name else {}


def _server_tls(tls: ListenTls | None) -> ServerTls | None:
    return None if tls is None else tls.settings()
