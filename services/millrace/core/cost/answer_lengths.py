"""The expected length of an answer: nobody knows it before the answer ends.

The mean of the last answers of the request's class (exponentially weighted), at most the request's
own `max_new_tokens`. A class without answers takes the mean of all classes, and before any answer
`FIRST_GUESS_TOKENS`.
"""

from __future__ import annotations

from typing import Final

from millrace.core.live_request import LiveRequest

FIRST_GUESS_TOKENS: Final = 128
#: The weight of a new answer among the last ones, once so many have ended.
LEAST_ALPHA: Final = 1 / 100


class _Mean:
    __slots__ = ("count", "value")

    def __init__(self) -> None:
        self.count = 0
        self.value = 0.0

    def note(self, value: float) -> None:
        self.count += 1
        self.value += max(1.0 / self.count, LEAST_ALPHA) * (value - self.value)


class AnswerLengths:
    """The mean length of answers by class, in tokens per choice."""

    def __init__(self) -> None:
        self._all = _Mean()
        self._classes: dict[str, _Mean] = {}

    def ended(self, request: LiveRequest, generated_tokens: int) -> None:
        """Learns from an answer: `generated_tokens` of all choices together."""
        tokens = generated_tokens / request.choices
        self._all.note(tokens)
        self._classes.setdefault(request.slo.class_name, _Mean()).note(tokens)

    def expected(self, request: LiveRequest) -> float:
        """Returns the tokens that a choice of the request is expected to have, 1 or more."""
        mean = self._classes.get(request.slo.class_name, self._all)
        tokens = mean.value if mean.count else float(FIRST_GUESS_TOKENS)
        return max(1.0, min(tokens, float(request.max_new_tokens)))
