"""What takes a request's output: the protocol of replies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.choice import Choice, Piece

if TYPE_CHECKING:
    from millrace.proxy.generation.proxy_request import ProxyRequest


class Sink(Protocol):
    """Gathers a request's output into a response."""

    def on_text(self, choice: Choice, text: str) -> None:
        """Takes plain text of a choice; the text may be empty when the choice has just finished."""

    def on_piece(self, choice: Choice, piece: Piece) -> None:
        """Takes text with log probabilities or token ids."""

    def echo(self, choice: Choice, piece: Piece) -> None:
        """Takes the prompt, before a choice's first text."""

    def on_done(self, request: ProxyRequest) -> None:
        """Takes the end of a request: all its choices have finished."""

    def on_error(self, error: ApiError) -> None:
        """Takes the error of a response that can't be finished."""
