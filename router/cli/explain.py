"""`warmroute explain`: where would this request go, and why?"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table
from rich.text import Text

from router.cli.figures import terminal, write_json
from router.cli.options import ConfigFile, JsonFile, read_config
from router.errors import EngineError

DEFAULT_URL = "http://127.0.0.1:4001"
TIMEOUT_S = 30.0


def explain(
    body: Annotated[str, typer.Argument(metavar="BODY.json", help="An OpenAI request body; - is standard input.")],
    config: ConfigFile = None,
    url: Annotated[str | None, typer.Option(help=f"The gateway's admin address. [default: {DEFAULT_URL}]")] = None,
    path: Annotated[str, typer.Option(help="The route the body is meant for.")] = "/v1/chat/completions",
    tenant: Annotated[str | None, typer.Option(help="Whose request it would be: id or name.")] = None,
    json: JsonFile = None,
) -> None:
    """Ask a running gateway where a request would go.

    Sends nothing to an engine, books nothing. Shows every candidate, best first, with the parts its cost is made of,
    and why the others were left out.
    """
    data = sys.stdin.buffer.read() if body == "-" else _read(Path(body))
    answer = _ask(url or _admin_url(config), {"path": path} | ({"tenant": tenant} if tenant else {}), data)
    if json:
        write_json(json, answer)
    if str(json) != "-":
        show(answer)


def show(answer: Mapping[str, Any]) -> None:
    """The decision as a table, then what was left out, then why the cache had no say, if so."""
    console = terminal()
    request = answer["request"]
    read = f"{request['tokens']:,} tokens, turn {request['turn']}, read {request['prompt_source']}"
    console.print(Text(f"{request['model']}: {read}"))
    console.print(_table(answer))
    for candidate, reason in answer["filtered"].items():
        console.print(Text(f"left out: {candidate}: {reason}"))
    for reason in filter(None, (request["reason"], answer["reason"])):
        console.print(Text(f"note: {reason}"))


def _table(answer: Mapping[str, Any]) -> Table:
    candidates = answer["candidates"]
    parts = list(dict.fromkeys(part for candidate in candidates for part in candidate["cost"]["parts"]))
    unit = candidates[0]["cost"]["unit"] if candidates else ""
    table = Table(title=f"policy {answer['policy']}, costs in {unit}: the least is taken", title_justify="left")
    table.add_column("candidate")
    for heading in ("cost", *parts, "cached tokens", "confidence", "booked", "running", "waiting"):
        table.add_column(heading, justify="right")
    for candidate in candidates:
        cost = candidate["cost"]
        table.add_row(
            Text(f"{candidate['instance']}/{candidate['rank']}"),  # not markup: an id may be [::1]:8000
            f"{cost['value']:,.1f}",
            *(f"{cost['parts'].get(part, 0.0):,.1f}" for part in parts),
            f"{candidate['hit_tokens']:,}",
            f"{candidate['confidence']:.2f}",
            *(str(candidate[field]) for field in ("booked_requests", "running", "waiting")),
        )
    return table


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file}: {error.strerror}", param_hint="BODY.json") from None


def _admin_url(config: Path | None) -> str:
    if config is None:
        return DEFAULT_URL
    admin = read_config(config, None).admin
    if not admin.enabled:
        raise typer.BadParameter(f"{config} has admin.enabled: false, so there is nobody to ask")
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(admin.host, admin.host)
    scheme = "https" if admin.tls else "http"
    return f"{scheme}://[{host}]:{admin.port}" if ":" in host else f"{scheme}://{host}:{admin.port}"


def _ask(url: str, params: Mapping[str, str], body: bytes) -> dict[str, Any]:
    try:
        response = httpx.post(f"{url}/admin/v1/explain", params=params, content=body, timeout=TIMEOUT_S)
        answer: dict[str, Any] = response.json()
    except httpx.HTTPError as error:
        raise EngineError(f"no gateway answers at {url} (is `warmroute serve` running?)", detail=str(error)) from error
    except ValueError as error:
        raise EngineError(f"{url} is not a warmroute admin API (HTTP {response.status_code})") from error
    if response.is_error:
        raise EngineError(_message(answer) or f"the gateway answered HTTP {response.status_code}")
    return answer


def _message(answer: Mapping[str, Any]) -> str:
    error = answer.get("error")
    return str(error.get("message", "")) if isinstance(error, Mapping) else str(answer.get("detail", ""))
