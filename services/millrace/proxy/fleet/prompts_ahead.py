"""Asks the scheduler how far prompts are, and words it for the streams that wait.

Only silent streams ask, every KEEPALIVE_S: what nobody waits long for costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millrace.proxy.generation.generation import Generation, Stage
from millrace.wire.pb import scheduler_pb2

#: A scheduler that takes longer to answer is not waited for: the comment must go out.
ANSWER_S = 1.0

#: From the least to the most advanced.
_STATES = ("moving", "parked", "queued", "prefilling", "transferring")
_OURS = {Stage.PARKED: "parked", Stage.MOVING: "moving"}


class PromptsAhead:
    """Asks for many streams at once, and hands each its answers."""

    def __init__(self, send: Callable[[Sequence[str]], None]) -> None:
        self._send = send
        self._asked: dict[str, asyncio.Future[scheduler_pb2.Progress]] = {}

    def hear(self, progress: scheduler_pb2.Progress, /) -> None:
        """Takes an answer of the scheduler's."""
        asked = self._asked.get(progress.request_id)
        if asked is not None and not asked.done():
            asked.set_result(progress)

    async def describe(self, generations: Sequence[Generation]) -> str:
        """One line on those whose first token is not out; empty when there are none.

        One stream calls it once at a time: a second question would take the first one's answer.
        """
        waiting = [g for g in generations if not g.has_begun and not g.has_ended]
        if not waiting:
            return ""
        return _line(waiting, await self._ask(waiting))

    async def _ask(self, waiting: Sequence[Generation]) -> dict[str, scheduler_pb2.Progress]:
        ids = [g.spec.request_id for g in waiting if g.stage not in _OURS]
        if not ids:
            return {}
        loop = asyncio.get_running_loop()
        asked = {request_id: loop.create_future() for request_id in ids}
        self._asked |= asked
        self._send(ids)
        try:
            await asyncio.wait(asked.values(), timeout=ANSWER_S)
            return {i: one.result() for i, one in asked.items() if one.done()}
        finally:
            for request_id in ids:
                self._asked.pop(request_id, None)


def _line(waiting: Sequence[Generation], said: dict[str, scheduler_pb2.Progress]) -> str:
    """The least advanced one's state, the tokens of all together, the longest wait."""
    states, computed, left_s = [], 0, 0.0
    predicted = True
    for generation in waiting:
        found = said.get(generation.spec.request_id)
        state = found.state if found is not None else _OURS.get(generation.stage, "queued")
        states.append(state if state in _STATES else "queued")
        if found is None or not found.HasField("left_s"):
            predicted = False
        else:
            left_s = max(left_s, found.left_s)
        computed += found.computed_tokens if found is not None else 0
    total = sum(generation.spec.prompt_tokens for generation in waiting)
    line = f"{min(states, key=_STATES.index)}, {computed} of {total} tokens"
    return f"{line}, about {left_s:.0f} s left" if predicted else line
