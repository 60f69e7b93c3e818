"""An engine's event stream on its way to the client: bytes in, bytes out, and what they tell.

Format: server-sent events (WHATWG HTML, §9.2). `EventRelay` knows events, `SseRelay` the chunks of OpenAI's chat and
completions in them; streams of named events are read in `apis/named_events.py`.

What is held, and why. A client cannot use part of an event, so an event that is not whole yet is held, at most
`HELD_BYTES` of it; whole events leave in the call that brought them. So every event is whole when it is looked at, no
marker hides on a boundary, and a stream that breaks never leaves half an event behind. An event larger than the bound
(a first chunk with the ids of a long prompt) passes as it comes, and is looked at as far as it was held.

What is changed. Nothing, for a client that asked for usage: its bytes are the engine's. From chunks for one that did
not ask, what is there only because we asked is taken away: an event that carries usage and no choices goes whole; from
an event with choices the `usage` member is cut, whether null or not, and its other bytes stay.

What is refused. An event that should be an object and is none: clients fail on it, and what it had to say is lost.

What ends it. `[DONE]`, or the event that says so, is not passed on but kept in `tail`, so that a request can be
accounted for before its client sees the end. An in-band error of the engine is kept in `error`, and what follows it
(vLLM 0.32: `[DONE]`) is dropped.

The first token is the first chunk that has choices: vLLM, SGLang, transformers and llama.cpp send the role-only chunk
when the first token is there, not before. Comments and keep-alives never count.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from router.core import Usage
from router.serving.splice import without
from router.serving.usage import parse_object, read_usage

HELD_BYTES = 64 * 1024
DONE = b"[DONE]"

_ENDS = (b"\n\n", b"\r\n\r\n")
_LINE_PAIRS = (b"\n\n", b"\n\r\n", b"\r\r")
_BOUNDARY = re.compile(rb"\n\n|\n\r\n|\r\r")
_EVENTS = re.compile(rb"(?s:.*?)(?:\n\n|\n\r\n|\r\r)|(?s:.+)\Z")
_FINISHED = re.compile(rb'"finish_reason"\s*+:\s*+"')
TORN = {"message": "an event is no JSON", "code": 502}
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text|arguments)"\s*+:\s*+"')
_REST_OF_STRING = re.compile(rb'[^"\\\n\r]*+(?:\\.[^"\\\n\r]*+)*+')
_NOTHING_KNOWN = b"\0"  # whole events end with the end of a line: none is between two of these
_LEARNED_IN_VAIN = 4
_HAS_CHOICES = re.compile(rb'"choices"\s*+:\s*+\[\s*+\{')


class EventRelay:
    """One answer's stream. What its events mean is the subclass's to say.

    begun        an event or comment has been passed on: the answer can no longer be turned into an error status
    first_token  an event that brings output has been seen
    usage        the last usage object of the engine, whatever else its event held
    done, tail   the end of the stream: the event that says so was seen, and `tail` is that event
    error        the engine's in-band error object; nothing is passed on any more
    events       whole events with data passed on: an estimate of output tokens where usage is missing
    inside       the client has part of an event: only after one larger than the bound
    """

    __slots__ = (
        "_held", "_seam", "_usage_at", "begun", "done", "error", "events", "first_token", "inside", "tail", "usage",
    )  # fmt: skip

    held_bytes = HELD_BYTES

    def __init__(self) -> None:
        self._held = bytearray()
        self._seam = b""  # the last bytes of an oversized event: its end may straddle two reads
        self.begun = False
        self.first_token = False
        self.usage: Usage | None = None
        self._usage_at = 0  # how many events there were with it
        self.done = False
        self.tail = b""
        self.error: dict[str, Any] | None = None
        self.events = 0
        self.inside = False

    @property
    def amid(self) -> bool:
        """Part of an event has come, and not the rest."""
        return self.inside or bool(self._held)

    @property
    def complete(self) -> bool:
        """The answer is whole: the engine said so."""
        return self.error is None and self.done

    @property
    def events_after_usage(self) -> int:
        """Output that the usage does not count yet, by estimate: the answer broke off before its end."""
        return max(0, self.events - self._usage_at)

    def take_usage(self, usage: Usage | None) -> None:
        """What the event that is being looked at says; None: nothing."""
        if usage is not None:
            self.usage, self._usage_at = usage, self.events + 1

    def feed(self, data: bytes) -> bytes:
        """What can be written to the client now."""
        if self.inside:
            return self._oversized(data)
        if self._held or not data.endswith(_ENDS):
            data = self._whole_events(data)
        passed = data if self._is_plain(data) else self._inspect(data)
        return passed + self._begin_oversized() if len(self._held) > self.held_bytes else passed

    def end(self) -> bytes:
        """The engine's body is over. What is still held is passed on if it is an event or a comment: not a torn one.

        It gets the blank line it lacks: without one a client would drop it, or read it as one with what comes next.
        """
        held, self._held = bytes(self._held), bytearray()
        if self.done or self.error is not None:
            return b""
        payload = _payload(held)
        is_whole = payload.strip() == DONE or parse_object(payload) is not None
        if not (is_whole if payload else held.lstrip(b"\r\n").startswith(b":")):
            return b""
        return closed(self._event(held))

    def _is_plain(self, data: bytes) -> bool:
        """Whether whole events hold nothing that must be looked at; if so, they have been counted."""
        raise NotImplementedError

    def _read(self, event: bytes, payload: bytes) -> bytes:
        """What is passed on of an event with data; nothing where it ends the stream."""
        raise NotImplementedError

    def _look_at_part(self, part: bytes) -> None:
        """The beginning of an event that is larger than the bound."""

    def _oversized_ends(self) -> None:
        """Such an event has been passed on whole."""

    def _inspect(self, data: bytes) -> bytes:
        passed = []
        for event in _split(data):
            if self.done or self.error is not None:
                break
            passed.append(event if self._is_plain(event) else self._event(event))
        return b"".join(passed)

    def _whole_events(self, data: bytes) -> bytes:
        """The stream up to the last boundary; the rest is held."""
        held = self._held
        unseen = max(0, len(held) - 3)  # a boundary may straddle two reads
        held += data
        end = _last_boundary(held, unseen)
        whole = bytes(held[:end])
        del held[:end]
        return whole

    def _begin_oversized(self) -> bytes:
        passed, self._held = bytes(self._held), bytearray()
        self._seam = passed[-3:]
        self.inside = self.begun = True
        self._look_at_part(passed)
        return self._unless_ended(passed)

    def _oversized(self, data: bytes) -> bytes:
        joined = self._seam + data
        boundary = _BOUNDARY.search(joined)
        if boundary is None:
            self._seam = joined[-3:]
            return self._unless_ended(data)
        rest = boundary.end() - len(self._seam)
        self.inside = False
        self.events += 1
        passed = self._unless_ended(data[:rest])
        self._oversized_ends()
        return passed + self.feed(data[rest:]) if rest < len(data) else passed

    def _unless_ended(self, data: bytes) -> bytes:
        return b"" if self.done or self.error is not None else data

    def _event(self, event: bytes) -> bytes:
        """The bytes to pass on for one event."""
        payload = _payload(event)
        if payload:
            event = self._read(event, payload)
        if event:
            self.begun = True
            self.events += bool(payload)
        return event


class SseRelay(EventRelay):
    """The chunks of chat and completions.

    Of an answer's chunks nearly all differ in one text alone. What stands around it is remembered from one that was
    looked at, and the next with the same around it needs no look. Three quarters of a chunk's time in here were looks.
    """

    __slots__ = ("_after", "_before", "_choices", "_finished", "_hide_usage", "_in_vain")

    def __init__(self, *, hide_usage: bool, choices: int = 1) -> None:
        super().__init__()
        self._hide_usage = hide_usage
        self._choices = choices
        self._finished: set[int] = set()
        self._before = self._after = _NOTHING_KNOWN  # around the text of a chunk that had nothing else to say
        self._in_vain = 0  # how often that was learned since it last helped

    @property
    def complete(self) -> bool:
        """The answer is whole: the engine said so, or (transformers has no `[DONE]`) every choice has finished."""
        return self.error is None and (self.done or len(self._finished) >= self._choices)

    def _is_plain(self, data: bytes) -> bool:
        """Nearly all of a stream passes here."""
        if self.done or self.error is not None:
            return False
        before, after = self._before, self._after
        if (
            data.startswith(before)
            and data.endswith(after)
            and _REST_OF_STRING.fullmatch(data, len(before), len(data) - len(after)) is not None
        ):
            self.events += 1
            self._in_vain = 0
            return True
        if (
            not self.first_token
            or b'"usage"' in data
            or b'"error"' in data
            or b"[DONE]" in data
            or data.startswith(b":")
            or b"\n:" in data
            or _FINISHED.search(data)
            or data.count(b"}\n\n") != data.count(b"\n\n")  # an event that is cut short: found without parsing any
        ):
            return False
        count = data.count(b"\n\n") or data.count(b"\n\r\n")
        self.events += count
        if count == 1 and self._in_vain < _LEARNED_IN_VAIN:
            self._learn(data)
        return True

    def _learn(self, event: bytes) -> None:
        self._in_vain += 1
        text = _TEXT.search(event)
        if text is None:
            return
        rest = _REST_OF_STRING.match(event, text.end())
        if rest is not None and event.startswith(b'"', rest.end()):
            self._before, self._after = event[: text.end()], event[rest.end() :]

    def _look_at_part(self, part: bytes) -> None:
        if _HAS_CHOICES.search(part):
            self.first_token = True

    def _read(self, event: bytes, payload: bytes) -> bytes:
        if payload.strip() == DONE:
            self.done, self.tail = True, event
            return b""
        chunk = parse_object(payload)
        if chunk is None:
            self.error = TORN if payload.startswith(b"{") else None
            return event if self.error is None else b""
        self.error = in_band_error_of(chunk)
        return b"" if self.error is not None else self._chunk(chunk, event, payload)

    def _chunk(self, chunk: dict[str, Any], event: bytes, payload: bytes) -> bytes:
        choices = chunk.get("choices")
        if choices and isinstance(choices, list):
            self.first_token = True
            self._finished.update(_finished(choices))
        if "usage" not in chunk:
            return event
        self.take_usage(read_usage(chunk["usage"]))
        if not self._hide_usage:
            return event
        return _without_usage(event, payload) if choices or chunk["usage"] is None else b""


def closed(event: bytes) -> bytes:
    """With the blank line that ends it."""
    if not event or event.endswith(_LINE_PAIRS):
        return event
    return event + (b"\n" if event.endswith(b"\n") else b"\n\n")


def _split(data: bytes) -> list[bytes]:
    """Every byte is in one of the events; a stray line end after the last boundary is one, too."""
    if b"\r" in data:
        return _EVENTS.findall(data)
    *events, rest = data.split(b"\n\n")
    events = [event + b"\n\n" for event in events]
    return [*events, rest] if rest else events


def _last_boundary(data: bytearray, start: int) -> int:
    """Where the last whole event ends, 0 if none does. No event ends before `start`."""
    return max(at + len(end) if (at := data.rfind(end, start)) >= 0 else 0 for end in _LINE_PAIRS)


def payloads(events: bytes) -> Iterator[bytes]:
    """The data of each whole event that has some."""
    for event in _split(events):
        if payload := _payload(event):
            yield payload


def _payload(event: bytes) -> bytes:
    """The data lines of an event, joined; one space after the colon is not part of them."""
    lines = event.splitlines()
    return b"\n".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])


def _finished(choices: list[Any]) -> Iterator[int]:
    for choice in choices:
        if isinstance(choice, dict) and choice.get("finish_reason"):
            index = choice.get("index")
            yield index if isinstance(index, int) else 0


def in_band_error_of(chunk: dict[str, Any]) -> dict[str, Any] | None:
    """vLLM and SGLang: {"error": {…}}; SGLang's flat form: {"object": "error", "message": …}."""
    if chunk.get("object") == "error":
        return chunk
    error = chunk.get("error")
    if not error or chunk.get("choices"):
        return None
    return error if isinstance(error, dict) else {"message": error if isinstance(error, str) else ""}


def _without_usage(event: bytes, payload: bytes) -> bytes:
    rest = without(payload, ("usage",))
    if payload in event:
        return event.replace(payload, rest, 1)
    # several data lines: written again line by line, since the member may span some of them
    others = [line for line in event.splitlines() if line and not line.startswith(b"data:")]
    return b"\n".join([*others, *[b"data: " + line for line in rest.splitlines() if line.strip()], b"", b""])
