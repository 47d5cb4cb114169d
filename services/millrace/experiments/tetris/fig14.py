"""Tetris figure 14: the time that cache balancing and transfer handshakes add to a prefill.

Balancing: chunks of 128k (8B) or 64k tokens (70B) on a group twice that of the history before them,
which is 25 % to 200 % as long. Transfer: the part that remains once a prompt is computed, over the
prefill alone. The paper halves the backends of its decode instances under load. Our instances lease
one backend to a request, so the least number at which no request waits is halved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from millrace.core.arithmetic import ceil_div
from millrace.core.request import Chunk
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.experiments.tetris.common import (
    ASSUMPTIONS,
    FULL,
    QUICK,
    TESTBEDS,
    TETRIS,
    Size,
    Testbed,
    cases,
    loaded,
    scenario,
    scheduler,
    shipped_rates,
    systems,
)
from millrace.profiles import load_profile
from millrace.sim.loop import Simulation
from millrace.sim.models.prefill_work import Balancing, PrefillTimes
from millrace.sim.results.counters import EngineCounters
from millrace.sim.results.plots import Panel
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.scenario import Scenario, Watch, simulate
from millrace.sim.workload.workload import PlannedRequest, SloClass

K = 1024
CHUNK_TOKENS = {"8b": 128 * K, "70b": 64 * K}
HISTORY_SHARES = (0.25, 0.5, 1.0, 2.0)
LENGTHS = tuple(k * K for k in (4, 8, 16, 32, 64, 128, 256))
LOAD = 0.75  # of the shipped table's last arrival rate, under which backends are halved


def balancing(key: str, testbed: Testbed) -> dict[str, list[tuple[float, float]]]:
    """Returns (history as a share of the chunk, share that balancing adds) by growth of the
    group."""
    of = _idle(testbed)
    profile = load_profile(testbed.prefill_profile)
    model = Balancing(of.spec, PrefillTimes(profile, 0))
    tokens, in_node = CHUNK_TOKENS[key], of.spec.gpus_per_node // profile.tp
    found = {}
    for sp in (2, 4, 8, 16):
        if sp > testbed.prefill:
            break
        members = tuple(f"p{index}" for index in range(sp))
        place = "one node" if sp <= in_node else "nodes"
        rows = []
        for share in HISTORY_SHARES:
            start = int(share * tokens)
            chunk = Chunk(index=1, start_token=start, num_tokens=tokens, instance_ids=members)
            added_s = model.added_s(chunk, sp // 2, one_node=sp <= in_node)
            rows.append((share, added_s / profile.prefill.chunk_s(tokens, start, sp)))
        found[f"{sp // 2} to {sp}, {place}"] = rows
    return found


def transfer(testbed: Testbed) -> list[tuple[float, float]]:
    """Returns (prompt in k tokens, share that transfer adds) on the largest group, backends to
    spare.
    """
    spec = _idle(testbed).spec
    latency, sp = spec.profile.prefill, testbed.prefill
    rows = []
    for tokens in LENGTHS:
        one = PlannedRequest(
            index=0, arrival_s=0.0, input_tokens=tokens, output_tokens=2, slo=SloClass(name="one")
        )
        found = Simulation(spec, iter([one]), Collector()).run()
        rows.append((tokens / K, _left_s(found) / latency.chunk_s(tokens, 0, sp)))
    return rows


def halved(key: str, testbed: Testbed, trace: str, size: Size) -> dict[str, float]:
    """Returns the shares of the prefill alone that transfer adds under load, with enough backends
    and with half.
    """
    of = scenario(testbed, trace, systems(testbed, trace)[TETRIS])
    of = loaded(of, LOAD * shipped_rates()[key][trace].rows[-1][0], size)

    def added(backends: int) -> tuple[EngineCounters, float]:
        alone: list[float] = []

        def sink(record: RequestRecord) -> None:
            alone.append(record.isolated_s)

        tried = replace(of, spec=replace(of.spec, backends=backends))
        engine = simulate(tried, Watch(sink=sink)).engine
        assert engine is not None  # a simulation always has them
        return engine, _left_s(engine) / sum(alone)

    enough = next(n for n in _doubling() if added(n)[0].transfer_wait_s == 0.0)
    while enough > 1 and added(enough - 1)[0].transfer_wait_s == 0.0:
        enough -= 1
    half = ceil_div(enough, 2)
    return {
        "backends": enough,
        "enough": added(enough)[1],
        "half_backends": half,
        "half": added(half)[1],
    }


def _doubling() -> Iterator[int]:
    count = 1
    while True:
        yield count
        count *= 2


def _left_s(found: EngineCounters) -> float:
    return found.handshake_s + found.transfer_wait_s + found.transfer_tail_s


def _idle(testbed: Testbed) -> Scenario:
    config = scheduler(planner="fixed_sp", fixed_sp=testbed.prefill)
    return scenario(testbed, "short", config)


def measure(quick: bool, announce: Announce) -> Outcome:
    """Measures all three parts."""
    grown = {key: balancing(key, testbed) for key, testbed in TESTBEDS.items()}
    alone = {key: transfer(testbed) for key, testbed in TESTBEDS.items()}
    loaded: dict[str, dict[str, float]] = {}
    for key, testbed, trace in cases(quick):
        announce(f"{testbed.name}, {trace}: transfers under load")
        loaded[f"{key}, {trace}"] = halved(key, testbed, trace, QUICK if quick else FULL)
    return Outcome(
        title="Tetris figure 14: overheads of cache balancing and transfer",
        assumptions=ASSUMPTIONS,
        findings=_findings(grown, alone, loaded),
        results={"balancing": grown, "transfer": alone, "loaded": loaded},
        panels=[
            [
                Panel(
                    f"{key}: balancing, chunk of {CHUNK_TOKENS[key] // K}k",
                    "history / chunk",
                    "added to the chunk (%)",
                    {
                        name: [(share, 100 * added) for share, added in rows]
                        for name, rows in grown[key].items()
                    },
                ),
                Panel(
                    f"{key}: transfer, SP {testbed.prefill}",
                    "prompt (k tokens)",
                    "added to the prefill (%)",
                    {"": [(length, 100 * added) for length, added in alone[key]]},
                    log_x=True,
                ),
            ]
            for key, testbed in TESTBEDS.items()
        ],
    )


def _findings(
    grown: dict[str, dict[str, list[tuple[float, float]]]],
    alone: dict[str, list[tuple[float, float]]],
    loaded: dict[str, dict[str, float]],
) -> list[Finding]:
    found = [
        Finding(
            f"{key}: balancing, {name}", "at most 1.8%", f"{max(added for _, added in rows):.2%}"
        )
        for key, by_growth in grown.items()
        for name, rows in by_growth.items()
    ]
    found += [
        Finding(
            f"{key}: transfer, idle", "0.6-11.8%, mean 2.1%", _range([added for _, added in rows])
        )
        for key, rows in alone.items()
    ]
    found += [
        Finding(
            f"{case}: {one['half_backends']:g} backends for {one['backends']:g}",
            "1.5-5.4%, mean 3.8%",
            f"{one['half'] - one['enough']:.1%}",
        )
        for case, one in loaded.items()
    ]
    return found


def _range(shares: list[float]) -> str:
    mean = sum(shares) / len(shares)
    return f"{min(shares):.2%}-{max(shares):.2%}, mean {mean:.2%}"
