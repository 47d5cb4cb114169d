"""Echoes a prompt before its completion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.token_events import PositionLogprobs
from millrace.proxy.generation.choice import LogprobEntry, Piece
from millrace.proxy.text.encoder_process import TokenArray
from millrace.proxy.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Echo:
    """A prompt's text and ids (int32 [tokens]).

    `logprobs`: likeliest tokens to show at each position; -1: no log probabilities are shown.
    """

    text: str
    prompt_ids: TokenArray
    tokenizer: Tokenizer
    skip_special_tokens: bool
    logprobs: int = -1

    def piece(self, positions: Sequence[PositionLogprobs | None]) -> Piece:
        """Returns the prompt as a piece. `positions`: the prompt's log probabilities, or none.

        The first position has no meaning, because no token comes before it.
        """
        if not positions or self.logprobs < 0:
            return Piece(text=self.text)
        detokenizer = self.tokenizer.detokenizer(None, skip_special_tokens=self.skip_special_tokens)
        entries, offset = [], 0
        for i, token_id in enumerate(self.prompt_ids.tolist()):
            position = positions[i] if 0 < i < len(positions) else None
            if position is not None:
                position = position._replace(top=position.top[: self.logprobs])
            entries.append(LogprobEntry(token_id=token_id, position=position, offset=offset))
            offset += len(detokenizer.feed([token_id]))
        return Piece(text=self.text, entries=entries)
