"""Orders of the waiting line, one module a policy.

A policy is a function of (request, now in seconds) to a key; the smaller key goes first, and
equal keys go in order of submission.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from millrace.core.priority import fcfs
from millrace.core.request import Request

PriorityKey = tuple[float, ...]
Policy = Callable[[Request, float], PriorityKey]

POLICIES: Mapping[str, Policy] = MappingProxyType({"fcfs": fcfs.key})
