"""KVP workers: they hold shards of requests whose homes are others, as the machine placed them.

What an answer reads of them is in its home's steps (`batch`). A worker's attention for one home
does not slow that for another down.
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
        """It dies: what it held is gone, which the machine tells the homes."""
        worker.alive = False

    def is_idle(self, worker: KvpWorker) -> bool:
        """Whether it holds nothing."""
        return not self._world.held_at(worker.id, worker.generation)
