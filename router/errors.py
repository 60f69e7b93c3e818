"""The error tree. Foreign errors are translated once, at the border; ours are rendered in the client's dialect.

    WarmrouteError
    ├── ConfigError                   a configuration that cannot start; carries every mistake with its line
    ├── ClientError                   the client's request is at fault               4xx
    │   ├── BadRequest                  400 invalid_request_error
    │   ├── ContextTooLong              400 no engine of the model takes so long a prompt
    │   ├── Unauthenticated             401
    │   ├── Forbidden                   403 a valid key that may not do this
    │   ├── RateLimited                 429 too many requests or tokens for now; Retry-After
    │   ├── BudgetExceeded              429 the money of the window is spent; SDKs must not try again
    │   ├── UnknownModel                404 model_not_found
    │   ├── UnknownRoute                404
    │   ├── MethodNotAllowed            405
    │   ├── RequestTimeout              408 the request did not come whole in time
    │   ├── BodyTooLarge                413
    │   ├── UnsupportedEncoding         415
    │   ├── UnknownInstance             404 on the admin API
    │   ├── UnknownObject               404 on the admin API: no tenant, project, key … of this id
    │   ├── Conflict                    409 on the admin API: not as things stand
    │   └── ClientGone                  499, never sent
    ├── ShuttingDown                  503 the gateway itself goes: nobody is at fault
    ├── StoreUnavailable              503 what only the database knows is not known now
    └── EngineError                   an engine, or all of them, are at fault        5xx
        ├── NoEngine                    503 nobody can serve this model now
        ├── RoomFull                    503 more is waiting than can be served in time
        ├── WaitedTooLong               503 no engine was free in time
        ├── EngineUnreachable           502 no connection, or it broke before an answer
        │   └── EngineTlsError            its certificate, or ours, is not accepted: nothing was sent
        ├── EngineTimeout               504
        ├── Quarantined                 502 engines died over this request
        └── EngineProtocolError         502 an answer that is not what the protocol says

`message` is for the client: never an upstream host, a key, SQL or a trace. `detail` is for the operator's log.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence

_PLACES = 4


def place_of(mistake: BaseException) -> str:
    """The kind and the place of a mistake of ours; never its text, which may quote a prompt, a key or SQL."""
    frames = traceback.extract_tb(mistake.__traceback__)[-_PLACES:]
    return f"{type(mistake).__name__} at {' < '.join(f'{frame.name}:{frame.lineno}' for frame in reversed(frames))}"


class WarmrouteError(Exception):
    """status: HTTP status; type and code: the OpenAI error object's fields. final: clients must not try again by
    themselves, although the status is one after which their SDKs do."""

    status = 500
    type = "internal_error"
    code: str | None = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        detail: str = "",
        retry_after_s: float | None = None,
        final: bool = False,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        self.detail = detail
        self.retry_after_s = retry_after_s
        self.final = final


class ConfigError(WarmrouteError):
    """`mistakes`: one line each, with file and line number where known."""

    def __init__(self, mistakes: Sequence[str]) -> None:
        super().__init__("\n".join(mistakes))
        self.mistakes = tuple(mistakes)


class ClientError(WarmrouteError):
    status = 400
    type = "invalid_request_error"


class BadRequest(ClientError):
    pass


class ContextTooLong(ClientError):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, tokens: int, longest: int) -> ContextTooLong:
        return cls(f"The model takes at most {longest} tokens; this prompt has {tokens}.")


class Unauthenticated(ClientError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(ClientError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class RateLimited(ClientError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class BudgetExceeded(ClientError):
    status = 429
    type = "budget_exceeded"
    code = "budget_exceeded"


class UnknownModel(ClientError):
    status = 404
    code = "model_not_found"


class UnknownRoute(ClientError):
    status = 404
    code = "unknown_url"


class MethodNotAllowed(ClientError):
    status = 405
    code = "method_not_allowed"


class RequestTimeout(ClientError):
    status = 408
    code = "request_timeout"


class BodyTooLarge(ClientError):
    status = 413
    code = "request_too_large"


class UnsupportedEncoding(ClientError):
    status = 415
    code = "unsupported_content_encoding"


class ClientGone(ClientError):
    status = 499
    code = "client_gone"


class UnknownInstance(ClientError):
    status = 404
    code = "instance_not_found"


class UnknownObject(ClientError):
    status = 404
    code = "not_found"


class Conflict(ClientError):
    status = 409
    code = "conflict"


class ShuttingDown(WarmrouteError):
    status = 503
    type = "server_error"
    code = "shutting_down"


class StoreUnavailable(WarmrouteError):
    status = 503
    type = "server_error"
    code = "store_unavailable"


class EngineError(WarmrouteError):
    status = 502
    type = "server_error"


class NoEngine(EngineError):
    status = 503
    code = "no_engine_available"


class RoomFull(EngineError):
    status = 503
    code = "overloaded"


class WaitedTooLong(EngineError):
    status = 503
    code = "queue_timeout"


class EngineUnreachable(EngineError):
    status = 502
    code = "engine_unreachable"


class EngineTlsError(EngineUnreachable):
    """`code` says what failed: tls_verify_failed (its certificate), tls_handshake_failed, tls_files (ours).

    Where it stands for a state, for operators, `message` begins with the code.
    """

    code = "tls_handshake_failed"


class Quarantined(EngineError):
    code = "quarantined"


class EngineTimeout(EngineError):
    status = 504
    code = "engine_timeout"


class EngineProtocolError(EngineError):
    status = 502
    code = "engine_protocol_error"
