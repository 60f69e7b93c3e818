"""Where a text may be cut so that the tokens of its pieces are the tokens of the whole.

Two kinds of places: before a special token that starts a turn (no merge ever crosses one), and, inside long texts, at
places where every common pre-tokenizer begins anew. Each kind is tried on probe texts with the tokenizer at hand, and
one that ever changes a token is not used. A cut depends only on the text from the piece's start up to the cut, so a
text that grows keeps all its cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from router.serving.prompt.reason import Unreadable
from router.serving.prompt.template import ChatTemplate
from router.serving.prompt.tokenizer import Tokenizer

LEAST = 2_048
"""Characters between two cuts that are not at a special token."""
_WINDOW = 256
_LETTER = r"[^\W\d_]"
_SPACE = re.compile(rf" (?<=\S )(?={_LETTER})")  # the space first: the search for one character is the fastest
_LINE_END = re.compile(rf"\n(?={_LETTER})")
_CLAUSE_END = re.compile(rf"[。，！？；、](?={_LETTER})")  # Chinese and Japanese do without spaces


def _word(text: str, start: int, stop: int) -> int:
    """Between something visible and a single space with a letter behind it."""
    at = text.find(" ", start, stop)  # nearly always the place, and found four times as fast as by the expression
    if 0 <= at < stop - 1 and text[at + 1].isalpha() and not text[at - 1].isspace():
        return at
    found = _SPACE.search(text, start, stop)
    return found.start() if found is not None else -1


def _line(text: str, start: int, stop: int) -> int:
    """After a single line end, between something visible and a letter."""
    for found in _LINE_END.finditer(text, start, stop):
        at = found.start()
        if not text[at - 1].isspace():
            return at + 1
    return -1


def _clause(text: str, start: int, stop: int) -> int:
    """Before a CJK punctuation mark between two letters."""
    for found in _CLAUSE_END.finditer(text, start, stop):
        at = found.start()
        if text[at - 1].isalpha():
            return at
    return -1


def _nowhere(text: str, start: int, stop: int) -> int:
    return -1


KINDS: Mapping[str, Callable[[str, int, int], int]] = {
    "word": _word,
    "line": _line,
    "clause": _clause,
}
"""Each finds its first place among text[start:stop], or -1. text[start - 1] exists."""


class Cutter:
    """Cuts one model's prompts."""

    def __init__(self, turn_starts: Iterable[str], kinds: Iterable[str], *, least: int = LEAST) -> None:
        self.turn_starts = tuple(turn_starts)
        self.kinds = tuple(kinds)
        self.least = least
        self._places = [KINDS[kind] for kind in self.kinds]

    def cut(self, text: str) -> list[str]:
        """Pieces that make up `text` in order. None is empty."""
        pieces: list[str] = []
        start = 0
        for end in (*self._turns(text), len(text)):
            if end - start > self.least:
                self.cut_long(text, start, end, pieces)
            elif end > start:
                pieces.append(text[start:end])
            start = end
        return pieces

    def _turns(self, text: str) -> list[int]:
        found: list[int] = []
        for mark in self.turn_starts:
            at = text.find(mark, 1)
            while at > 0:
                found.append(at)
                at = text.find(mark, at + 1)
        if len(self.turn_starts) > 1:
            found.sort()
        return found

    def cut_long(self, text: str, start: int, end: int, pieces: list[str]) -> None:
        """Cuts text[start:end], within one turn and longer than `least`, and appends its pieces."""
        least, first_kind = self.least, self._places[0] if self._places else _nowhere
        look = start + least
        while look < end:
            stop = min(look + _WINDOW, end)
            at = first_kind(text, look, stop)
            # Other kinds only in whole windows: while the text grows, the first kind may still be found.
            if at < 0 and stop - look == _WINDOW:
                at = self._place_of_other_kind(text, look, stop)
            if at < 0:
                look += least  # looking at every character of a text without places to cut would take too long
                continue
            pieces.append(text[start:at])
            start, look = at, at + least
        pieces.append(text[start:end])

    def _place_of_other_kind(self, text: str, look: int, stop: int) -> int:
        for place in self._places[1:]:
            at = place(text, look, stop)
            if at > 0:
                return at
        return -1


def make_cutter(tokenizer: Tokenizer, templates: Iterable[ChatTemplate], *, least: int = LEAST) -> Cutter:
    """A cutter with every kind of place that the tokenizer was seen to respect."""
    starts = dict.fromkeys(mark for template in templates for mark in turn_starts(template, tokenizer.specials))
    trusted = [mark for mark in starts if _respects(tokenizer, Cutter([mark], [], least=1), _around(mark))]
    kinds = [kind for kind in KINDS if _respects(tokenizer, Cutter([], [kind], least=1), PROBES)]
    return Cutter(trusted, kinds, least=least)


