"""Millrace's policy against each of the papers', within the same mechanisms, on all traffic.

Preemption by operator, SLO-aware batching, late binding, and CDSP where prompts are long: only the
order differs. A policy has three goodputs (`goodputs`): the largest load with 90 % of all requests
in time, of every class, and of every length band of every class. What nobody regrets is a policy
that is behind in none of them. The constants of the policy `millrace` were chosen on other draws
(seed 0, and the first requests of each trace); the figures here are of `SEEDS`. `bound` gives the
loads that no policy can exceed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

from millrace.experiments.joined import common as joined
from millrace.experiments.joined.bound import bounds
from millrace.experiments.joined.cells import Cells, Job, code, digest
from millrace.experiments.joined.goodputs import CRITERIA, GOAL, goodputs, run
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel
from millrace.sim.scenario import Scenario

POLICIES = ("millrace", "s_edf", "lars", "d_edf", "edf", "lrs", "fcfs")
OURS = "millrace"
SEEDS = (1, 2)
#: With these, a search ends within so many percent of a policy's goodput.
TOLERANCE_PERCENT = 4
#: The bound's line in the charts.
BOUND = "offline bound"
#: What the figures depend on, in the package; the order `OURS` matters for its own figures alone.
_CODE = (
    "core",
    "sim",
    "profiles",
    "experiments/unlimited.py",
    *(f"experiments/joined/{name}.py" for name in ("bound", "common", "goodputs", "least_work")),
)
_OWN_CODE = "core/priority/millrace"

_Searched = Mapping[tuple[str, int, str], Mapping[str, float]]  # by case, seed and policy
_Bounds = Mapping[tuple[str, int], Mapping[str, float]]  # by case and seed


def measure(
    quick: bool, announce: Announce, trace: Path | None = None, resume: Path | None = None
) -> Outcome:
    """Compares them. `trace`: folder of the Azure and Mooncake traces; without it, only mixes.

    `resume` is a file that keeps what is computed. What it has already is not computed again.
    """
    cases = {**joined.cases(trace, quick), **joined.further_cases(quick)}
    seeds = SEEDS[:1] if quick else SEEDS
    policies = (OURS, "s_edf", "lars", "fcfs") if quick else POLICIES
    drawn = {(name, seed): drawn_by(case, seed) for seed in seeds for name, case in cases.items()}
    digests = {
        (*key, policy): digest_of(case, policy)
        for policy in policies
        for key, case in drawn.items()
    }
    cells = Cells(resume)

    def kept(what: str, jobs: Mapping[tuple[Any, ...], Job]) -> dict[tuple[Any, ...], Any]:
        named = {key: " / ".join(map(str, (what, *key))) for key in jobs}
        found = cells.fill({named[key]: job for key, job in jobs.items()}, announce)
        return {key: found[name] for key, name in named.items()}

    def search(name: str, seed: int, policy: str, near: dict[str, float] | None = None) -> Job:
        """Searches are shorter from where the default's ended."""
        case = drawn[name, seed]
        of = _scenario(case, policy), case.start, near
        return Job(digests[name, seed, policy], goodputs, of)

    found: dict[tuple[Any, ...], dict[str, float]] = {}
    most: dict[tuple[Any, ...], dict[str, float]] = {}
    for seed in seeds:
        found |= kept("goodput", {(name, seed, OURS): search(name, seed, OURS) for name in cases})
        found |= kept(
            "goodput",
            {
                (name, seed, policy): search(name, seed, policy, found[name, seed, OURS])
                for policy in policies[1:]
                for name in cases
            },
        )
        most |= kept(
            "bound",
            {
                key: Job(digests[*key, OURS], bounds, (_scenario(case, OURS), case.start))
                for key, case in drawn.items()
                if key[1] == seed
            },
        )
    fair = kept(
        "at the default's goodput by class",
        {
            (*key, policy): Job(
                digest(digests[*key, policy], load), fairness, (_scenario(case, policy), load)
            )
            for policy in policies
            for key, case in drawn.items()
            if (load := found[*key, OURS]["classes"])
        },
    )
    results = {
        name: {
            policy: {
                str(seed): {
                    "goodput": found[name, seed, policy],
                    "at_the_default's_by_class": fair.get((name, seed, policy)),
                }
                for seed in seeds
            }
            for policy in policies
        }
        for name in cases
    }
    ratios = {name: ratios_of(found, name, seeds, policies) for name in cases}
    reached = {name: over_bound(found, most, name, seeds) for name in cases}
    return Outcome(
        title="Goodput at 90 % attainment of all, of every class, of every length band",
        assumptions=(
            f"objectives: Table 2 for the Qwen mix, else {joined.SLO_SCALE:g} x the default",
            f"searched in steps of {TOLERANCE_PERCENT} %; seeds {', '.join(map(str, seeds))}",
            "the offline bound knows all arrivals and divides work at will: no order exceeds it",
        ),
        findings=[*_findings(ratios), _mean_finding(ratios), *_bound_findings(reached)],
        results={
            "cases": results,
            "over_best": ratios,
            "bound": {name: {str(seed): most[name, seed] for seed in seeds} for name in cases},
            "over_bound": reached,
        },
        panels=[
            [_panel(found, most, list(cases), seeds, policies, criterion) for criterion in CRITERIA]
        ],
    )


