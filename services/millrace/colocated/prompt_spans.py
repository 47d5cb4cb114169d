"""Records a prompt's time in iterations as bars of the waterfall.

Consecutive iterations that all have a chunk of the prompt are one span, so one bar, for any number
of chunks. Between two spans, other prompts went before it.
"""

from __future__ import annotations

from millrace.instance.spans import RequestTrace


class PromptSpans:
    """The spans of one prompt, which go to its request's trace."""

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._count = 0
        self._since_s: float | None = None  # start of the current span
        self._left_s: float | None = None  # end of the last span
        self._tokens = self._history = self._chunks = 0

    @property
    def has_begun(self) -> bool:
        return self._count > 0

    def found(self, cached_tokens: int) -> None:
        """Notes that the first `cached_tokens` tokens need no compute."""
        now_s = self._trace.clock.now_s()
        self._trace.add("cached", now_s, now_s, tokens=cached_tokens)

    def takes_part(self, history: int) -> None:
        """Notes that the next iteration has a chunk of the prompt after `history` tokens."""
        if self._since_s is not None:
            return
        now_s = self._trace.clock.now_s()
        if self._left_s is not None:
            self._trace.add("preempted", self._left_s, now_s)
        else:
            self._trace.queued()
            self._trace.add("waiting", self._trace.began_s, now_s)
        self._since_s = now_s
        self._history = history
        self._count += 1

    def computed(self, tokens: int) -> None:
        """Notes that an iteration with a chunk of the prompt has ended."""
        self._tokens += tokens
        self._chunks += 1

    def leave(self) -> None:
        """Ends the span: the next iteration has no chunk of the prompt, or the prompt is done."""
        if self._since_s is None:
            return
        now_s, number = self._trace.clock.now_s(), self._count - 1
        self._trace.add(
            "chunk",
            self._since_s,
            now_s,
            bar=f"chunk {number}",
            number=number,
            tokens=self._tokens,
            history=self._history,
            iterations=self._chunks,
        )
        self._since_s, self._left_s = None, now_s
        self._tokens = self._chunks = 0
