"""Runs the same systems and the same requests in the simulator, with this machine's profile."""

from __future__ import annotations

from millrace.bench.hol.live import BACKENDS
from millrace.bench.hol.systems import System
from millrace.bench.hol.traffic import Attainment, Traffic
from millrace.core.config import load_config
from millrace.core.cost.profile import Profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.workload.workload import plan


def attainment(
    system: System, profile: Profile, traffic: Traffic, rate_rps: float, seed: int, beyond_s: float
) -> Attainment:
    """Runs one simulation. Every TTFT counts as `beyond_s` longer: the part of a live TTFT that is
    not simulated and delays no other request.
    """
    rates = profile.kv_transfer_bytes_s
    spec = SimSpec(
        profile=profile,
        prefill=1,
        decode=1,
        max_chunk_tokens=system.chunk_tokens,
        scheduler=load_config(overrides=system.settings).scheduler,
        backends=BACKENDS,
        transfer_backend=max(rates, key=lambda name: rates[name]),
    )
    met: dict[str, int] = {}
    known: dict[str, int] = {}

    def sink(record: RequestRecord) -> None:
        name, objective_s = record.class_name, record.ttft_slo_s
        known[name] = known.get(name, 0) + 1
        in_time = objective_s is None or record.ttft_s + beyond_s <= objective_s
        met[name] = met.get(name, 0) + (in_time and not record.error)

    Simulation(spec, plan(traffic.at(rate_rps, seed)), Collector(sink)).run()
    return Attainment(rate_rps=rate_rps, met=met, known=known)
