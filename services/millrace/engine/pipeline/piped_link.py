"""A ring's link as a later stage has it: the real one is at the first stage, behind the pipe."""

from __future__ import annotations

import queue
from collections.abc import Callable

from millrace.engine.pipeline.messages import LinkCall, LinkReply


class PipedLink:
    """A `RingLink`. Each call is made at the first stage, which waits for the stage's step."""

    def __init__(
        self,
        call: Callable[[LinkCall], None],
        replies: queue.SimpleQueue[LinkReply],
        *,
        rank: int,
        size: int,
        first_layer: int,
    ) -> None:
        """`first_layer`: of the stage, as the model counts."""
        self._call = call
        self._replies = replies
        self._first_layer = first_layer
        self.rank = rank
        self.size = size

    def history(self, layer: int) -> bool:
        return self._make("history", self._first_layer + layer)

    def publish(self, layer: int) -> None:
        self._make("publish", self._first_layer + layer)

    def wait(self, step: int) -> bool:
        return self._make("wait", step)

    def release(self, step: int) -> None:
        self._make("release", step)

    def _make(self, method: str, argument: int) -> bool:
        self._call(LinkCall(method, argument))
        return self._replies.get().value
