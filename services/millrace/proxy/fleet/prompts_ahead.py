"""Asks the scheduler how far prompts are computed, and reports it to the clients that wait.

Only silent streams ask, every KEEPALIVE_S: a request with a short wait costs nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from millrace.proxy.generation.proxy_request import ProxyRequest, Stage
from millrace.wire.fleet_messages import Progress

#: The comment goes out after this time, even if the scheduler has not answered.
ANSWER_S = 1.0

#: From the least to the most advanced.
_STATES = ("moving", "parked", "queued", "prefilling", "transferring")
_OURS = {Stage.PARKED: "parked", Stage.MOVING: "moving"}


class PromptsAhead:
    """Asks for the progress of many streams in one message, and gives every stream its answers."""

    def __init__(self, send: Callable[[Sequence[str]], None]) -> None:
        self._send = send
        self._asked: dict[str, asyncio.Future[Progress]] = {}

    def take(self, progress: Progress, /) -> None:
        """Takes an answer of the scheduler."""
        asked = self._asked.get(progress.request_id)
        if asked is not None and not asked.done():
            asked.set_result(progress)

    async def describe(self, requests: Sequence[ProxyRequest]) -> str:
        """Returns one line about the requests that have no first token yet; empty if all have one.

        A stream has one call at a time: a second question would take the answer to the first.
        """
        waiting = [r for r in requests if not r.has_begun and not r.has_ended]
        if not waiting:
            return ""
        return _line(waiting, await self._ask(waiting))

    async def _ask(self, waiting: Sequence[ProxyRequest]) -> dict[str, Progress]:
        ids = [r.spec.request_id for r in waiting if r.stage not in _OURS]
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


def _line(waiting: Sequence[ProxyRequest], progress: dict[str, Progress]) -> str:
    """Shows the state of the least advanced request, all tokens together and the longest wait."""
    states, computed, left_s = [], 0, 0.0
    predicted = True
    for request in waiting:
        if (answer := progress.get(request.spec.request_id)) is None:
            states.append(_OURS.get(request.stage, "queued"))
            predicted = False
            continue
        prompt = answer.prompt
        states.append(prompt.state.value)
        computed += prompt.computed_tokens
        if prompt.left_s is None:
            predicted = False
        else:
            left_s = max(left_s, prompt.left_s)
    total = sum(request.spec.prompt_tokens for request in waiting)
    line = f"{min(states, key=_STATES.index)}, {computed} of {total} tokens"
    return f"{line}, about {left_s:.0f} s left" if predicted else line
