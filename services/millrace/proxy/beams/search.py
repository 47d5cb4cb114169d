"""Beam search: keeps the likeliest beginnings of an answer, and extends each of them by a token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from millrace.core.token_events import PositionLogprobs


@dataclass(frozen=True, slots=True)
class Beam:
    """The beginning of an answer. `logprob` is the sum over its tokens.

    `stop_token_id`: its last token, which ended it; -1: it goes on.
    """

    positions: tuple[PositionLogprobs, ...] = ()
    logprob: float = 0.0
    stop_token_id: int = -1

    @property
    def token_ids(self) -> list[int]:
        return [position.chosen[0] for position in self.positions]


def candidates(width: int) -> int:
    """Returns how many of the likeliest tokens a search wants for each open beam: if every other
    one ends its beam, there are still enough to go on.
    """
    return 2 * width


class BeamSearch:
    """The search of one prompt's likeliest answers, as vLLM does it.

    At each step every open beam is extended by each of its likeliest tokens. Those that a stop
    token ends are kept for the end; of all others, the `width` likeliest stay open. An answer's
    score is its log probability over length ** `length_penalty`, where the length counts the prompt
    and no stop token.
    """

    def __init__(
        self,
        prompt_tokens: int,
        width: int,
        max_tokens: int,
        stop_token_ids: Sequence[int],
        length_penalty: float,
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._width = width
        self._candidates = candidates(width)
        self._max_tokens = max_tokens
        self._stops = frozenset(stop_token_ids)
        self._length_penalty = length_penalty
        self._stopped: list[Beam] = []
        self._tokens = 0  # of each open beam
        #: The beams to extend, the likeliest first; none once the search is over.
        self.open = [Beam()]
        self._left: list[Beam] = []  # that were open when the search was over

    def extend(self, found: Sequence[PositionLogprobs]) -> None:
        """Takes the `candidates` likeliest tokens after each open beam, in the order of `open`."""
        longer = chain.from_iterable(map(self._extended, self.open, found))
        going: list[Beam] = []
        for beam in longer:
            (going if beam.stop_token_id < 0 else self._stopped).append(beam)
        going.sort(key=lambda beam: -beam.logprob)  # of equal ones the earlier, as they come
        self._tokens += 1
        self.open = going[: self._width]
        if self._tokens == self._max_tokens or self._is_decided():
            self._left, self.open = self.open, []

    def best(self) -> list[Beam]:
        """Returns the answers with the highest scores, the highest first: `width`, or fewer where
        the vocabulary has no more.
        """
        return self._ranked([*self._stopped, *self._left, *self.open])

    def _extended(self, beam: Beam, found: PositionLogprobs) -> list[Beam]:
        return [
            Beam(
                (*beam.positions, PositionLogprobs((token_id, logprob), found.top)),
                beam.logprob + logprob,
                token_id if token_id in self._stops else -1,
            )
            for token_id, logprob in found.top[: self._candidates]
        ]

    def _is_decided(self) -> bool:
        """Whether no open beam can still get among the best: its log probability only falls."""
        if not self.open or len(self._stopped) < self._width:
            return not self.open
        worst = self._score(self._ranked(self._stopped)[-1])
        likeliest = self.open[0].logprob
        lengths = (self._tokens, self._max_tokens)
        return max(self._scored(likeliest, tokens) for tokens in lengths) <= worst

    def _ranked(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -self._score(beam))[: self._width]

    def _score(self, beam: Beam) -> float:
        return self._scored(beam.logprob, len(beam.positions) - (beam.stop_token_id >= 0))

    def _scored(self, logprob: float, tokens: int) -> float:
        return logprob / math.pow(self._prompt_tokens + tokens, self._length_penalty)
