"""Since when this operator sees things as they are, by its own clock.

The API's times are of the clocks of other machines, and of this one's wall clock, which may step.
None of them is compared with another one here: a duration begins when this operator first sees what
it is about, and goes on by a monotonic clock. What another operator saw before counts only as the
seconds that it wrote down. So a step of a clock changes no duration; an operator that starts may
wait a limit of seconds once more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from millrace_operator.observed import Ending, Pod
from millrace_operator.reconcile.conditions import by_type

_Facts = Mapping[Hashable, float]  # with the seconds for which each is known to last already


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """A pool at `now_s`, with times of the operator's clock; the fields are of ObservedPool."""

    now_s: float
    pods: tuple[Pod, ...]
    draining_since_s: Mapping[tuple[str, str], float]
    progressing_since_s: float


class Sightings:
    """Remembers, for each pool, when each of its facts was first seen."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since: dict[str, dict[Hashable, float]] = {}  # by the pool's UID

    def look(self, uid: str, status: Mapping[str, Any], pods: Iterable[Pod]) -> Seen:
        """Returns since when the pool is as its status and its pods say; forgets what is over."""
        pods = tuple(pods)
        facts = {**_of_status(status), **_of_pods(pods)}
        self._note(uid, facts)
        known = self._since[uid]
        since_s = self._since[uid] = {fact: known[fact] for fact in facts}
        drains = {
            (entry["pod"], entry.get("uid", "")): since_s[_drain(entry)]
            for entry in _draining(status)
        }
        return Seen(
            now_s=self._clock(),
            pods=tuple(_timed(pod, since_s) for pod in pods),
            draining_since_s=drains,
            progressing_since_s=since_s[_progress(status)],
        )

    def wrote(self, uid: str, status: Mapping[str, Any]) -> None:
        """Notes what a new status says: its drains begin now."""
        self._note(uid, _of_status(status))

    def forget(self, uid: str) -> None:
        """Forgets a deleted pool."""
        self._since.pop(uid, None)

    def _note(self, uid: str, facts: _Facts) -> None:
        known, now_s = self._since.setdefault(uid, {}), self._clock()
        for fact, lasted_s in facts.items():
            known.setdefault(fact, now_s - lasted_s)


def _of_status(status: Mapping[str, Any]) -> dict[Hashable, float]:
    drains = {_drain(e): float(e.get("waitedSeconds") or 0) for e in _draining(status)}
    return {**drains, _progress(status): 0.0}


def _draining(status: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [entry for entry in status.get("draining", ()) if not entry.get("returning")]


def _drain(entry: Mapping[str, Any]) -> Hashable:
    return "drains", entry["pod"], entry.get("uid", ""), entry["since"]


def _progress(status: Mapping[str, Any]) -> Hashable:
    last = by_type(status).get("Progressing", {})
    return "progresses", last.get("status"), last.get("lastTransitionTime")


def _of_pods(pods: Iterable[Pod]) -> dict[Hashable, float]:
    """Returns which pods are not ready, and which end."""
    found: dict[Hashable, float] = {}
    for pod in pods:
        if not pod.ready:
            found[_unready(pod)] = 0.0
        found.update((_end(one), 0.0) for one in pod.endings)
    return found


def _timed(pod: Pod, since_s: Mapping[Hashable, float]) -> Pod:
    endings = [replace(one, due_s=since_s[_end(one)] + one.grace_s) for one in pod.endings]
    unready_since_s = since_s.get(_unready(pod), pod.unready_since_s)
    return replace(pod, unready_since_s=unready_since_s, endings=tuple(endings))


def _unready(pod: Pod) -> Hashable:
    return "unready", pod.uid, pod.unready_since


def _end(ending: Ending) -> Hashable:
    return "ends", ending.name, ending.by_s
