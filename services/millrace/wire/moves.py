"""Why a decode instance lets an answer go on elsewhere, where it says."""

from __future__ import annotations

from typing import Final

#: `TokenEvent.error` of one that moved for want of memory.
PREEMPTED: Final = "preempted"
