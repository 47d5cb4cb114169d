"""What a leader leaves to the next one, and the wait of the next one for the peers named there.

The note of the lease names the instances and the proxies that were connected, cordoned instances
and the settings that were changed while the scheduler ran.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import orjson

from millrace.core.config import Config
from millrace.core.scheduler.events import Event, InstanceCordoned, TakeoverEnded
from millrace.core.scheduler.recording import RecordingError, event_of, plain_event

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Estate:
    """The peers by id, the cordoned instances, and the last change of each setting."""

    workers: list[str] = field(default_factory=list)
    proxies: list[str] = field(default_factory=list)
    cordoned: list[str] = field(default_factory=list)
    away: list[str] = field(default_factory=list)  # instances that were lost and may come back
    changes: list[Event] = field(default_factory=list)
    configured: str = ""  # with which settings the changes were made
    is_inherited: bool = False  # from a former leader, whose work goes on

    def encode(self) -> bytes:
        return orjson.dumps(
            {
                "workers": self.workers,
                "proxies": self.proxies,
                "cordoned": self.cordoned,
                "away": self.away,
                "changes": [plain_event(event) for event in self.changes],
                "configured": self.configured,
            }
        )

    @staticmethod
    def decode(note: bytes, configured: str) -> Estate:
        """Returns what `encode` wrote; an empty estate for the first leader, and for a note of
        another release that can't be read. Other settings than the former leader's undo its
        changes.
        """
        own = Estate(configured=configured)
        if not note:
            return own
        try:
            data: dict[str, Any] = orjson.loads(note)
            changes = [event_of(one) for one in data.pop("changes")]
            kept = changes if data.pop("configured") == configured else []
            return Estate(**data, changes=kept, configured=configured, is_inherited=True)
        except (orjson.JSONDecodeError, RecordingError, KeyError, TypeError) as error:
            log.warning("what the former leader left can't be read: %s", error)
            return own


def configured(config: Config) -> str:
    """Names the settings that may be changed while the scheduler runs."""
    return hashlib.sha256(repr((config.scheduler, config.weights)).encode()).hexdigest()[:16]


class Succession:
    """What this leader inherited, whom it still waits for, and what it leaves to the next one.

    A takeover is open while the former leader's peers are awaited.
    """

    def __init__(self, inherited: Estate) -> None:
        self._estate = inherited
        self._knows_the_fleet = inherited.is_inherited
        self.is_open = inherited.is_inherited
        self._workers = set(inherited.workers if self.is_open else ())
        self._proxies = set(inherited.proxies if self.is_open else ())

    @property
    def missing(self) -> list[str]:
        """Returns the peers of the former leader that have not come yet."""
        return [*sorted(self._workers), *sorted(self._proxies)]

    def came(self, *, worker_id: str = "", proxy_id: str = "") -> bool:
        """Notes that a peer is here. Returns True if the takeover is open and nobody is missing."""
        self._workers.discard(worker_id)
        self._proxies.discard(proxy_id)
        return self.is_open and not self.missing

    def had_former(self) -> bool:
        """Notes that a peer had a former leader. Returns True for the first one, if what that
        leader left is lost.
        """
        knew, self._knows_the_fleet = self._knows_the_fleet, True
        return not knew

    def end(self) -> TakeoverEnded:
        """Returns the event that ends the takeover. Its instances have not come yet, or the former
        leader had lost them and expected them back.
        """
        return TakeoverEnded(missing=tuple(sorted(self._workers.union(self._estate.away))))

    def ended(self) -> None:
        """Ends the takeover: nobody is awaited any more."""
        self.is_open = False
        self._workers.clear()
        self._proxies.clear()

    def take_cordon(self, worker_id: str) -> bool:
        """Returns whether the former leader had cordoned the instance; forgets it."""
        if worker_id not in self._estate.cordoned:
            return False
        self._estate.cordoned.remove(worker_id)
        return True

    def changed(self, event: Event) -> None:
        """Leaves a changed setting to the next leader; cordons are noted with their instances."""
        if not isinstance(event, InstanceCordoned):
            others = [one for one in self._estate.changes if type(one) is not type(event)]
            self._estate.changes = [*others, event]

    def note(
        self,
        workers: Iterable[str],
        proxies: Iterable[str],
        cordoned: Iterable[str],
        away: Iterable[str] = (),
    ) -> bytes:
        """Returns what the next leader needs to know, also while the takeover is open.

        `workers`, `proxies` and `cordoned` are here now; those `away` may come back.
        """
        return Estate(
            workers=sorted(self._workers.union(workers)),
            proxies=sorted(self._proxies.union(proxies)),
            cordoned=sorted({*cordoned, *self._estate.cordoned}),
            away=sorted(away),
            changes=self._estate.changes,
            configured=self._estate.configured,
        ).encode()
