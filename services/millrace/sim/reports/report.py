"""A report of a run: objectives met by class, key and model, the worst requests and why, and what
sizes the pools should have had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from millrace.core.report.outcome import Outcome
from millrace.sim.results.histogram import Distribution, Histogram


class Group:
    """Counts the requests of one class, key or model."""

    def __init__(self) -> None:
        self.requests = self.refused = self.failed = 0
        self._judged = self._in_time = self._all = self._met_all = 0
        self._ttft = Histogram()

    def add(self, one: Outcome) -> None:
        self.requests += 1
        self.refused += one.state == "refused"
        self.failed += one.state == "failed"
        if one.ttft_s is not None:
            self._ttft.add(one.ttft_s)
        if one.in_time is not None:
            self._judged += 1
            self._in_time += one.in_time
        if one.met_all is not None:
            self._all += 1
            self._met_all += one.met_all

    def row(self) -> GroupRow:
        return GroupRow(
            requests=self.requests,
            refused=self.refused,
            failed=self.failed,
            judged=self._judged,
            ttft_attainment=self._in_time / self._judged if self._judged else None,
            attainment=self._met_all / self._all if self._all else None,
            ttft_s=self._ttft.distribution(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    """The figures of a group. Attainments are shares, 0 to 1: of first tokens in time among the
    `judged`, and of all objectives; None where no request has any.
    """

    requests: int
    refused: int
    failed: int
    judged: int
    ttft_attainment: float | None
    attainment: float | None
    ttft_s: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolRow:
    """A pool over the range. `in_use` is the share of its capacity: of prefill the work that
    arrives, of decode the KV, of mixed instances the higher; None: not measured.

    `wanted` and `wanted_most` are sizes by the targets of autoscaling: in 95 % of the time, and at
    the worst moment.
    """

    role: str
    instances: int  # the median
    in_use_mean: float | None
    in_use_p95: float | None
    wanted: int
    wanted_most: int
    reason: str  # of the worst moment
    advice: str

    @property
    def headroom(self) -> float | None:
        """The share of its capacity that is free in the busiest 5 % of the time, 0 or more."""
        return None if self.in_use_p95 is None else max(0.0, 1.0 - self.in_use_p95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """An equal part of the range, for pictures."""

    from_s: float
    requests: int = 0
    judged: int = 0
    in_time: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunReport:
    """All of it. Times are seconds after the run's begin; the requests came from `from_s` on and
    before `to_s`. `began_unix_s` is None where the recording does not say it.
    """

    began_unix_s: float | None
    from_s: float
    to_s: float
    total: GroupRow
    classes: dict[str, GroupRow]
    tenants: dict[str, GroupRow]
    models: dict[str, GroupRow]
    #: Seconds that late requests waited, by what for, the most first.
    late_waited_s: dict[str, float]
    worst: list[Outcome]
    pools: list[PoolRow]
    slots: list[Slot]
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Returns plain dicts and lists; pools with `headroom`, requests with `lateness`."""
        document = asdict(self)
        for row, pool in zip(document["pools"], self.pools, strict=True):
            row["headroom"] = pool.headroom
        for row, one in zip(document["worst"], self.worst, strict=True):
            row["lateness"] = one.lateness
        return document


SLOTS = 60


def report_of(
    outcomes: Sequence[Outcome],
    pools: Iterable[PoolRow],
    *,
    began_unix_s: float | None,
    from_s: float,
    to_s: float,
    worst: int,
    notes: Iterable[str] = (),
) -> RunReport:
    """Sums up the requests of a range; `worst` is how many late ones are listed."""
    total, by = Group(), {name: _Groups() for name in ("slo_class", "tenant", "model")}
    late: dict[str, float] = {}
    for one in outcomes:
        total.add(one)
        for name, groups in by.items():
            groups.of(getattr(one, name) or "-").add(one)
        if one.in_time is False:
            for waited in one.waited:
                late[waited.reason] = late.get(waited.reason, 0.0) + waited.seconds
    ranked = sorted(outcomes, key=lambda one: (-one.lateness, one.request_id))
    return RunReport(
        began_unix_s=began_unix_s,
        from_s=from_s,
        to_s=to_s,
        total=total.row(),
        classes=by["slo_class"].rows(),
        tenants=by["tenant"].rows(),
        models=by["model"].rows(),
        late_waited_s=dict(sorted(late.items(), key=lambda row: -row[1])),
        worst=[one for one in ranked[:worst] if one.in_time is False],
        pools=list(pools),
        slots=_slots(outcomes, from_s, to_s),
        notes=list(notes),
    )


class _Groups:
    """Groups by name."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}

    def of(self, name: str) -> Group:
        return self._groups.setdefault(name, Group())

    def rows(self) -> dict[str, GroupRow]:
        return {name: self._groups[name].row() for name in sorted(self._groups)}


def _slots(outcomes: Iterable[Outcome], from_s: float, to_s: float) -> list[Slot]:
    each_s = (to_s - from_s) / SLOTS
    requests, judged, in_time = ([0] * SLOTS for _ in range(3))
    for one in outcomes:
        index = min(SLOTS - 1, max(0, int((one.arrived_s - from_s) / each_s)))
        requests[index] += 1
        judged[index] += one.in_time is not None
        in_time[index] += one.in_time is True
    return [
        Slot(
            from_s=from_s + index * each_s,
            requests=requests[index],
            judged=judged[index],
            in_time=in_time[index],
        )
        for index in range(SLOTS)
    ]
