"""One life of a prefill instance, and what it holds."""

from __future__ import annotations

from millrace.sim.cluster.job import Attempt, Task


class PrefillInstance:
    """One life of a prefill instance. `queue[0]` is what should run, `running` what does."""

    __slots__ = (
        "alive",
        "cancelled",
        "generation",
        "held",
        "id",
        "node",
        "queue",
        "running",
        "waits_since_s",
    )

    def __init__(self, instance_id: str, generation: int, node: str) -> None:
        self.id = instance_id
        self.node = node
        self.generation = generation
        self.alive = True
        self.queue: list[Task] = []
        self.running: Task | None = None
        self.waits_since_s: float | None = None  # idle, for a group's other members
        self.held: dict[str, Attempt] = {}
        self.cancelled: dict[Attempt, None] = {}  # to let go of at the running task's boundary
