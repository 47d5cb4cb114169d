"""The report of an instance that has prepared tasks and begins none.

Instances add a `Standstill` to a heartbeat when they have begun no operator since the last
heartbeat although tasks are prepared. A single standstill is normal: an operator takes its time,
and a gang waits for its members to stop their other tasks. The scheduler checks how long it lasts
(`stall_watch`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Standstill:
    """A report. `prepared`: requests with a task that could run here, by this instance's knowledge.

    `claimed`: the request whose gang the instance keeps itself free for, or which runs here; empty:
    none. `waits_for` says in words, for the log, what the instance waits for.
    """

    prepared: tuple[str, ...]
    claimed: str = ""
    waits_for: str = ""
