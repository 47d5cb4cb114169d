"""The engine's record of a request until it has ended, and of its work."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millrace.core.kv.kvp_shards import Reservation
from millrace.core.live_request import LiveRequest
from millrace.core.request import Chunk, Request, Shard

if TYPE_CHECKING:
    from millrace.sim.models.decode_model import DecodeInstance
    from millrace.sim.models.prefill_instance import PrefillInstance
    from millrace.sim.workload.workload import PlannedRequest


class Job:
    """A request as its client sees it. Times are simulated seconds, None until they are known."""

    __slots__ = (
        "attempt",
        "attempts",
        "chunks",
        "first_start_s",
        "first_token_s",
        "id",
        "idle_since_s",
        "isolated_s",
        "live",
        "longest_suspension_s",
        "onboarded",
        "placement",
        "plan",
        "request",
        "sp",
        "spread",
        "suspended_s",
    )

    def __init__(self, plan: PlannedRequest, request: Request, isolated_s: float) -> None:
        self.id = request.id
        self.plan = plan
        self.request = request
        self.live: LiveRequest | None = None  # as the machine follows it, once it is accepted
        self.isolated_s = isolated_s
        self.attempt: Attempt | None = None
        self.attempts = 0
        self.chunks = 0
        self.sp = 0
        self.first_start_s: float | None = None
        self.first_token_s: float | None = None
        self.idle_since_s: float | None = None  # since when it has begun and does not compute
        self.suspended_s = 0.0
        self.longest_suspension_s = 0.0
        self.spread: Reservation | None = None  # shards of its KV; None: at one instance
        self.onboarded = 0  # KVP workers that have some of its KV
        self.placement = 0  # number of the attempt that decode heard of last

    def placed(self, attempt: int, shards: tuple[Shard, ...]) -> None:
        """Begins the attempt of this number, with its KV at this decode instance."""
        self.placement = attempt
        self.spread = Reservation(shards=shards) if shards else None
        self.onboarded = 0


class Attempt:
    """One prefill of a request: its chunks, their instances, and the progress of its KV."""

    __slots__ = (
        "chunks",
        "closed",
        "computed_s",
        "decode",
        "done",
        "granted_s",
        "instances",
        "job",
        "landed_s",
        "number",
        "queued_for_backend",
        "rate",
        "tasks",
        "unsent_bytes",
    )

    def __init__(
        self, job: Job, chunks: tuple[Chunk, ...], decode: DecodeInstance | None, number: int
    ) -> None:
        self.job = job
        self.number = number  # as the machine counts them
        self.chunks = chunks
        self.decode = decode
        self.tasks = [Task([(self, chunk)]) for chunk in chunks]
        self.done = 0  # chunks computed
        self.closed = False  # cancelled, lost, or all of its KV has landed
        self.instances: dict[PrefillInstance, None] = {}
        self.computed_s: float | None = None  # since when all chunks are computed
        self.granted_s: float | None = None  # since when it has a backend at the decode instance
        self.queued_for_backend = False
        self.landed_s = 0.0  # when all KV computed so far has landed
        self.unsent_bytes = 0.0  # computed before there was a backend
        self.rate = 0.0  # bytes/s of the last chunk's group


class Task:
    """The unit of work of one group: a chunk, or whole prompts batched together.

    Progress is in nominal seconds: `factor` turns them into true seconds.
    """

    __slots__ = (
        "begun",
        "begun_s",
        "compute_s",
        "done_s",
        "factor",
        "failing",
        "finished",
        "members",
        "parts",
        "signal_s",
        "signals",
        "span",
        "started_s",
        "work_s",
    )

    def __init__(self, parts: list[tuple[Attempt, Chunk]]) -> None:
        self.parts = parts
        self.members: list[PrefillInstance] = []
        self.begun = False
        self.begun_s = 0.0
        self.finished = False
        self.work_s = 0.0
        self.done_s = 0.0
        self.factor = 1.0
        self.failing: PrefillInstance | None = None  # at which it ends with an error
        self.compute_s = 0.0  # true seconds of the spans that ended
        self.started_s: float | None = None  # of the running span
        self.span = 0  # tells this span's callbacks from those of an earlier span
        self.signal_s: float | None = None  # since when it must stop
        self.signals = 0

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Returns (tokens, history) of each part."""
        return [(chunk.num_tokens, chunk.start_token) for _, chunk in self.parts]

    @property
    def can_start(self) -> bool:
        """Whether the chunks before it are computed, and none of its requests was given up."""
        return all(
            attempt.done == chunk.index and not attempt.closed for attempt, chunk in self.parts
        )

    def is_of(self, attempt: Attempt) -> bool:
        """Returns whether it computes nothing else than this request."""
        return len(self.parts) == 1 and self.parts[0][0] is attempt