def fairness(scenario: Scenario, load: float) -> dict[str, Any]:
    """Returns how the requests of one run at a load fared, as JSON."""
    return asdict(run(scenario, load))


def digest_of(case: joined.Case, policy: str) -> str:
    """Returns a digest of all that a policy's figures on the case depend on."""
    traffic, recorded = case.traffic, ""
    if traffic.trace is not None:
        recorded = hashlib.sha256(traffic.trace.read_bytes()).hexdigest()
        traffic = replace(traffic, trace=Path(traffic.trace.name))
    own = "" if policy == OURS else _OWN_CODE
    return digest(policy, replace(case, traffic=traffic), recorded, code(_CODE, own))


def drawn_by(case: joined.Case, seed: int) -> joined.Case:
    """Returns the case with another draw: of a trace, the requests after the first `seed` times as
    many.
    """
    traffic = case.traffic
    if traffic.is_replayed:
        rows, count = traffic.rows(), traffic.count()
        first = rows[min(seed * count, len(rows) - count)].arrival_s
        assert first is not None  # a replayed trace has times
        last = rows[-1].arrival_s
        assert last is not None
        return replace(case, traffic=replace(traffic, window_s=(first, last)))
    return replace(case, traffic=replace(traffic, seed=seed))


def _scenario(case: joined.Case, policy: str) -> Scenario:
    return Scenario(spec=joined.policy(policy, case), traffic=case.traffic)


def ratios_of(
    found: _Searched, name: str, seeds: tuple[int, ...], policies: tuple[str, ...]
) -> dict[str, Any]:
    """Returns, by criterion, the best of the others, and the default's goodput over it (geometric
    means over seeds).
    """
    ratios: dict[str, Any] = {}
    for criterion in CRITERIA:
        means = {
            policy: prod(found[name, seed, policy][criterion] for seed in seeds) ** (1 / len(seeds))
            for policy in policies
        }
        best = max((policy for policy in policies if policy != OURS), key=lambda one: means[one])
        ratio = means[OURS] / means[best] if means[best] else None
        ratios[criterion] = {"best": best, "best_load": means[best], "ratio": ratio}
    return ratios


def over_bound(
    found: _Searched, most: _Bounds, name: str, seeds: tuple[int, ...]
) -> dict[str, dict[str, float | None]]:
    """Returns, by criterion, the bound, and the default's goodput over it (geometric means over
    seeds).
    """
    ratios: dict[str, dict[str, float | None]] = {}
    for criterion in CRITERIA:
        bound = prod(most[name, seed][criterion] for seed in seeds) ** (1 / len(seeds))
        ours = prod(found[name, seed, OURS][criterion] for seed in seeds) ** (1 / len(seeds))
        ratios[criterion] = {"bound": bound, "ratio": ours / bound if bound else None}
    return ratios


def _findings(ratios: Mapping[str, Mapping[str, Any]]) -> list[Finding]:
    found = []
    for name, row in ratios.items():
        best = ", ".join(f"{row[one]['best']} {row[one]['best_load']:.3g}" for one in CRITERIA)
        ours = ", ".join(
            "none" if row[one]["ratio"] is None else f"{row[one]['ratio']:.2f}" for one in CRITERIA
        )
        found.append(Finding(f"{name}: by {', '.join(CRITERIA)}", best, f"{ours} x it"))
    return found


def _mean_finding(ratios: Mapping[str, Mapping[str, Any]]) -> Finding:
    means = []
    for criterion in CRITERIA:
        known = [row[criterion]["ratio"] for row in ratios.values() if row[criterion]["ratio"]]
        means.append(f"{prod(known) ** (1 / len(known)):.3f}" if known else "none")
    return Finding("mean over all traffic", "1, 1, 1", f"{', '.join(means)} x it")


def _bound_findings(ratios: Mapping[str, Mapping[str, Any]]) -> Iterator[Finding]:
    for name, row in ratios.items():
        bound = ", ".join(f"{row[one]['bound']:.3g}" for one in CRITERIA)
        within = ", ".join(
            "none" if row[one]["ratio"] is None else f"{100 * (1 - row[one]['ratio']):.0f}"
            for one in CRITERIA
        )
        yield Finding(f"{name}: at most, by any order", bound, f"within {within} % of it")


def _panel(
    found: _Searched,
    most: _Bounds,
    names: list[str],
    seeds: tuple[int, ...],
    policies: tuple[str, ...],
    criterion: str,
) -> Panel:
    lines = {
        policy: [
            (number, found[name, seed, policy][criterion] / found[name, seed, OURS][criterion])
            for number, name in enumerate(names, 1)
            for seed in seeds[:1]
            if found[name, seed, OURS][criterion]
        ]
        for policy in policies
    }
    lines[BOUND] = [
        (number, most[name, seed][criterion] / found[name, seed, OURS][criterion])
        for number, name in enumerate(names, 1)
        for seed in seeds[:1]
        if found[name, seed, OURS][criterion]
    ]
    numbered = [f"{number} {name}" for number, name in enumerate(names, 1)]
    kinds = "\n".join(
        ", ".join(numbered[start : start + 3]) for start in range(0, len(numbered), 3)
    )
    title = f"Goodput with {GOAL:.0%} of {criterion} in time"
    return Panel(title, kinds, f"goodput / {OURS}'s", lines)
