"""Routes of accounts that clients call at their base_url, passed on to the admin API, which knows keys and books.

It reads the key itself. But it is open to its own machine while it has no key, and so it would be to whoever comes
through here: nothing is passed on without one.
"""

from __future__ import annotations

from typing import NamedTuple

import httpx

from router.errors import BadRequest, BodyTooLarge, Unauthenticated, WarmrouteError
from router.http.messages import Request

ROUTES = {
    **dict.fromkeys(
        (
            *("/v1/usage", "/key/info", "/key/list", "/team/info", "/team/list", "/model/info", "/v1/model/info"),
            *("/spend/logs", "/spend/tags", "/global/spend/report"),
            *(f"{prefix}/dashboard/billing/{what}" for prefix in ("/v1", "") for what in ("subscription", "usage")),
        ),
        "GET",
    ),
    **dict.fromkeys(("/key/generate", "/key/delete", "/key/regenerate", "/team/new", "/team/delete"), "POST"),
}
"""Path -> method."""

_KEYS = (b"authorization", b"x-api-key", b"api-key")
_PASSED = (*_KEYS, b"content-type")
_MOST_BYTES = 64 * 1024
_TIMEOUT_S = 10.0


class AccountAnswer(NamedTuple):
    status: int
    content_type: bytes
    body: bytes


class AccountsUnavailable(WarmrouteError):
    status = 503
    type = "server_error"
    code = "admin_unavailable"


class AccountRelay:
    """`admin_url`: of the admin API, as this process reaches it."""

    def __init__(self, admin_url: str) -> None:
        self._http = httpx.AsyncClient(base_url=admin_url, timeout=_TIMEOUT_S, trust_env=False)

    async def __call__(self, request: Request) -> AccountAnswer:
        """Raises Unauthenticated, BadRequest, BodyTooLarge, AccountsUnavailable."""
        if not any(request.named.get(name) for name in _KEYS):
            raise Unauthenticated("No API key was given. Send it as 'Authorization: Bearer KEY'.")
        if len(request.body) > _MOST_BYTES:
            raise BodyTooLarge(f"The request body is larger than {_MOST_BYTES} bytes.")
        headers = [(name, request.named[name]) for name in _PASSED if name in request.named]
        try:
            url = httpx.URL(path=request.path, query=request.query)
            answer = await self._http.request(request.method, url, headers=headers, content=request.body)
        except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeError) as error:
            raise BadRequest("The request cannot be passed on as it is.") from error
        except httpx.HTTPError as error:
            raise AccountsUnavailable("The admin API does not answer now; try again.") from error
        content_type = answer.headers.get("content-type", "application/json")
        return AccountAnswer(answer.status_code, content_type.encode(), answer.content)

    async def aclose(self) -> None:
        await self._http.aclose()
