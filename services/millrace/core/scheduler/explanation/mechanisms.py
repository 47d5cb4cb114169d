"""The papers' mechanisms as they are in force now, and the reason where a mechanism is off."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.core.scheduler.fleet.pool import Pool

if TYPE_CHECKING:
    from millrace.core.scheduler.machine import Machine


@dataclass(frozen=True, slots=True)
class Mechanism:
    """One mechanism. detail: its setting where it is on, the reason where it is off."""

    name: str
    on: bool
    detail: str

    def __str__(self) -> str:
        """Returns a line of a table."""
        return f"{self.name:<26}{'on' if self.on else 'off':<5}{self.detail}"


def mechanisms(machine: Machine) -> list[Mechanism]:
    """Returns those of the scheduler and of its pool; of several pools, whose models differ, the
    largest.
    """
    found = [
        Mechanism("policy", True, machine.policy),
        _preemption(machine.config.preemption),
    ]
    pools = machine.cluster.pools.values()
    pool = max(pools, key=lambda one: one.members, default=None)
    if pool is None:
        return found
    return [*found, *_of_pool(machine, pool)]


def _preemption(where: str) -> Mechanism:
    if where == "none":
        return Mechanism("preemption", False, "scheduler.preemption is none")
    return Mechanism("preemption", True, f"of a running prefill, at every {where}")


def _of_pool(machine: Machine, pool: Pool) -> Iterator[Mechanism]:
    yield _adaptive_chunks(pool)
    if not pool.prefill:
        yield Mechanism(
            "groups", False, "the pool has no prefill instance; mixed ones compute alone"
        )
        return
    planner, name = machine.config.planner, "groups"
    if planner in ("auto", "cdsp"):
        name = "groups (CDSP)"
    if why := _why_alone(planner, pool):
        yield Mechanism(name, False, why)
    else:
        degrees = ", ".join(map(str, pool.degrees))
        yield Mechanism(name, True, f"of {degrees} instances")
        source, rate = machine.cluster.improvement_source, machine.improvement_rate
        detail = f"{source}, now {rate:g}"
        yield Mechanism("improvement rate by load", source != "fixed", detail)
    yield _batches(machine.config.batch_tokens, pool)


def _adaptive_chunks(pool: Pool) -> Mechanism:
    name, mixed = "adaptive chunks", list(pool.mixed())
    if not mixed:
        return Mechanism(name, False, "the pool has no mixed instance")
    if static := [one.id for one in mixed if not one.card.adaptive_chunks]:
        return Mechanism(name, False, f"mixed.chunking is static at {', '.join(static)}")
    return Mechanism(name, True, "of prompts in batches with decodes")


def _why_alone(planner: str, pool: Pool) -> str:
    """Returns why each prompt goes to one instance; empty where groups can be formed."""
    if planner == "least_queue":
        return f"scheduler.planner is {planner}"
    if len(pool.degrees) > 1 or pool.degrees[0] > 1:
        return ""
    known = [sp for sp in pool.latency.degrees if sp > 1]
    if len(pool.prefill) < 2:
        return "the pool has 1 prefill instance"
    if not known:
        return "no times of groups are known; `millrace profile --sp 2` measures them"
    if known[0] > len(pool.prefill):
        return f"times are known of groups of {known[0]} and more, and the pool has fewer"
    return "the pool's instances differ in their pages"


def _batches(wanted: int, pool: Pool) -> Mechanism:
    name = "batches of prompts"
    if wanted == 0:
        return Mechanism(name, False, "scheduler.batch_tokens is 0")
    if pool.batch_tokens <= 2:
        return Mechanism(name, False, "a prompt of one token fills an instance, by its times")
    source = "which fill an instance" if wanted < 0 else "by scheduler.batch_tokens"
    return Mechanism(name, True, f"of less than {pool.batch_tokens} tokens, {source}")
