"""Decides how an instance leaves a pool: it is cordoned, emptied, evicted if late, and removed.

`resize` chooses the instances that leave; `drain_actions` returns the actions for the current
state. Both are pure. A connector (`millrace up --autoscale`, the operator) observes the instances,
carries the actions out, and remembers since when each instance leaves. An action that failed is
returned again in the next pass.

The state of a leaving instance, and its actions:

- registered at the scheduler, not cordoned (after a new registration, too): Cordon;
- registered, holds no requests, and is cordoned or not ready: Remove;
- registered, holds requests: wait; Evict from `timeout_s` on, Remove from `timeout_s + eviction_s`
  on;
- not registered, not ready: Remove. The instance still starts, or it died and lost its requests;
- not registered, ready: wait for its registration; Remove from `timeout_s` on;
- the scheduler does not answer: Remove from `timeout_s` on.

With OnTimeout.WAIT no deadline applies: nothing is evicted, and requests are waited for. A staying
instance gets Uncordon if it is registered, ready, and cordoned by the connector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class OnTimeout(Enum):
    """What happens to the requests of an instance that did not drain in time."""

    MIGRATE = "Migrate"
    ABORT = "Abort"  # they end with an error
    WAIT = "Wait"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainPolicy:
    """How long an instance may drain."""

    timeout_s: float
    eviction_s: float  # the longest eviction
    on_timeout: OnTimeout = OnTimeout.MIGRATE

    def is_over(self, since_s: float, now_s: float) -> bool:
        """Returns whether the time to drain without an eviction is over."""
        return now_s - since_s >= self.timeout_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Registration:
    """An instance as the scheduler knows it."""

    cordoned: bool
    held_requests: int  # requests in compute, in the batch, or with a lease on its pages


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """An instance as its connector observes it."""

    id: str
    ready: bool  # the process serves, so requests may be in flight to it
    leaves_since_s: float | None = None  # None: the instance stays
    registration: Registration | None = None  # None also while the scheduler does not answer
    cordon_is_own: bool = True  # the connector cordoned the instance, and may uncordon it

    @property
    def held_requests(self) -> int:
        """Returns the requests of a registered instance, -1 for an unregistered one."""
        return -1 if self.registration is None else self.registration.held_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Remove:
    """Removes an instance for good."""

    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Uncordon:
    """Gives an instance new work again."""

    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cordon:
    """Gives an instance no new work."""

    instance_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Evict:
    """Ends all requests of an instance: they are migrated, or end with an error with `abort`."""

    instance_id: str
    abort: bool


Action = Remove | Uncordon | Cordon | Evict
_ORDER = (Remove, Uncordon, Cordon, Evict)  # a removal needs no scheduler, so none delays it


def drain_actions(
    instances: Iterable[Instance], policy: DrainPolicy, now_s: float, *, scheduler_answers: bool
) -> list[Action]:
    """Returns what to do now: removals, uncordons, cordons, and then evictions."""
    found: list[Action] = []
    for one in instances:
        if one.leaves_since_s is not None:
            found += _leave(one, policy, now_s - one.leaves_since_s, scheduler_answers)
        elif one.ready and one.cordon_is_own and one.registration and one.registration.cordoned:
            found.append(Uncordon(instance_id=one.id))
    return sorted(found, key=lambda action: _ORDER.index(type(action)))


def _leave(
    one: Instance, policy: DrainPolicy, waited_s: float, scheduler_answers: bool
) -> Iterator[Action]:
    if _is_removable(one, policy, waited_s, scheduler_answers):
        yield Remove(instance_id=one.id)
    if one.registration is not None and not one.registration.cordoned:
        yield Cordon(instance_id=one.id)
    late = waited_s >= policy.timeout_s and policy.on_timeout is not OnTimeout.WAIT
    if late and one.held_requests > 0:
        yield Evict(instance_id=one.id, abort=policy.on_timeout is OnTimeout.ABORT)


def _is_removable(
    one: Instance, policy: DrainPolicy, waited_s: float, scheduler_answers: bool
) -> bool:
    known = one.registration
    if known is not None and not known.held_requests:
        return known.cordoned or not one.ready  # until it is cordoned, work may be in flight to it
    if known is None and scheduler_answers and not one.ready:
        return True
    late_s = policy.timeout_s + (0.0 if known is None else policy.eviction_s)
    return policy.on_timeout is not OnTimeout.WAIT and waited_s >= late_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Resize:
    """The change that brings a pool to a size."""

    start: int  # new instances
    stay: tuple[str, ...] = ()  # instances whose drain is cancelled
    leave: tuple[str, ...] = ()


def resize(instances: Sequence[Instance], size: int) -> Resize:
    """Returns the change after which `size` instances stay. `instances` come oldest first.

    Drains are cancelled before any instance starts: first the drain with the most requests, among
    equals the oldest drain. Unregistered instances leave first, then those with the fewest
    requests, among equals the youngest.
    """
    young_first = instances[::-1]
    staying = [one for one in young_first if one.leaves_since_s is None]
    drains = [(one.leaves_since_s, one) for one in young_first if one.leaves_since_s is not None]
    drains.sort(key=lambda drain: (-drain[1].held_requests, drain[0]))
    staying.sort(key=lambda one: one.held_requests)
    missing = max(size - len(staying), 0)
    return Resize(
        start=max(missing - len(drains), 0),
        stay=tuple(one.id for _, one in drains[:missing]),
        leave=tuple(one.id for one in staying[: max(len(staying) - size, 0)]),
    )
