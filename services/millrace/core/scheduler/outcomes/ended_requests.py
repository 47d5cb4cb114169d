"""The last requests that ended: how long each of them waited, and for what."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from millrace.core.live_request import LiveRequest

#: Requests that are kept. One takes about 1 KB.
MOST_ENDED: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """What is kept of a request that ended. Seconds are by (reason, part of the order)."""

    request_id: str
    state: str
    slo_class: str
    first_token_s: float | None  # after its arrival
    in_time: bool | None
    seconds: dict[tuple[str, str], float]
    suspended_by: tuple[str, ...]
    prompt_tokens: int
    kept_tokens: int  # that decode had, at the begin of its last attempt
    group: int  # instances of its largest chunk; 0: it had no plan
    decode_id: str | None


class EndedRequests:
    """Keeps the last `MOST_ENDED`; the oldest goes first."""

    def __init__(self) -> None:
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ended)

    def get(self, request_id: str) -> Ended | None:
        return self._ended.get(request_id)

    def add(self, request: LiveRequest, now_s: float) -> None:
        """Notes that the request ended. An id that comes again replaces the one before."""
        request.waits.end(now_s)
        first_s = request.first_token_s
        ended = Ended(
            request_id=request.id,
            state=request.state.value,
            slo_class=request.slo.class_name,
            first_token_s=None if first_s is None else first_s - request.arrival_s,
            in_time=_in_time(request),
            seconds=request.waits.seconds,
            suspended_by=request.waits.suspended_by,
            prompt_tokens=request.prompt_tokens,
            kept_tokens=request.kept_tokens,
            group=group_of(request),
            decode_id=request.decode_id,
        )
        self._ended.pop(request.id, None)
        self._ended[request.id] = ended
        if len(self._ended) > MOST_ENDED:
            self._ended.popitem(last=False)


def group_of(request: LiveRequest) -> int:
    """Returns the instances of its largest chunk; 0 where it has no plan."""
    return max((len(chunk.instance_ids) for chunk in request.chunks), default=0)


def _in_time(request: LiveRequest) -> bool | None:
    """Returns whether the first token came in time; None without a token or an objective."""
    if request.slo.ttft_s is None or request.first_token_s is None:
        return None
    return request.first_token_s <= request.deadline_s
