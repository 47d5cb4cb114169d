"""Finds the best improvement rate of each arrival rate, for `millrace sim profile-rates`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from millrace.cli.sim.asked import document, progress
from millrace.cli.sim.options import AXES, build_systems, parse_numbers
from millrace.cli.sim.tables import print_rates
from millrace.core.cost.rates import format_rates
from millrace.core.errors import ConfigError
from millrace.sim.results.report import write_json
from millrace.sim.studies.rate_profile import RATES, profile_rates, table_of
from millrace.sim.workload.mixes import LONG_FRACTION
from millrace.tables import Output


def run_rates(given: dict[str, Any]) -> None:
    """Runs the search of `given`, the command's options; prints and writes the result."""
    tried_rps = sorted(set(parse_numbers(given["arrivals"], "--arrivals")))
    tried = parse_numbers(given["rates"], "--rates") or RATES
    if not tried_rps or tried_rps[0] == 0.0:
        raise ConfigError(f"--arrivals {given['arrivals']!r}: write rates above 0, in requests/s")
    if max(tried) > 1.0:
        raise ConfigError(f"--rates {given['rates']!r}: improvement rates are at most 1")
    absent = {"rate": 1.0, "rate_scale": 1.0, "slo_scale": 1.0, "slo_class": []}
    absent |= {"failure": [], "errors": [], "slow": []}
    absent |= {"mixed": 0, "kvp": 0, "spp": 1, "long_fraction": LONG_FRACTION, "autoscale": []}
    values = (["fcfs"], [given["planner"]], ["none"], [0])
    found = build_systems(given | absent, dict(zip(AXES, values, strict=True)))
    scenario = next(iter(found.values()))
    console = Output()
    with progress(console) as shown:
        bar = shown.add_task("runs", total=len(tried_rps) * len(tried), note="")

        def advance(arrivals_rps: float, rate: float) -> None:
            shown.update(bar, advance=1, note=f"{arrivals_rps:g}/s, improvement rate {rate:g}")

        rows = profile_rates(scenario, tried_rps, tried, advance)
    print_rates(rows, console)
    setting = format_rates(table_of(rows))
    print(f"scheduler.improvement_rate=-1\nscheduler.improvement_rates={setting}")
    json = given["json"]
    if json is not None:
        results = {"improvement_rates": setting, "rows": [asdict(row) for row in rows]}
        write_json(json, document("profile-rates", given, scenario) | {"results": results})
