"""Builds conditions and times of a status, as Kubernetes' API conventions define them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

LONGEST_MESSAGE = 1024


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without its time, which `updated` finds by comparison."""

    type: str
    status: bool | None  # None: unknown
    reason: str  # CamelCase
    message: str = ""


def timestamp(unix_s: float) -> str:
    """Formats a time of the API: UTC, whole seconds."""
    return datetime.fromtimestamp(int(unix_s), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def seconds(time: str) -> float:
    """Returns the unix seconds of a time of the API."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def by_type(status: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {condition["type"]: condition for condition in status.get("conditions", [])}


def updated(
    before: Mapping[str, Any], now: Iterable[Condition], *, generation: int, now_s: float
) -> list[dict[str, Any]]:
    """Returns the conditions for a status after `before`: a time changes only with its condition's
    status.
    """
    known = by_type(before)
    found = []
    for condition in now:
        status = {True: "True", False: "False", None: "Unknown"}[condition.status]
        last = known.get(condition.type, {})
        same = last.get("status") == status
        found.append(
            {
                "type": condition.type,
                "status": status,
                "reason": condition.reason,
                "message": condition.message[:LONGEST_MESSAGE],
                "lastTransitionTime": last["lastTransitionTime"] if same else timestamp(now_s),
                "observedGeneration": generation,
            }
        )
    return found
