"""Whether tenants' caches are kept apart on real engines: counted in cached tokens, through the gateway.

    python -m tests.real.isolation --engines DIR [--kind vllm --kind sglang] [--json FILE]

On every route a prompt is asked by one tenant, by another, and by the first once more; and by the other with the salt
of the first in the body, in headers and in nested objects. Ends with 1 where anything was cached that must not be, or
nothing that should.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import uvloop

from router import config
from router.app import Running
from router.serving.isolation.salts import Salts
from router.store import migrate
from tests.accounts import PEPPER, Accounts
from tests.real.engines import CannotStart, RealEngines

WORDS = 160
"""Some blocks of 32 tokens."""
ABSENT = (403, 404)
"""The engine does not have the route, or does not say that it takes a salt there."""
SECRET = "s" * 32
ARGUMENTS = {"vllm": "--enable-scale-out"}
"""For /inference/v1/generate."""


def prompt() -> str:
    """Text that nobody has asked."""
    return " ".join(
        [secrets.token_hex(8), *(secrets.choice(("river", "stone", "cloud", "field")) for _ in range(WORDS))]
    )


def bodies(model: str, text: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(name, path, body) of every way to ask the same."""
    chat = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": 1}
    yield "chat", "/v1/chat/completions", chat
    yield "chat, streamed", "/v1/chat/completions", {**chat, "stream": True, "stream_options": {"include_usage": True}}
    yield "completion", "/v1/completions", {"model": model, "prompt": text, "max_tokens": 1}
    ids = [1_000 + byte for byte in text.encode()]
    yield "completion of ids", "/v1/completions", {"model": model, "prompt": ids, "max_tokens": 1}
    yield "responses", "/v1/responses", {"model": model, "input": text, "max_output_tokens": 4}
    yield "messages", "/v1/messages", chat
    generate = {"model": model, "token_ids": ids, "sampling_params": {"max_tokens": 1}}
    yield "generate", "/inference/v1/generate", generate


def forgeries(salt: str) -> Iterator[tuple[str, dict[str, Any], dict[str, str]]]:
    """(name, fields, headers) by which a caller may try to be in another's domain."""
    yield "cache_salt", {"cache_salt": salt}, {}
    yield "cache_salt in a list", {"cache_salt": [salt]}, {}
    yield "cache_salt, empty", {"cache_salt": ""}, {}
    yield "cache_salt, null", {"cache_salt": None}, {}
    yield "extra_key", {"extra_key": salt}, {}
    yield "headers", {}, {"x-cache-salt": salt, "cache_salt": salt, "x-override-cache-salt": salt, "cache-salt": salt}
    for name in ("extra_body", "vllm_xargs", "sampling_params", "extra_args", "custom_params", "metadata"):
        yield name, {name: {"cache_salt": salt, "extra_key": salt}}, {}
    yield "kv_transfer_params", {"kv_transfer_params": {"cache_salt": salt}}, {}
    yield "chat_template_kwargs", {"chat_template_kwargs": {"cache_salt": salt}}, {}
    yield "stream_options", {"stream": True, "stream_options": {"include_usage": True, "cache_salt": salt}}, {}


RAW_FORGERIES = 3


def raw_forgeries(body: dict[str, Any], salt: str) -> Iterator[tuple[str, bytes]]:
    """The same key in ways that parsers read differently."""
    written = json.dumps(body)[:-1]
    yield "escaped key", f'{written}, "cache\\u005fsalt": "{salt}"}}'.encode()
    yield "key twice", f'{written}, "cache_salt": "other", "cache_salt": "{salt}"}}'.encode()
    yield "key first", f'{{"cache_salt": "{salt}", {written[1:]}}}'.encode()


def cached_tokens(answer: httpx.Response) -> int:
    """Of an answer of any API, whole or streamed: the most that any usage in it tells."""
    if answer.headers["content-type"].startswith("text/event-stream"):
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    else:
        events = [answer.json()]
    holders = [holder for event in events for holder in (event, event.get("response"), event.get("message")) if holder]
    return max([_of_usage(holder["usage"]) for holder in holders if holder.get("usage")], default=0)


