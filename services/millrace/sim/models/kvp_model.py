"""KVP workers: they hold shards of requests of other KV owners, as the machine placed them.

The KV owner's steps include the reads of these shards (`batch`). A worker's attention for one KV
owner does not slow its attention for another.
"""

from __future__ import annotations

from millrace.sim.cluster.world import World


class KvpWorker:
    """One incarnation of a KVP worker."""

    __slots__ = ("alive", "generation", "id")

    def __init__(self, instance_id: str, generation: int) -> None:
        self.id = instance_id
        self.generation = generation
        self.alive = True


class KvpPool:
    """All KVP workers."""

    def __init__(self, world: World) -> None:
        self.instances: dict[str, KvpWorker] = {}
        self._world = world

    def join(self, instance_id: str, generation: int) -> None:
        self.instances[instance_id] = KvpWorker(instance_id, generation)

    def leave(self, worker: KvpWorker) -> None:
        """Removes a worker that dies, with all it held; the machine tells the KV owners."""
        worker.alive = False

    def is_idle(self, worker: KvpWorker) -> bool:
        """Returns whether it holds nothing."""
        return not self._world.held_at(worker.id, worker.generation)
