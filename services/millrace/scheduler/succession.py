"""What a leader leaves to the next one, and the wait of the next one for the peers named there.

The note of the lease names the instances and the proxies that were connected, cordoned instances
and the settings that were changed while the scheduler ran.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from typing import Any

import orjson

from millrace.core.config import Config
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.recording import RecordingError, event_of, plain_event

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class Estate:
    """The peers by id, the cordoned instances, and the last change of each setting."""

    workers: list[str] = field(default_factory=list)
    proxies: list[str] = field(default_factory=list)
    cordoned: list[str] = field(default_factory=list)
    changes: list[Event] = field(default_factory=list)
    configured: str = ""  # with which settings the changes were made
    is_inherited: bool = False  # from a former leader, whose work goes on

    def encode(self) -> bytes:
        return orjson.dumps(
            {
                "workers": self.workers,
                "proxies": self.proxies,
                "cordoned": self.cordoned,
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


class Awaited:
    """The peers of the former leader that have not come yet."""

    def __init__(self, estate: Estate) -> None:
        self.workers = set(estate.workers)
        self.proxies = set(estate.proxies)

    @property
    def missing(self) -> list[str]:
        return [*sorted(self.workers), *sorted(self.proxies)]
