"""Reads a resumable stream again, at any replica, from any event on.

The tokens come from the stream's request if this replica generates it, or else from the journal in
the store. A replica that finds the stream lost adopts it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from millrace.proxy.errors import ApiError, unavailable
from millrace.proxy.reply.event_numbers import EventId
from millrace.proxy.streams.apis import APIS
from millrace.proxy.streams.lives import RESTORED_S
from millrace.proxy.streams.owner import OwnedStreams
from millrace.proxy.streams.replay import Diverged, Replay, Replays
from millrace.proxy.streams.source import error_of, read_source, read_state
from millrace.state.store import RequestStore, StoreError
from millrace.state.streams import StreamRecord

#: How often a reader looks for new tokens.
POLL_S = 0.05
#: How often it looks for another owner, an end or a loss, and says that it reads.
CHECK_S = 0.5
#: The journal's last tokens may come this much later than the stream's end.
LAST_TOKENS_S = 10.0
#: Tokens that are replayed without a pause for other work.
_AT_ONCE = 256


class StreamReader:
    """One client's reading of one stream."""

    def __init__(
        self,
        owned: OwnedStreams,
        requests: RequestStore,
        replays: Replays,
        stream_id: str,
        record: StreamRecord,
        after: EventId | None,
    ) -> None:
        self._owned = owned
        self._requests = requests
        self._replays = replays
        self._id = stream_id
        self._source = read_source(record.source)
        self._state = read_state(record.body)
        self._after = after
        #: None until the number of cached tokens is known, which the usage shows.
        self._replay: Replay | None = None
        self._read = self._place = 0
        self._final_since: float | None = None
        self._found_at = time.monotonic()

    async def parts(self) -> AsyncGenerator[bytes, None]:
        """Yields the events as they come, and empty bytes whenever there is none."""
        checked = 0.0
        try:
            while self._replay is None or not self._replay.finished:
                now = time.monotonic()
                if now - checked >= CHECK_S:
                    checked = now
                    await self._check(now)
                found = await self._more()
                for first in range(0, len(found), _AT_ONCE):
                    if data := self._feed(found[first : first + _AT_ONCE]):
                        yield data
                    await asyncio.sleep(0)
                if not found:
                    self._give_up()
                    yield b""
                    await asyncio.sleep(POLL_S)
        except Diverged:
            self._owned.shared.count("diverged")
            message = "The stream can't be resumed: its answer is another one now."
            yield self._failure(ApiError(500, message, code="diverged"))
        except ApiError as error:
            yield self._failure(error)
        except StoreError:
            yield self._failure(unavailable("The store of streams does not answer."))

    def _feed(self, tokens: list[int]) -> bytes:
        assert self._replay is not None  # `_more` returns no tokens before
        self._replay.feed(self._read, tokens)
        self._read += len(tokens)
        return self._replay.reply.take()

    async def _more(self) -> list[int]:
        """Returns the tokens after those that were read of the present incarnation."""
        # A stream that has ended may still be held here: by a replica that has lost it unawares.
        stream = self._owned.find(self._id) if self._final_since is None else None
        if self._state.cached_tokens is None and stream is not None and stream.request.has_begun:
            await stream.save()
            self._state = stream.state
        if self._state.cached_tokens is None:
            return []
        if self._replay is None:
            cached = self._state.cached_tokens
            self._replay = self._replays.to_read(self._source, cached, self._after)
        if stream is not None:
            return stream.request.emitted_after(self._read)
        part = await self._requests.journal_after(
            self._state.incarnation, 0, known=self._read, place=self._place
        )
        self._place = part.place
        tokens: list[int] = part.token_ids.tolist()
        return tokens

    async def _check(self, now: float) -> None:
        """Looks at the stream's record; adopts a lost stream."""
        record = await self._owned.shared.store.get(self._id)
        if record is None and self._state.cached_tokens is None:
            raise unavailable("The request was refused before its first token.")
        if record is None:
            if now - self._found_at > RESTORED_S:
                raise ApiError(410, "The stream has expired.", code="expired")
            return
        self._found_at = now
        if await self._owned.adopt_if_lost(self._id, record):
            record = await self._owned.shared.store.get(self._id) or record
        elif not record.final:
            await self._owned.shared.store.want(self._id, self._owned.shared.lives.grace_s)
        state = read_state(record.body)
        if state.incarnation != self._state.incarnation:  # its journal has all tokens again
            self._read = self._place = 0
        self._state = state
        if record.final and self._final_since is None:
            self._final_since = now

    def _give_up(self) -> None:
        """Raises the error of a stream that has ended without all of its tokens."""
        if self._final_since is None:
            return
        if (error := error_of(self._state)) is not None:
            raise error
        if time.monotonic() - self._final_since > LAST_TOKENS_S:
            raise ApiError(500, "The journal lacks the last tokens.", code="failed")

    def _failure(self, error: ApiError) -> bytes:
        data = b"" if self._replay is None else self._replay.reply.take()
        return data + APIS[self._source.api].failure(error)
