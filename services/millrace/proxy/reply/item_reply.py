"""What the replies of /v1/responses and of /v1/messages share: they gather one choice's items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.reply.items import MakeItems, OutputItems
from millrace.proxy.reply.parsed import ParsedAnswer
from millrace.proxy.reply.reply import Progress

Json = dict[str, Any]


class ItemReply(ABC):
    """Gathers the items of an answer, and its events for the client."""

    __slots__ = ("_items", "_opened", "_out", "progress", "shows_progress", "silent")

    def __init__(self, answer: ParsedAnswer | None, make: MakeItems, progress: Progress) -> None:
        """`answer` parses the text; None if all of it is the message's."""
        self._items = OutputItems(answer, make, self._emit)
        self._opened = False
        self._out: list[bytes] = []
        #: True while no output came since `silent` was last set.
        self.silent = True
        #: Both APIs fix the events of a stream: none shows the prompt's progress.
        self.shows_progress = False
        self.progress = progress

    @abstractmethod
    def _open(self) -> None:
        """Adds the events before the first text."""

    @abstractmethod
    def _end(self, choice: Choice) -> None:
        """Ends the items: the choice has finished."""

    @abstractmethod
    def _emit(self, kind: str, **fields: object) -> None:
        """Adds an event, if the answer is streamed."""

    def _shown(self, piece: Piece) -> Sequence[Json]:
        """Returns the log probabilities of a piece's tokens, if the API shows any."""
        return ()

    @abstractmethod
    def on_done(self, request: ProxyRequest) -> None: ...

    def take(self) -> bytes:
        """Returns all events that are ready, server-sent; or empty bytes."""
        out, self._out = self._out, []
        return b"".join(out)

    def comment(self, text: bytes) -> None:
        """Adds a line that clients skip: it shows proxies in between that the connection lives."""
        self._out.append(b": " + text + b"\n\n")
        self.progress.signal.wake()

    def show_progress(self, document: Json) -> None:
        raise AssertionError("an answer of items shows no progress")

    def on_text(self, choice: Choice, text: str) -> None:
        self._feed(choice, text, ())

    def _feed(self, choice: Choice, text: str, logprobs: Sequence[Json]) -> None:
        self.silent = False
        if not self._opened:
            self._opened = True
            self._open()
        self._items.feed(text, logprobs)
        if choice.finish_reason is not None:
            self._end(choice)
        self.progress.signal.wake()

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        self._feed(choice, piece.text, self._shown(piece))

    def echo(self, choice: Choice, piece: Piece) -> None:
        raise AssertionError("an answer of items echoes no prompt")

    def on_error(self, error: ApiError) -> None:
        self.progress.fail(error)
