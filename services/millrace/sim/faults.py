"""Instances that die and come back, as the specification lists them."""

from __future__ import annotations

from millrace.sim.cluster.spec import Failure
from millrace.sim.cluster.world import World
from millrace.sim.fleet import Fleet


class Faults:
    """Sets all failures on the clock. Once `over`, nothing fails or comes back any more."""

    def __init__(self, world: World, fleet: Fleet) -> None:
        self.over = False
        self._world = world
        self._fleet = fleet
        for failure in world.spec.failures:
            world.clock.at(failure.at_s, self._die, failure)

    def _die(self, failure: Failure) -> None:
        if not self.over and self._fleet.leave(failure.instance_id):
            self._world.tally.instance_failures += 1
            now_s = self._world.clock.now_s
            self._world.clock.at(now_s + failure.down_s, self._return, failure)

    def _return(self, failure: Failure) -> None:
        if not self.over:
            self._world.outbox.append(self._fleet.join(failure.instance_id))
