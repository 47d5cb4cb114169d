"""The reasons that a decode instance gives for a migration."""

from __future__ import annotations

from typing import Final

#: `TokenEvent.error` of a request that is migrated for lack of memory.
PREEMPTED: Final = "preempted"
