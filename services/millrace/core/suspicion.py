"""Which lost instances a request was open at, and how it may run because of them.

`core.scheduler.dispatch.suspects` decides with it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from millrace.core.incarnation import Incarnation


class Suspicion:
    """The suspicion against one request."""

    __slots__ = (
        "broken_at",
        "broken_s",
        "deaths",
        "fails_everywhere",
        "is_held",
        "is_isolated",
        "losses",
        "returned",
    )

    def __init__(self) -> None:
        self.deaths: tuple[Incarnation, ...] = ()  # while it was open there, the last one last
        self.losses: tuple[Incarnation, ...] = ()  # of instances that may come back
        self.returned = 0  # losses that were no deaths: the instances came back
        self.is_held = False  # it waits until its losses are resolved
        self.is_isolated = False  # it may only run alone
        self.fails_everywhere = False  # its errors are no instance's fault
        #: The instances of its last attempt that one of them gave up, and when.
        self.broken_at: frozenset[str] = frozenset()
        self.broken_s = 0.0

    @property
    def all(self) -> tuple[Incarnation, ...]:
        """Returns the lost instances that died or may have died."""
        return (*self.deaths, *self.losses)

    def broke(self, instance_ids: Iterable[str], now_s: float) -> None:
        """Notes that one of these instances has given up an attempt, which counts."""
        self.broken_at, self.broken_s = frozenset(instance_ids), now_s

    def suspect(self, incarnation: Incarnation) -> None:
        """Notes that the request was open at an instance that is lost, and may come back."""
        if incarnation not in self.all:
            self.losses += (incarnation,)

    def confirm(self, incarnation: Incarnation) -> None:
        """Notes that a lost instance died."""
        self.losses = tuple(one for one in self.losses if one != incarnation)
        if incarnation not in self.deaths:
            self.deaths += (incarnation,)

    def clear(self, incarnations: Collection[Incarnation], *, returned: bool = False) -> None:
        """Notes that these losses are no fault of it; `returned`: the instances came back."""
        self.losses = tuple(one for one in self.losses if one not in incarnations)
        self.deaths = tuple(one for one in self.deaths if one not in incarnations)
        self.returned += returned

    def restrict(self, *, is_held: bool, is_isolated: bool) -> None:
        """Notes how the request may run from now on."""
        self.is_held = is_held
        self.is_isolated = is_isolated
