"""Asks the scheduler how far prompts are computed, and reports it to the clients that wait.

Only silent streams and streams that show their progress ask: a request with a short wait costs
nothing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.generation.stage import Stage
from millrace.wire.fleet_messages import Progress

#: A report is made after this time, even if the scheduler has not answered.
ANSWER_S = 1.0

#: From the least to the most advanced.
_STATES = ("moving", "parked", "queued", "prefilling", "transferring")
_OURS = {Stage.PARKED: "parked", Stage.MOVING: "moving"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptsReport:
    """How far the prompts of one response are, those that have no first token yet.

    `state` is of the least advanced prompt, the tokens are of all prompts together. `queue_place`
    (from 1) and `left_s`, the predicted seconds until the first token, are the largest of all; None
    if unknown. `predicted_ttft_s` is `left_s` counted from the request's arrival.
    """

    state: str
    prompt_tokens: int
    computed_tokens: int
    queue_place: int | None
    left_s: float | None
    predicted_ttft_s: float | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        """Returns the report on one line."""
        line = f"{self.state}, {self.computed_tokens} of {self.prompt_tokens} tokens"
        if self.queue_place is not None:
            line += f", place {self.queue_place} in the queue"
        return line if self.left_s is None else f"{line}, about {self.left_s:.0f} s left"


class PromptsAhead:
    """Asks for the progress of many streams in one message, and gives every stream its answers."""

    def __init__(self, send: Callable[[Sequence[str]], None]) -> None:
        self._send = send
        self._asked: dict[str, asyncio.Future[Progress]] = {}

    def take(self, progress: Progress, /) -> None:
        """Takes an answer of the scheduler."""
        asked = self._asked.pop(progress.request_id, None)
        if asked is not None:
            asked.set_result(progress)

    async def report(self, requests: Sequence[ProxyRequest]) -> PromptsReport | None:
        """Returns the state of the requests that have no first token yet; None if all have one."""
        waiting = [r for r in requests if not r.has_begun and not r.has_ended]
        if not waiting:
            return None
        ids = [r.spec.request_id for r in waiting if r.stage not in _OURS]
        return _report(waiting, await self.ask(ids), time.monotonic())

    async def ask(self, request_ids: Sequence[str]) -> dict[str, Progress]:
        """Returns what the scheduler says of these requests, of any proxy, within ANSWER_S.

        It says nothing of a request that has ended.
        """
        if not request_ids:
            return {}
        loop = asyncio.get_running_loop()
        new = [i for i in request_ids if i not in self._asked]
        self._asked |= {request_id: loop.create_future() for request_id in new}
        asked = {request_id: self._asked[request_id] for request_id in request_ids}
        if new:
            self._send(new)
        try:
            await asyncio.wait(asked.values(), timeout=ANSWER_S)
            return {i: one.result() for i, one in asked.items() if one.done()}
        finally:
            for request_id in new:
                if self._asked.get(request_id) is asked[request_id]:
                    del self._asked[request_id]


def _report(
    waiting: Sequence[ProxyRequest], progress: dict[str, Progress], now: float
) -> PromptsReport:
    states, computed, places, left = [], 0, [], list[float | None]()
    for request in waiting:
        if (answer := progress.get(request.spec.request_id)) is None:
            states.append(_OURS.get(request.stage, "queued"))
            left.append(None)
            continue
        prompt = answer.prompt
        states.append(prompt.state.value)
        computed += prompt.computed_tokens
        left.append(prompt.left_s)
        if prompt.queue_place is not None:
            places.append(prompt.queue_place)
    known = [one for one in left if one is not None]
    left_s = max(known) if len(known) == len(left) else None
    return PromptsReport(
        state=min(states, key=_STATES.index),
        prompt_tokens=sum(request.spec.prompt_tokens for request in waiting),
        computed_tokens=computed,
        queue_place=max(places, default=None),
        left_s=left_s,
        predicted_ttft_s=None if left_s is None else now - waiting[0].arrived_at + left_s,
    )
