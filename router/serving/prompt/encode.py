"""Turns pieces of text into links of a chain: at once, or in a thread with one result for all who ask the same."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Executor

from router.serving.prompt.memo import Link, Memo, Sizes
from router.serving.prompt.pieces import Piece
from router.serving.prompt.tokenizer import Ids, Tokenizer

log = logging.getLogger(__name__)

_BATCH = 16_384  # characters a call: long enough for the GIL to be worth releasing, short for its results
_SMOOTHING = 0.1
_TELLING = 256  # bytes of text from which on rates are learned

_NICER = 10

Chunk = list[Link]


def let_the_loop_go_first() -> None:
    """For the thread that encodes, as it starts.

    Where it shares a core with the loop it then gets a tenth of it: of prompts of 32 KB, of which 10 KB are new, 1,330
    instead of 590 a second are served. Where it has a core of its own it loses nothing.
    """
    if sys.platform == "linux":  # elsewhere a thread has no priority of its own
        nice = os.getpriority(os.PRIO_PROCESS, 0) + _NICER
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, 19))


class Encoder:
    """One model's. Results go into the memo, on the loop."""

    def __init__(self, tokenizer: Tokenizer | None, memo: Memo, executor: Executor, *, backlog_bytes: int) -> None:
        self._tokenizer = tokenizer
        self._memo = memo
        self._executor = executor
        self._backlog_bytes = backlog_bytes
        self._waiting_bytes = 0
        self._running: dict[tuple[int, int, Sizes], asyncio.Future[Chunk]] = {}
        self._fresh: dict[int, Link] = {}  # made in the thread, and not yet in the memo
        self._failures: set[str] = set()
        self.bytes_per_token = 4.0  # learned
        self.us_per_byte = 0.6  # learned

    @property
    def running(self) -> list[asyncio.Future[Chunk]]:
        """Texts that are being tokenized in the thread, or will be."""
        return list(self._running.values())

    def now(self, link: Link, pieces: Sequence[Piece], hashes: Sequence[int], size: int) -> Chunk | None:
        """Links of `pieces`, which follow `link`; None: the tokenizer failed.

        The last hashes are theirs, the others those of all before. `size` is the sum of their weights.
        """
        started = time.perf_counter()
        try:
            links = self._links(link, pieces)
        except Exception as error:  # the library raises bare ones
            self._failed(error)
            return None
        if isinstance(pieces[0], str):
            self._learn(size, links[-1].tokens - link.tokens, time.perf_counter() - started)
        self._memo.put(hashes, links)
        return links

    def in_thread(
        self, link: Link, pieces: Sequence[Piece], hashes: Sequence[int], size: int
    ) -> asyncio.Future[Chunk] | None:
        """The same, from the thread. None: too much is waiting for it already."""
        name = (hashes[-1], len(pieces), link.sizes)
        running = self._running.get(name)
        if running is not None:
            return running
        if self._waiting_bytes + size > self._backlog_bytes:
            return None
        self._waiting_bytes += size
        work = asyncio.get_running_loop().run_in_executor(self._executor, self._links_anew, link, pieces, hashes)
        self._running[name] = work

        def done(work: asyncio.Future[Chunk]) -> None:
            del self._running[name]
            self._waiting_bytes -= size
            if work.cancelled():
                return
            if (error := work.exception()) is not None:
                self._failed(error)
                return
            links = work.result()
            if isinstance(pieces[0], str):
                self._learn(size, links[-1].tokens - link.tokens, None)
            self._memo.put(hashes, links)
            for key in hashes[-len(links) :]:
                self._fresh.pop(key, None)

        work.add_done_callback(done)
        return work

    def _links_anew(self, link: Link, pieces: Sequence[Piece], hashes: Sequence[int]) -> Chunk:
        """In the thread. What has become known since this was asked for is not encoded again: requests that begin alike
        mostly come together, as the answers to one question asked many times or a system prompt that is new."""
        own = hashes[len(hashes) - len(pieces) :]
        links: Chunk = []
        for key in own:
            known = self._fresh.get(key) or self._memo.peek(key)
            if known is None or known.sizes != link.sizes:
                break
            links.append(known)
        count = len(links)
        links += self._links(links[-1] if links else link, pieces[count:])
        self._fresh.update(zip(own[count:], links[count:], strict=True))
        return links

    def _links(self, link: Link, pieces: Sequence[Piece]) -> Chunk:
        links: Chunk = []
        batch: list[str] = []
        length = 0
        for piece in pieces:
            if isinstance(piece, str):
                batch.append(piece)
                length += len(piece)
                if length < _BATCH:
                    continue
            link = self._extend(link, batch, links)
            batch, length = [], 0
            if not isinstance(piece, str):
                link = link.extend(piece)
                links.append(link)
        self._extend(link, batch, links)
        return links

    def _extend(self, link: Link, texts: Sequence[str], links: Chunk) -> Link:
        encoded: Sequence[Ids] = self._tokenizer.encode(texts) if texts and self._tokenizer is not None else ()
        for ids in encoded:
            link = link.extend(ids)
            links.append(link)
        return link

    def _failed(self, error: BaseException) -> None:
        kind = type(error).__name__  # its text may hold the prompt's
        if kind not in self._failures:
            self._failures.add(kind)
            log.warning("tokenizing failed: %s; said once", kind)

    def _learn(self, size: int, tokens: int, took_s: float | None) -> None:
        if size < _TELLING or not tokens:
            return
        self.bytes_per_token += _SMOOTHING * (size / tokens - self.bytes_per_token)
        if took_s is not None:
            self.us_per_byte += _SMOOTHING * (min(1e6 * took_s / size, 5.0) - self.us_per_byte)
