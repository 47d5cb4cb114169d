"""Drops events of earlier incarnations, of old attempts, and of requests that are not held."""

from __future__ import annotations

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler import events
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import DecodeInstance, Instance, PrefillInstance
from millrace.core.scheduler.reports import PrefixLanded, RequestFailed, RequestReleased

_OfInstance = events.InstanceLeft | events.InstanceCordoned | events.Reported
_OfAttempt = RequestReleased | PrefixLanded | RequestFailed


class EventFilter:
    """Decides which events count; `ignored` counts events that change nothing."""

    def __init__(self, cluster: Cluster) -> None:
        self.ignored = 0
        self._cluster = cluster

    def current(self, event: _OfInstance) -> Instance | None:
        """Returns the instance; None for an incarnation that the scheduler does not know."""
        instance = self._cluster.current(event.instance_id, event.generation)
        self.ignored += instance is None
        return instance

    def is_held(self, request_id: str, instance: Instance) -> bool:
        """Returns whether the instance holds the request."""
        held = request_id in instance.holdings
        self.ignored += not held
        return held

    def frees_nothing(
        self, report: RequestReleased, request: LiveRequest | None, instance: Instance
    ) -> bool:
        """Returns whether a release leaves what the instance holds. `request`: None if the instance
        is to let go of the attempt that it holds.

        Decode names the attempt that it lets go of. A release that names none answers a cancel that
        found nothing, and the attempt came after that cancel. The release of a shard is its answer.
        """
        if request is not None:
            return self.is_of_earlier(report, request, instance)
        held = instance.holdings[report.request_id]
        answers = isinstance(instance, DecodeInstance) and not held.is_shard and not report.attempt
        self.ignored += answers
        return answers

    def is_of_earlier(self, report: _OfAttempt, request: LiveRequest, instance: Instance) -> bool:
        """Returns whether an instance with KV reports about an earlier attempt.

        A release that names no attempt answers a cancel that found nothing. The request needs the
        instance, so the cancel was of an earlier attempt, which had ended by itself.
        """
        holds = not isinstance(instance, PrefillInstance)
        least = 0 if isinstance(report, RequestReleased) else 1
        earlier = holds and least <= report.attempt < request.attempt
        self.ignored += earlier
        return earlier
