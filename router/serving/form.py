"""multipart/form-data (RFC 7578), read for the few fields the gateway needs. The body itself goes on as it came.

    --boundary CRLF  headers CRLF CRLF  content CRLF  --boundary …  --boundary--

Files are searched for the boundary and not copied, in slices with turns of the loop between them. What only begins like
a boundary is content, as it is for the parser that engines use (python-multipart).
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

from router.errors import BadRequest

_SLICE_BYTES = 64 * 1024  # searched in 10 µs; content that is hard to search takes half a millisecond
_HEAD_BYTES = 8 * 1024  # of one part
_VALUE_BYTES = 4 * 1024  # a longer value is none that is read here
_PARTS = 256
_LOOKALIKES = 256
_BOUNDARY = re.compile(
    rb'multipart/form-data\s*;(?:[^"]*;)?\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s;"]{1,70})(?=[\s;]|\Z))', re.IGNORECASE
)
_DISPOSITION = re.compile(rb"(?:\A|\r\n)content-disposition:[ \t]*form-data([^\r\n]*)", re.IGNORECASE)
_PARAMETER = re.compile(rb';[ \t]*([\w*]+)=(?:"((?:[^"\\]|\\.)*)"|([^\s;"]*))')
_END_OF_LINE = re.compile(rb"[ \t]*\r\n")
_TRUE = frozenset(("true", "1", "on", "t", "y", "yes"))


class Form:
    """content_type  as the client said it: the boundary is in it
    fields        the small text fields, `stream` as a boolean; of a name that is there twice, the last
    names         of all fields, files among them
    """

    __slots__ = ("_model", "content_type", "fields", "names")

    def __init__(self, content_type: bytes) -> None:
        self.content_type = content_type
        self.fields: dict[str, Any] = {}
        self.names: set[str] = set()
        self._model: tuple[int, int] | None = None  # where its name stands in the body

    def note(self, head: bytes, body: bytes, start: int, end: int) -> None:
        """A part. Its content is at `body[start:end]`."""
        disposition = _DISPOSITION.search(head)
        if disposition is None:
            return
        parameters = {name.lower(): quoted or bare for name, quoted, bare in _PARAMETER.findall(disposition[1])}
        name = parameters.get(b"name", b"").decode("utf-8", "replace")
        self.names.add(name)
        if b"filename" in parameters or b"filename*" in parameters or end - start > _VALUE_BYTES:
            return
        try:
            value = body[start:end].decode()
        except UnicodeDecodeError:
            return
        self.fields[name] = value.strip().lower() in _TRUE if name == "stream" else value
        if name == "model":
            self._model = start, end

    def naming(self, served: str, body: bytes) -> bytes:
        """The body with the name by which an engine knows the model; without a field for it, as it is."""
        if self._model is None or self.fields["model"] == served:
            return body
        start, end = self._model
        return b"".join((body[:start], served.encode(), body[end:]))


async def read_form(body: bytes, content_type: bytes) -> Form:
    """Raises BadRequest for what is no form, or one that does not end."""
    boundary = _BOUNDARY.match(content_type)
    if boundary is None:
        raise BadRequest("The body must be multipart/form-data with a boundary.", code="invalid_content_type")
    opening = b"--" + (boundary[1] or boundary[2])
    delimiter = b"\r\n" + opening
    form = Form(content_type)
    after = len(opening) if body.startswith(opening) else (await _next(body, delimiter, 0))[1]
    for _ in range(_PARTS):
        if body.startswith(b"--", after):
            return form
        line = _END_OF_LINE.match(body, after)
        head_end = body.find(b"\r\n\r\n", line.end() - 2, line.end() + _HEAD_BYTES) if line is not None else -1
        if line is None or head_end < 0:
            raise _malformed("a part does not begin with its headers")
        start = head_end + 4
        end, after = await _next(body, delimiter, start - 2)  # of no content, the two share a line end
        form.note(body[line.end() : head_end], body, start, max(start, end))
    raise _malformed(f"it has more than {_PARTS} parts")


async def _next(body: bytes, delimiter: bytes, position: int) -> tuple[int, int]:
    """Where the next delimiter is, and where it ends."""
    lookalikes = 0
    while position < len(body):
        found = body.find(delimiter, position, position + _SLICE_BYTES + len(delimiter))
        after = found + len(delimiter)
        if found < 0:
            position += _SLICE_BYTES
            await asyncio.sleep(0)
        elif body.startswith(b"--", after) or _END_OF_LINE.match(body, after):
            return found, after
        elif lookalikes == _LOOKALIKES:
            raise _malformed("its boundary is found all over its content")
        else:
            lookalikes += 1
            position = after
    raise _malformed("it does not end with its boundary")


def _malformed(why: str) -> BadRequest:
    return BadRequest(f"The form is malformed: {why}.", code="invalid_form")
