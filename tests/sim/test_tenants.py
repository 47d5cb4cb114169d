"""Tenants in the simulator: what a cheat costs the honest ones, and shares by weight.

Three honest tenants offer a fifth of the pool's work each, and a fourth one offers two fifths, or
cheats. The honest ones' requests are the same in all runs.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache
from statistics import mean

import pytest

from millrace.core.weights import Weights
from millrace.experiments import unlimited
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.objectives import isolated_prefill
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.workload.lengths import lognormal_by_quantiles
from millrace.sim.workload.workload import SloClass
from support.tenant_traffic import Tenant, planned

PREFILLS = 2
DURATION_S = 40.0
CHAT = SloClass(name="chat", ttft_s=2.0)
UNSTATED = SloClass(name="chat")
TOKENS = lognormal_by_quantiles(4_000, 12_000)
EVEN = Weights()
#: Honest tenants may lose so many of their requests more than beside an honest fourth tenant.
TOLERANCE = 0.03


def spec(weights: Weights = EVEN) -> SimSpec:
    return SimSpec(
        profile=load_profile("llama3-8b-a100-tp1"),
        decode_profile=load_profile("llama3-8b-a100-tp8"),
        prefill=PREFILLS,
        decode=1,
        prefill_kv_tokens=50_000_000,
        decode_kv_tokens=200_000_000,
        max_batch=4096,
        scheduler=unlimited.scheduler(policy="millrace", preemption="operator"),
        weights=weights,
    )


@cache
def capacity_rps() -> float:
    """Returns the requests that the pool can prefill per second."""
    isolated_s, rng = isolated_prefill(spec()), random.Random(1)
    return PREFILLS / mean(isolated_s(TOKENS(rng)) for _ in range(2000))


def tenant(name: str, share: float, **more: object) -> Tenant:
    """Returns a tenant that offers `share` of the pool's capacity."""
    given = {"input_tokens": TOKENS, "slo": CHAT, **more}
    return Tenant(name=name, rate_rps=share * capacity_rps(), **given)


def honest(slo: SloClass = CHAT) -> list[Tenant]:
    return [tenant(f"honest{i}", 0.2, slo=slo) for i in range(3)]


@dataclass
class Outcome:
    requests: int = 0
    in_time: int = 0
    done_s: float = 0.0  # isolated prefill of the requests that had their first token at the end


def run(
    tenants: list[Tenant],
    weights: Weights = EVEN,
    seed: int = 0,
    duration_s: float = DURATION_S,
) -> dict[str, Outcome]:
    """Returns the outcomes by tenant, and of the honest ones together as `honest`."""
    records: list[RequestRecord] = []
    requests = planned(tenants, duration_s, seed)
    Simulation(spec(weights), requests, Collector(records.append)).run()
    found: dict[str, Outcome] = {}
    for record in records:
        groups = [record.tenant]
        if record.tenant.startswith("honest"):
            groups.append("honest")
        for name in groups:
            outcome = found.setdefault(name, Outcome())
            outcome.requests += 1
            outcome.in_time += record.ttft_s <= (record.ttft_slo_s or CHAT.ttft_s or 0.0)
            if record.arrival_s + record.ttft_s <= duration_s:
                outcome.done_s += record.isolated_s
    return found


def honest_beside(fourth: Tenant) -> float:
    """Returns the share of the honest tenants' requests that are in time."""
    found = run([*honest(), fourth])["honest"]
    return found.in_time / found.requests


@cache
def beside_an_honest_one() -> float:
    return honest_beside(tenant("fourth", 0.4))


CHEATS = {
    "floods": tenant("fourth", 2.0),
    "floods_with_short_ones": tenant("fourth", 3.0, input_tokens=lambda rng: 500),
    "cuts": tenant("fourth", 0.4, pieces=8),
    "is_tight": tenant("fourth", 0.4, slo=replace(CHAT, ttft_s=0.5)),
    "is_impossible": tenant("fourth", 2.0, slo=replace(CHAT, ttft_s=0.02)),
}


@pytest.mark.parametrize("cheat", CHEATS)
def test_no_cheat_costs_the_honest_ones_more_than_an_honest_tenant_does(cheat: str) -> None:
    assert honest_beside(CHEATS[cheat]) >= beside_an_honest_one() - TOLERANCE


def test_without_tenants_the_flood_would_cost_them_much() -> None:
    """The check of the check: the same traffic under one name."""
    traffic = list(planned([*honest(), CHEATS["floods"]], DURATION_S))
    records: list[RequestRecord] = []
    requests = (replace(one, tenant="default") for one in traffic)
    Simulation(spec(), requests, Collector(records.append)).run()
    shares = [
        record.ttft_s <= (record.ttft_slo_s or 0.0)
        for record in records
        if traffic[record.index].tenant != "fourth"
    ]
    assert mean(shares) < beside_an_honest_one() - 0.2


@pytest.mark.parametrize("slo", [CHAT, UNSTATED], ids=["objectives", "none"])
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_backlogged_tenants_get_work_by_weight(slo: SloClass, weight: float) -> None:
    traffic = [tenant("light", 1.5, slo=slo), tenant("heavy", 1.5, slo=slo)]
    found = run(traffic, Weights(tenants={"heavy": weight}), duration_s=DURATION_S / 2)
    ratio = found["heavy"].done_s / found["light"].done_s
    assert weight / 1.35 <= ratio <= 1.35 * weight


def test_one_tenant_has_the_decisions_of_any_other_whatever_its_weight() -> None:
    def finish(name: str, weights: Weights) -> list[tuple[int, float]]:
        records: list[RequestRecord] = []
        traffic = (replace(one, tenant=name) for one in planned([tenant("one", 1.1)], DURATION_S))
        Simulation(spec(weights), traffic, Collector(records.append)).run()
        return [(record.index, record.ttft_s) for record in records]

    plain = finish("default", Weights())
    assert finish("acme", Weights(tenants={"acme": 7.0, "other": 2.0})) == plain
