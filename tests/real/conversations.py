"""Growing multi-turn chats over six system prompts: several scripts, emoji, tools and their results."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

TOPICS = {
    "support": "You answer questions about orders, parcels and refunds for a small shop that ships to forty countries.",
    "中文": "你是一名严谨的技术助理。回答要简短、准确，先给结论，再给理由；不知道时直接说不知道。",
    "code": "You review Python code. You quote the line you speak of, and you never rewrite what works.",
    "travel": "You plan journeys by train. 🚆 Prefer few changes over short times; say when a connection is tight ⚠️.",
    "tools": "You look things up with the tools you are given before you answer, and you name the tool you used.",
    "عربي": "أجب عن الأسئلة بإيجاز ووضوح، واذكر المصدر إن وجد، ولا تخترع أرقاما.",
}
QUESTIONS = (
    "Where is my parcel? It was sent on Monday.",
    "为什么第二次请求比第一次快？",
    "What does `dict.setdefault(k, [])` do here?",
    "Two adults 👨‍👩‍👧 and a child, Lyon to Gdańsk, please.",
    "Look up order 4711 and tell me its state.",
    "ما الفرق بين الذاكرتين؟",
    "Please say that again, shorter.",
    "And what if it rains? ☔️",
    "列出三个要点。",
    "Ещё раз, пожалуйста, но по-русски.",
)
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find_order",
            "description": "State of an order 📦 by its number",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    },
    {
        "type": "function",
        "function": {"name": "today", "description": "今天的日期", "parameters": {"type": "object", "properties": {}}},
    },
]


@dataclass
class Conversation:
    messages: list[dict[str, Any]]
    questions: list[str]
    tools: list[dict[str, Any]] | None = None
    turn: int = 0
    said: int = 0  # tokens of the last prompt
    choices: random.Random = field(default_factory=random.Random)

    def next_body(self, model: str) -> dict[str, Any]:
        """The next request. Call `answered` with the engine's answer before asking for another."""
        self.messages.append({"role": "user", "content": self.questions[self.turn]})
        body: dict[str, Any] = {
            "model": model,
            "messages": self.messages,
            "max_tokens": self.choices.randrange(4, 32),
            "temperature": 0,
        }
        if self.tools:
            body["tools"] = self.tools
        if self.turn % 2:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body

    def answered(self, content: str) -> None:
        self.turn += 1
        if self.tools and self.turn % 3 == 1:
            call = {"name": "find_order", "arguments": json.dumps({"number": 4711 + self.turn})}
            calls = [{"id": "c1", "type": "function", "function": call}]
            self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
            self.messages.append({"role": "tool", "tool_call_id": "c1", "content": '{"state": "sent", "on": "週一"}'})
        self.messages.append({"role": "assistant", "content": content})

    @property
    def finished(self) -> bool:
        return self.turn >= len(self.questions)


def conversations(requests: int, seed: int) -> list[Conversation]:
    """Conversations of 5 to 10 turns that make `requests` requests in all."""
    dice = random.Random(seed)
    result = []
    while requests > 0:
        name = dice.choice(list(TOPICS))
        rules = " ".join(f"{i + 1}. {TOPICS[name]}" for i in range(12))  # long enough to be worth a cache
        turns = min(requests, dice.randrange(5, 11))
        requests -= turns
        questions = [_question(dice) for _ in range(turns)]
        result.append(
            Conversation(
                messages=[{"role": "system", "content": rules}],
                questions=questions,
                tools=TOOLS if name == "tools" else None,
                choices=random.Random(dice.random()),
            )
        )
    return result


def _question(dice: random.Random) -> str:
    return f"({dice.randrange(10**6)}) " + " ".join(dice.choices(QUESTIONS, k=dice.randrange(1, 6)))
