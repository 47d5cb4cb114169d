"""Gathers the choices of a request that are generated as a request each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece

if TYPE_CHECKING:
    from millrace.proxy.generation.proxy_request import ProxyRequest


class PartSink:
    """Passes the output of one choice on to the sink of the whole request."""

    __slots__ = ("_whole",)

    def __init__(self, whole: ProxyRequest) -> None:
        self._whole = whole

    def on_text(self, choice: Choice, text: str) -> None:
        self._whole.sink.on_text(choice, text)

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        self._whole.sink.on_piece(choice, piece)

    def echo(self, choice: Choice, piece: Piece) -> None:
        self._whole.sink.echo(choice, piece)

    def on_done(self, request: ProxyRequest) -> None:
        del request  # the part that has ended
        self._whole.end_choice()

    def on_error(self, error: ApiError) -> None:
        self._whole.sink.on_error(error)
