"""The routes that reach an engine, and the API each belongs to.

What vLLM 0.32 and SGLang 0.5.23 serve between them. An engine that lacks one says 404, and so does the gateway. Those
under /v1 are there without it too, for a `base_url` that has none; engines get them with it.
"""

from collections.abc import Mapping

from router.serving.apis.api import Api, Translation
from router.serving.apis.audio import Speech, Transcriptions
from router.serving.apis.messages import CountTokens, Messages
from router.serving.apis.openai import CHAT, COMPLETIONS, Chat, Completions, Generate
from router.serving.apis.plain import Light, Pooling
from router.serving.apis.responses import Responses

OPENAI = Api()
"""How errors are said where no route was met."""

_pooling, _light = Pooling(), Light()

APIS: Mapping[str, Api] = {
    CHAT: Chat(),
    COMPLETIONS: Completions(),
    "/inference/v1/generate": Generate(),
    "/v1/responses": Responses(),
    "/v1/messages": Messages(),
    "/v1/messages/count_tokens": CountTokens(),
    "/v1/audio/transcriptions": Transcriptions(),
    "/v1/audio/translations": Transcriptions(),
    "/v1/audio/speech": Speech(),
    "/v1/embeddings": _pooling,
    "/v2/embed": _pooling,  # Cohere's
    "/v1/rerank": _pooling,
    "/v2/rerank": _pooling,
    "/v1/score": _pooling,
    "/v1/classify": _pooling,  # SGLang
    "/classify": _pooling,  # vLLM
    "/pooling": _pooling,
    "/tokenize": _light,
    "/detokenize": _light,
}
"""By the path that engines know."""

FORMS = frozenset(path for path, api in APIS.items() if api.is_form)
"""Paths whose bodies are multipart/form-data."""

ROUTES: Mapping[str, str] = {
    **{path: path for path in APIS},
    **{path.removeprefix("/v1"): path for path in APIS if path.startswith("/v1/") and path != "/v1/classify"},
    "/v1/tokenize": "/tokenize",
    "/v1/detokenize": "/detokenize",
}
"""The path a client may ask for → the one that engines know."""

__all__ = ["APIS", "CHAT", "COMPLETIONS", "FORMS", "OPENAI", "ROUTES", "Api", "Translation"]
