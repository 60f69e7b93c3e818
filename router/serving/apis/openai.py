"""OpenAI's chat and completions, and vLLM's route for prompts that are token ids already."""

from __future__ import annotations

from router.serving.apis.api import Api, Fields, limit_of
from router.serving.sse import EventRelay, SseRelay

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_MOST_CHOICES = 16_384  # vLLM refuses more


class Chat(Api):
    reads_prompt = True
    asks_for_usage = True

    def choices(self, fields: Fields) -> int:
        n = fields.get("n")
        return min(n, _MOST_CHOICES) if type(n) is int and n > 0 else 1

    def output_limit(self, fields: Fields) -> int | None:
        name = "max_completion_tokens" if "max_completion_tokens" in fields else "max_tokens"
        return limit_of(fields.get(name))

    def relay(self, *, wants_usage: bool, choices: int) -> EventRelay:
        return SseRelay(hide_usage=not wants_usage, choices=choices)


class Completions(Chat):
    def choices(self, fields: Fields) -> int:
        """n, times the prompts of a batch."""
        choices, prompt = super().choices(fields), fields.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            choices *= len(prompt)
        return choices


class Generate(Chat):
    """vLLM's `/inference/v1/generate`: `token_ids`, and `sampling_params` in an object of their own."""

    def choices(self, fields: Fields) -> int:
        return super().choices(_sampling(fields))

    def output_limit(self, fields: Fields) -> int | None:
        return limit_of(_sampling(fields).get("max_tokens"))


def _sampling(fields: Fields) -> Fields:
    params = fields.get("sampling_params")
    return params if isinstance(params, dict) else {}
