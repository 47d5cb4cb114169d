"""The fleet as the board's lines have told it so far: what `millrace top` shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from millrace.core.board import events as board

#: The last first tokens that the share in time is of.
MOST_JUDGED = 1000

_ENDS = frozenset({"finished", "failed", "cancelled", "refused"})


@dataclass(slots=True)
class InstanceNow:
    """An instance, and the chunks that it computes."""

    card: board.Instance
    usage: board.Usage
    chunks: dict[tuple[str, int], None] = field(default_factory=dict)  # (request, chunk)

    @property
    def kv_share(self) -> float:
        """Returns the share of its pages that are held or reserved, 0 to 1."""
        return self.usage.used_pages / self.card.kv_pages if self.card.kv_pages else 0.0


@dataclass(slots=True)
class RequestNow:
    """A request that has not ended."""

    arrived: board.Arrived
    arrival_s: float
    state: str = "queued"
    group: int = 0  # instances of its largest chunk
    running: dict[int, tuple[str, ...]] = field(default_factory=dict)  # chunks, and where
    ttft_s: float | None = None

    def ttft_so_far_s(self, now_s: float) -> float:
        """Returns the TTFT; without a first token the time since the arrival."""
        return max(now_s - self.arrival_s, 0.0) if self.ttft_s is None else self.ttft_s

    def slo_share(self, now_s: float) -> float | None:
        """Returns the TTFT so far over its objective; None without one."""
        slo_s = self.arrived.ttft_slo_s
        return self.ttft_so_far_s(now_s) / slo_s if slo_s else None


class FleetNow:
    """Follows lines; a head forgets all that was before."""

    def __init__(self) -> None:
        self._reset()

    def _reset(self) -> None:
        self.now_s = 0.0
        self.instances: dict[str, InstanceNow] = {}
        self.requests: dict[str, RequestNow] = {}
        self.settings = board.Fleet(policy="")
        self.judged: deque[bool] = deque(maxlen=MOST_JUDGED)
        self.notice = ""

    @property
    def in_time(self) -> float | None:
        """Returns the share of the last first tokens that were in time; None of none."""
        return sum(self.judged) / len(self.judged) if self.judged else None

    def add(self, lines: Iterable[dict[str, object]]) -> None:
        """Takes lines in. Raises BoardError for lines of another format."""
        for line in lines:
            now_s, event = board.read_line(line)
            if isinstance(event, board.Head):
                self._reset()
            elif event is not None:
                self.now_s = max(self.now_s, now_s)
                self._take(event, now_s)

    def _take(self, event: board.BoardEvent, now_s: float) -> None:
        match event:
            case board.Instance():
                known = self.instances.get(event.id)
                if known is None:
                    self.instances[event.id] = InstanceNow(event, board.Usage(id=event.id))
                else:
                    known.card = event
            case board.InstanceGone():
                self.instances.pop(event.id, None)
            case board.Usage():
                if (known := self.instances.get(event.id)) is not None:
                    known.usage = event
            case board.Fleet():
                self.settings = event
            case board.Notice():
                self.notice = event.text
            case board.Arrived():
                self.requests[event.id] = RequestNow(event, now_s - event.since_s)
            case _:
                if (request := self.requests.get(event.id)) is not None:
                    self._of_request(request, event)

    def _of_request(self, request: RequestNow, event: board.BoardEvent) -> None:
        match event:
            case board.Planned():
                request.group = max((len(one.instance_ids) for one in event.chunks), default=0)
            case board.ChunkRuns():
                request.running[event.chunk] = event.instances
                for one in self._at(event.instances):
                    one.chunks[event.id, event.chunk] = None
            case board.ChunkStops():
                for one in self._at(request.running.pop(event.chunk, ())):
                    one.chunks.pop((event.id, event.chunk), None)
            case board.FirstToken():
                request.ttft_s = event.ttft_s
                if event.in_time is not None:
                    self.judged.append(event.in_time)
            case board.State():
                request.state = event.state
                if event.state in _ENDS:
                    del self.requests[event.id]

    def _at(self, names: Iterable[str]) -> Iterable[InstanceNow]:
        return (self.instances[name] for name in names if name in self.instances)
