"""Orders of work, one module per policy.

A policy ranks requests: the smaller key goes first, and equal keys go in order of submission. The
live scheduler, the simulator and an instance that packs its own batches all rank by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from millrace.core.priority import d_edf, edf, fcfs, lars, lrs, s_edf, words
from millrace.core.priority.millrace.policy import MillracePolicy
from millrace.core.priority.ranking import KeyPolicy, Policy, PriorityKey, Ranking

__all__ = ["POLICIES", "Policy", "PriorityKey", "Ranking"]

#: By name, what makes a policy. Every scheduler and every instance has its own.
POLICIES: Mapping[str, Callable[[], Policy]] = MappingProxyType(
    {
        "fcfs": partial(KeyPolicy, "fcfs", fcfs.key, words.age, static=True),
        "edf": partial(KeyPolicy, "edf", edf.key, words.deadline, static=True),
        "d_edf": partial(KeyPolicy, "d_edf", d_edf.key, words.deadline),
        "s_edf": partial(KeyPolicy, "s_edf", s_edf.key, words.slack),
        "lrs": partial(KeyPolicy, "lrs", lrs.key, words.slack),
        "lars": partial(KeyPolicy, "lars", lars.key, words.relative_slack),
        "lars_deadline": partial(KeyPolicy, "lars_deadline", lars.key_by_deadline, words.slack),
        "millrace": MillracePolicy,
    }
)
