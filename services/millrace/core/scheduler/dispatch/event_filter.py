"""Drops events of earlier incarnations, of old attempts, and of requests that are not held."""

from __future__ import annotations

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler import events
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import Instance, PrefillInstance

_OfHolding = (
    events.RequestReleased | events.PrefixLanded | events.RequestFinished | events.RequestFailed
)
_OfAttempt = events.RequestReleased | events.PrefixLanded | events.RequestFailed
_OfInstance = (
    _OfHolding
    | events.InstanceLeft
    | events.InstanceDraining
    | events.InstanceCordoned
    | events.LoadReported
    | events.ChunkStarted
    | events.ChunkFinished
    | events.ChunkSuspended
    | events.DecodeStarted
)


class EventFilter:
    """Finds the instance that an event is from; `ignored` counts events that change nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self.ignored = 0
        self._cluster = cluster

    def current(self, event: _OfInstance) -> Instance | None:
        """Returns the instance; None for an incarnation that the scheduler does not know."""
        instance = self._cluster.current(event.instance_id, event.generation)
        self.ignored += instance is None
        return instance

    def holding(self, event: _OfHolding) -> Instance | None:
        """Returns the instance, if it holds the request."""
        instance = self.current(event)
        if instance is None or event.request_id in instance.holdings:
            return instance
        self.ignored += 1
        return None

    def is_of_earlier(self, event: _OfAttempt, request: LiveRequest, instance: Instance) -> bool:
        """Returns whether an instance with KV reports about an earlier attempt."""
        holds = not isinstance(instance, PrefillInstance)
        earlier = holds and 0 < event.attempt < request.attempt
        self.ignored += earlier
        return earlier