def _of_usage(usage: Mapping[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0)


class Tenants:
    """A gateway in this process, and two tenants with a key each: A and B."""

    def __init__(self, urls: list[str], state: Path, **sections: Any) -> None:
        """`sections`: what else the configuration says."""
        settings = {
            "listen": {"port": 0},
            "admin": {"port": 0},
            "state_dir": str(state),
            "engines": [{"url": url} for url in urls],
            "auth": {"mode": "keys", "pepper": PEPPER},
            "isolation": {"secret": SECRET},
            **sections,
        }
        (state / "warmroute.yaml").write_text(json.dumps(settings))
        self._ranks = len(urls)
        self._state = state
        self._running = Running(config.load(state / "warmroute.yaml", environ={}), admin="off")
        self._keys: dict[str, str] = {}
        self._ids: dict[str, str] = {}

    async def __aenter__(self) -> Tenants:
        database = await migrate.open_store(None, self._state)
        accounts = Accounts(database)
        for name in ("A", "B"):
            self._ids[name] = await accounts.tenant(name)
            self._keys[name] = await accounts.key(await accounts.project(self._ids[name]))
        await database.aclose()
        await self._running.__aenter__()
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=self._running.url, timeout=600, trust_env=False, limits=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()
        await self._running.__aexit__(None, None, None)

    def salt(self, name: str) -> str:
        """What engines are told for the tenant, which nobody but them and the gateway knows."""
        return str(Salts(SECRET.encode()).of(f"tenant:{self._ids[name]}"))

    async def verified(self) -> list[dict[str, Any]]:
        """The engines once all have been asked whether they keep caches apart."""
        for _ in range(600):
            rows: list[dict[str, Any]] = (await self._running.live.isolation())["engines"]
            models = (await self._running.live.readiness())["models"].values()
            read = all(model["prompts"]["state"] not in ("LOADING", "UNCHECKED") for model in models)
            if read and len(rows) == self._ranks and all(row["verified"] for row in rows):
                return rows
            await asyncio.sleep(0.1)
        raise TimeoutError(f"not verified: {await self._running.live.isolation()}")

    async def report(self) -> dict[str, Any]:
        return await self._running.live.isolation()

    async def ask(
        self, who: str, path: str, body: dict[str, Any] | bytes, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await self._http.post(
            path,
            content=content,
            headers={
                "content-type": "application/json",
                "authorization": f"Bearer {self._keys[who]}",
                **(headers or {}),
            },
        )

    async def first_token_s(self, who: str, body: dict[str, Any]) -> float:
        """Of a streamed chat that is read to its end."""
        began, first = time.monotonic(), None
        headers = {"authorization": f"Bearer {self._keys[who]}"}
        async with self._http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code}: {(await answer.aread())[:500]!r}")
            async for line in answer.aiter_lines():
                if first is None and line.startswith("data: {") and json.loads(line[6:])["choices"]:
                    first = time.monotonic()
        assert first is not None, "an answer without a token"
        return first - began


async def examine(urls: list[str], model: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        async with Tenants(urls, Path(folder)) as tenants:
            engines = await tenants.verified()
            routes = [await _route(tenants, model, name, path) for name, path, _ in bodies(model, "")]
            forged = [row async for row in _forged(tenants, model)]
            report = await tenants.report()
    return {
        "engines": [{name: row[name] for name in ("version", "method", "detail", "kept_apart_on")} for row in engines],
        "routes": routes,
        "forged": forged,
        "domains": report["domains"],
    }


async def _route(tenants: Tenants, model: str, name: str, path: str) -> dict[str, Any]:
    """The same prompt by A, by B, and by each again."""
    body = _body(model, name)
    first = await tenants.ask("A", path, body)
    if first.status_code in ABSENT:
        return {"route": name, "skipped": first.json()["error"]["code"]}
    assert first.status_code == 200, f"{name}: {first.text[:500]}"
    answers = [first, *[await tenants.ask(who, path, body) for who in "BAB"]]
    return {
        "route": name,
        **dict(zip(("first", "other_tenant", "same_tenant", "other_again"), map(cached_tokens, answers), strict=True)),
        "predicted": [int(answer.headers["x-warmroute-predicted-tokens"]) for answer in answers],
    }


async def _forged(tenants: Tenants, model: str) -> AsyncIterator[dict[str, Any]]:
    """For each route and forgery a prompt of its own: what B finds of what A has computed."""
    salt = tenants.salt("A")
    for route, path, _ in bodies(model, ""):
        if (await tenants.ask("A", path, _body(model, route))).status_code in ABSENT:
            continue
        for name, fields, headers in forgeries(salt):
            body = _body(model, route)
            await tenants.ask("A", path, body)
            if name == "sampling_params" and name in body:
                fields = {name: {**body[name], **fields[name]}}
            yield _found(route, name, await tenants.ask("B", path, {**body, **fields}, headers))
        for number in range(RAW_FORGERIES):
            body = _body(model, route)
            await tenants.ask("A", path, body)
            name, raw = list(raw_forgeries(body, salt))[number]
            yield _found(route, name, await tenants.ask("B", path, raw))


def _body(model: str, name: str) -> dict[str, Any]:
    """With a prompt that nobody has asked."""
    return next(body for route, _, body in bodies(model, prompt()) if route == name)


def _found(route: str, name: str, answer: httpx.Response) -> dict[str, Any]:
    cached = cached_tokens(answer) if answer.status_code == 200 else None
    return {"route": route, "by": name, "status": answer.status_code, "cached": cached}


def judge(figures: dict[str, Any]) -> list[str]:
    missed = []
    for row in figures["routes"]:
        if "skipped" in row:
            continue
        if row["first"] or row["other_tenant"]:
            missed.append(f"{row['route']}: another tenant's cache was reused")
        if not row["same_tenant"] or not row["other_again"]:
            missed.append(f"{row['route']}: nothing was cached for the tenant itself")
        if any(row["predicted"][:2]):
            missed.append(f"{row['route']}: a hit was predicted on another tenant's blocks")
    for row in figures["forged"]:
        if row["cached"] or row["status"] not in (200, 400):
            missed.append(f"{row['route']}, {row['by']}: status {row['status']}, {row['cached']} tokens cached")
    return missed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=Path, required=True, help="folder with start_vllm.sh and start_sglang.sh")
    parser.add_argument("--kind", action="append", choices=("vllm", "sglang"))
    parser.add_argument("--running", action="store_true", help="the engines run already, one of each kind")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {}
    missed: list[str] = []
    for kind in options.kind or ["vllm", "sglang"]:
        engines = RealEngines(kind, options.engines, count=1 if options.running else 2, arguments=ARGUMENTS)
        try:
            if not options.running:
                print(f"starting two {kind} servers …", flush=True)
                engines.start()
            model = httpx.get(engines.urls[0] + "/v1/models", timeout=10).json()["data"][0]["id"]
            figures[kind] = uvloop.run(examine(engines.urls, model))
            print(json.dumps(figures[kind], indent=1), flush=True)
            missed += [f"{kind}: {what}" for what in judge(figures[kind])]
        except CannotStart as reason:
            print(f"SKIPPED {kind}: {reason}")
            figures[kind] = {"skipped": str(reason)}
        finally:
            if not options.running:
                engines.stop()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    for line in missed:
        print("MISSED", line)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