def turn_starts(template: ChatTemplate, specials: frozenset[str]) -> list[str]:
    """The special tokens with which the template starts a turn, found by rendering conversations of marked texts.

    They are the first in the gap between two messages, but for the one that ends a message.
    """
    asked, answered = _gaps(template, ["user"]), _gaps(template, ["user", "assistant"])
    ends = {mark for gaps in (asked, answered) for mark in _specials_in(gaps[-1], specials)[:1]}
    found: dict[str, None] = {}
    for roles in (["system", "user", "assistant", "user"], ["user", "assistant", "user"]):
        for gap in _gaps(template, roles, add_generation_prompt=True)[1:]:
            starts = [mark for mark in _specials_in(gap, specials) if mark not in ends]
            found.update(dict.fromkeys(starts[:1]))
    return list(found)


def _gaps(template: ChatTemplate, roles: Sequence[str], *, add_generation_prompt: bool = False) -> list[str]:
    """What the template puts before, between and behind messages of these roles; nothing if it refuses them."""
    texts = [f"Xq{n}qX" for n in range(len(roles))]
    contents = [[{"type": "text", "text": text}] if template.iterates_content else text for text in texts]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]
    try:
        rendered = template.render(messages, add_generation_prompt=add_generation_prompt)
    except Unreadable:
        return [""]
    return re.split("|".join(texts), rendered)


def _specials_in(text: str, specials: frozenset[str]) -> list[str]:
    """In order of their place in the text, the longest where one starts with another."""
    places = [(text.find(mark), -len(mark), mark) for mark in specials if mark in text]
    return [mark for _, _, mark in sorted(places)]


def _respects(tokenizer: Tokenizer, cutter: Cutter, texts: Sequence[str]) -> bool:
    for text in texts:
        pieces = cutter.cut(text)
        joined = [token for ids in tokenizer.encode(pieces) for token in ids]
        if joined != tokenizer.encode([text])[0].tolist():
            return False
    return True


def _around(mark: str) -> list[str]:
    """The mark between texts that would like to merge with it."""
    sides = ("", " ", "\n", "\n\n", "a", "a ", " a", "1", "。", "<", "|>", "\t", "é", "🙂", "  ", ".\n")
    return [f"{left}{mark}{right}{mark}{left}" for left in sides for right in sides] + [
        mark.join(PROBES),
        mark.join(reversed(PROBES)),
    ]


PROBES = (
    "The quick brown fox doesn't jump over 13 lazy dogs; it's 4.50 EUR, isn't it? I'll say so -- again and again.",
    "One  two   three    four \t five\n\nsix\n seven\n  eight \n nine\r\nten\r\n\r\neleven\n\n\n twelve\n\n\nthirteen",
    "你好世界，今天的天气很好。我们一起去公园散步吧！然后吃饭，好吗？好、的；第3天。北京 上海 东京",
    "こんにちは、世界。カタカナとひらがな、漢字！ありがとう ございます。안녕하세요 세계, 오늘 날씨가 좋아요.",
    "Привет мир, как дела? Ελληνικά και άλλα. مرحبا بالعالم، كيف الحال؟ שלום עולם. नमस्ते दुनिया कैसे हैं।",
    "naïve café e\u0301 o\u0308 ﬁ ﬂ Å A\u030a ½ Ⅷ ² straße STRASSE İstanbul ıspanak ǆ ß don’t l’été d'accord",
    "🙂 👍🏽 👨‍👩‍👧 🚀✅ 🇫🇮🇸🇪 text🙂text 🙂 text ❤️ ok \u200b zero\u200dwidth \ufeff bom \x00 nul \x1f unit",
    "def f(a_b, c=1):\n    return {'k': [a_b[0], \"x\"]}\n\nclass A(B):\n\tx: int = 0x1F  # note\nx = y\nz = w\n",
    '{"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo", "days": [1, 3.5e-7]}}}\n',
    "# Title\n\n- item one\n- item two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n```python\nprint('hi')\n```\nend\n",
    "CamelCaseWords and snake_case_words and SCREAMING_CASE and kebab-case, e.g. v1.2.3-rc4+build5 http://a.b/c?d=e&f=%20",
    "a b c d e f g A B C I am a I'm a b's c's O'Neil rock 'n' roll 'tis we've THEY'LL x'y 's 'S ' s",
    "aaa aaaa aaaaa aaaaaaaaaa bbbbbbbbbb 1234567890 12 345 6789 1,000,000 3.14159 2026-11-29T10:00:00Z 50% $9 #1 @me",
    "by the way, in order to be one of the most of all at the end of the day, it is not as well as I would like to see",
    " leading space and trailing space ",
    "",
)
