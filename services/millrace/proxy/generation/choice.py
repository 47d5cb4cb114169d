"""Turns the tokens of one choice into the text that the client may see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millrace.core.token_events import PositionLogprobs
from millrace.proxy.request.options import Options
from millrace.proxy.text.detokenizer import Detokenizer
from millrace.proxy.text.stop import StopScanner


@dataclass(slots=True, kw_only=True)
class LogprobEntry:
    """Log probabilities of one token; `offset` counts the characters of the choice before it.

    `position` is None for a prompt's first token, which follows nothing.
    """

    token_id: int
    position: PositionLogprobs | None
    offset: int


@dataclass(slots=True, kw_only=True)
class Piece:
    """The output of a choice that is shown together.

    `delta` holds the fields of a chat's delta if the answer is parsed; `text` is empty then.
    """

    text: str = ""
    entries: Sequence[LogprobEntry] = ()
    token_ids: Sequence[int] = ()
    delta: Mapping[str, Any] | None = None


class Choice:
    """Takes tokens in order, cuts at stop strings, and holds text that may not be shown yet."""

    __slots__ = (
        "_detokenizer",
        "_entries",
        "_include_stop",
        "_keeps_ids",
        "_min_tokens",
        "_scanner",
        "_shows_nothing",
        "decoded_characters",
        "finish_reason",
        "index",
        "last_token_at",
        "shown_characters",
        "stop_reason",
        "token_count",
        "token_ids",
    )

    def __init__(
        self, index: int, detokenizer: Detokenizer, options: Options, *, start: int = 0
    ) -> None:
        """`start` counts the characters of an echoed prompt before the choice's text."""
        #: The index of the choice in the response's `choices`.
        self.index = index
        self._detokenizer = detokenizer
        self._scanner = StopScanner(options.stop, options.include_stop) if options.stop else None
        self._include_stop = options.include_stop
        self._keeps_ids = options.return_token_ids
        self._min_tokens = options.sampling.min_tokens
        self._shows_nothing = options.prefill_only
        self._entries: list[LogprobEntry] = []
        #: Generated tokens so far, a stop token included.
        self.token_count = 0
        #: When the choice's last token came, in seconds on the monotonic clock.
        self.last_token_at: float | None = None
        self.finish_reason: str | None = None
        #: The stop string or the id of the stop token that ended the choice; None otherwise.
        self.stop_reason: str | int | None = None
        self.decoded_characters = start
        self.shown_characters = start
        self.token_ids: list[int] = []

    @property
    def met_stop_string(self) -> bool:
        return self._scanner is not None and self._scanner.matched is not None

    def feed(self, token_ids: Sequence[int], finish_reason: str, stop_token_id: int) -> str:
        """Takes the next tokens, and returns the text that may be shown now.

        The choice continues if `finish_reason` is empty. A stop token (`stop_token_id` >= 0) has no
        text.
        """
        if self._shows_nothing:
            self.finish_reason = "length"
            return ""
        self.token_count += len(token_ids)
        if self._keeps_ids:
            self.token_ids.extend(token_ids)
        if finish_reason and stop_token_id >= 0 and not self._include_stop:
            token_ids = token_ids[:-1]
        text = self._detokenizer.feed(token_ids) if token_ids else ""
        if finish_reason:
            text += self._detokenizer.flush()
        self.decoded_characters += len(text)
        if self._scanner is not None and self.token_count > self._min_tokens:
            text = self._scan(self._scanner, text, finish_reason)
        if finish_reason and self.finish_reason is None:
            self.finish_reason = finish_reason
            self.stop_reason = stop_token_id if stop_token_id >= 0 else None
        self.shown_characters += len(text)
        return text

    def feed_piece(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs],
        finish_reason: str,
        stop_token_id: int,
    ) -> Piece:
        """Works as `feed`, with the token ids, and the log probabilities where `positions` has
        them.
        """
        if positions:
            piece = self._feed_logprobs(token_ids, positions, finish_reason, stop_token_id)
        else:
            piece = Piece(text=self.feed(token_ids, finish_reason, stop_token_id))
        piece.token_ids, self.token_ids = self.token_ids, []
        return piece

    def _feed_logprobs(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs],
        finish_reason: str,
        stop_token_id: int,
    ) -> Piece:
        """Works as `feed`, token by token, and keeps every token's log probabilities."""
        if self._shows_nothing:
            return Piece(text=self.feed(token_ids, finish_reason, stop_token_id))
        text = ""
        last = len(token_ids) - 1
        for i, (token_id, position) in enumerate(zip(token_ids, positions, strict=True)):
            ends = finish_reason if i == last else ""
            stop_id = stop_token_id if i == last else -1
            if not (ends and stop_id >= 0 and not self._include_stop):
                self._entries.append(
                    LogprobEntry(
                        token_id=token_id, position=position, offset=self.decoded_characters
                    )
                )
            text += self.feed([token_id], ends, stop_id)
            if self.finish_reason is not None:
                break
        return Piece(text=text, entries=self._take_entries())

    def _scan(self, scanner: StopScanner, text: str, finish_reason: str) -> str:
        text = scanner.feed(text)
        if scanner.matched is not None:
            self.finish_reason, self.stop_reason = "stop", scanner.matched
        elif finish_reason:
            text += scanner.flush()
        return text

    def _take_entries(self) -> list[LogprobEntry]:
        """Returns the entries of tokens whose text begins in the shown text; all, at an end."""
        entries = self._entries
        whole = self.shown_characters == self.decoded_characters
        if whole or (self.finish_reason is not None and not self.met_stop_string):
            self._entries = []
            return entries
        ready = [e for e in entries if e.offset < self.shown_characters]
        self._entries = entries[len(ready) :]
        return ready
