"""Makes a report of what a live scheduler has noted of its requests and pools."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from millrace.core.report.outcome import Outcome
from millrace.core.report.pool_sample import TimedSample
from millrace.sim.reports.pools import pool_rows
from millrace.sim.reports.recorded import SAMPLE_S, EmptyRange, in_range
from millrace.sim.reports.report import RunReport, report_of


def report_of_outcomes(
    outcomes: Sequence[Outcome],
    samples: Sequence[TimedSample],
    *,
    began_unix_s: float,
    from_s: float = 0.0,
    to_s: float = math.inf,
    worst: int = 5,
) -> RunReport:
    """Returns the report of the requests that came from `from_s` on and before `to_s`, in seconds
    after `began_unix_s`. The outcomes' times are Unix times.

    Raises EmptyRange.
    """
    since = [replace(one, arrived_s=one.arrived_s - began_unix_s) for one in outcomes]
    found = [one for one in since if from_s <= one.arrived_s < to_s]
    if not found:
        raise EmptyRange(
            f"no request came {in_range(from_s, to_s)}; Redis has {len(since)} requests"
        )
    last_s = max(one.arrived_s + (one.late_s or 0.0) for one in found)
    pools = [one.sample for one in samples if from_s <= one.at_s - began_unix_s < to_s]
    notes = [] if pools else ["the pools have no sample in this time"]
    return report_of(
        found,
        pool_rows(pools),
        began_unix_s=began_unix_s,
        from_s=from_s,
        to_s=max(min(to_s, last_s), from_s + SAMPLE_S),
        worst=worst,
        notes=notes,
    )
