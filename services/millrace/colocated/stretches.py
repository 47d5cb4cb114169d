"""A prompt's way through iterations, as bars of the waterfall.

A stretch is a run of iterations that all have a part of the prompt: one bar, however many chunks it
took. Between two stretches other prompts went before it.
"""

from __future__ import annotations

from millrace.core.span import Span
from millrace.instance.spans import Stopwatch, span


class Stretches:
    """Of one prompt. All times are read from its `clock`."""

    def __init__(self, clock: Stopwatch, instance_id: str) -> None:
        self._clock = clock
        self._id = instance_id
        self._received_s = clock.now_s()
        self._count = 0
        self._since_s: float | None = None  # of the stretch at hand
        self._left_s: float | None = None  # when the last one ended
        self._tokens = self._history = self._chunks = 0
        self.spans: list[Span] = []

    @property
    def has_begun(self) -> bool:
        return self._count > 0

    def found(self, cached_tokens: int) -> None:
        """So many first tokens need not be computed."""
        now_s = self._clock.now_s()
        self.spans.append(span("cached", self._id, now_s, now_s, tokens=cached_tokens))

    def takes_part(self, history: int) -> None:
        """The next iteration has a chunk of it, behind `history` tokens."""
        if self._since_s is not None:
            return
        now_s = self._clock.now_s()
        if self._left_s is not None:
            self.spans.append(span("preempted", self._id, self._left_s, now_s))
        else:
            self.spans.append(span("queued", "scheduler", 0.0, self._received_s))
            self.spans.append(span("waiting", self._id, self._received_s, now_s))
        self._since_s = now_s
        self._history = history
        self._count += 1

    def computed(self, tokens: int) -> None:
        """An iteration with a chunk of it has ended."""
        self._tokens += tokens
        self._chunks += 1

    def leave(self) -> None:
        """The next iteration has nothing of it, or it is done."""
        if self._since_s is None:
            return
        now_s = self._clock.now_s()
        self.spans.append(
            span(
                f"chunk {self._count - 1}",
                self._id,
                self._since_s,
                now_s,
                tokens=self._tokens,
                history=self._history,
                iterations=self._chunks,
            )
        )
        self._since_s, self._left_s = None, now_s
        self._tokens = self._chunks = 0
