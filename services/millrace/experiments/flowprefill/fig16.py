"""FlowPrefill figure 16: prefill and decode on the same GPU, against vLLM with chunks of 2k.

The paper colocates a prefill and a decode process on one GPU, where the hardware shares it out. Our
colocated instance is Medha's: each iteration carries all decodes and some prefill. It can't stop
within an iteration, so the comparison leaves operator-level preemption out and covers the rest: an
order by slack that may change at every iteration, and chunks that fit the TBT objective. vLLM-CP2K
is the same instance in order of arrival with 2,048 tokens per iteration.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.instance.packing import PackingConfig
from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.plots import Panel
from millrace.sim.scenario import Scenario, Traffic, simulate

_MODEL = "Llama-3-8B"
_MIX = "qwen-colocated"
RATES_RPS = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)

_KV_TOKENS = 400_000  # memory of 80 GB beside the weights
_SEQUENCES = 256  # of a batch, vLLM's default
_TBT_S = 0.1  # the tightest TBT objective: text and image


@dataclass(frozen=True, slots=True, kw_only=True)
class Colocated:
    """How a colocated instance orders and cuts its prefill."""

    policy: str
    adaptive: bool

    def scenario(self, rate_rps: float, size: fp.Size) -> Scenario:
        """Returns one instance, and the paper's mix with its objectives for colocation."""
        spec = SimSpec(
            profile=fp.operator_profile(fp.MODELS[_MODEL]),
            mixed=1,
            decode_kv_tokens=_KV_TOKENS,
            max_batch=_SEQUENCES,
            packing=PackingConfig(t_target_s=_TBT_S, max_batch=_SEQUENCES, adaptive=self.adaptive),
            scheduler=fp.System(policy=self.policy, preemption="none").scheduler(),
        )
        traffic = Traffic(mix=_MIX, rate_rps=rate_rps, requests=size.requests)
        return Scenario(spec=spec, traffic=traffic)


_VLLM, _ORDER, _BOTH = "vLLM-CP2K", "S-EDF, chunks of 2K", "S-EDF, chunks by TBT"
SYSTEMS = {
    _BOTH: Colocated(policy="s_edf", adaptive=True),
    _ORDER: Colocated(policy="s_edf", adaptive=False),
    _VLLM: Colocated(policy="fcfs", adaptive=False),
}


def measure(quick: bool, announce: Announce) -> Outcome:
    """TTFT and TBT attainment by rate."""
    size = fp.size_of(quick)
    found = fp.by_rate(
        SYSTEMS, RATES_RPS, announce, lambda system, rate: simulate(system.scenario(rate, size))
    )
    attained = {
        name: {
            rate: (report.total.ttft_attainment, report.total.tbt_attainment)
            for rate, report in by_rate.items()
        }
        for name, by_rate in found.items()
    }
    return Outcome(
        title="FlowPrefill figure 16: prefill and decode colocated, Llama-3-8B",
        assumptions=(
            fp.ASSUMPTIONS[0],
            "colocated by iteration, not by process: no preemption within an iteration",
            "output lengths by the moments of the Azure 2023 conversation trace",
        ),
        findings=[
            Finding(
                f"TTFT / TBT attainment at {rate:g}/s: {name}",
                "TBT up to 1.6 x vLLM's" if name == _BOTH else "",
                "{:.1%} / {:.1%}".format(*by_rate[rate]),
            )
            for rate in RATES_RPS
            for name, by_rate in attained.items()
        ],
        results={
            name: {
                f"{rate:g}": {
                    "ttft": ttft,
                    "tbt": tbt,
                    "tbt_p99_s": found[name][rate].total.tbt_s.p99,
                }
                for rate, (ttft, tbt) in by_rate.items()
            }
            for name, by_rate in attained.items()
        },
        panels=[
            [
                Panel(
                    title,
                    "request rate (1/s)",
                    f"{title} attainment (%)",
                    {
                        name: [(rate, 100 * both[place]) for rate, both in by_rate.items()]
                        for name, by_rate in attained.items()
                    },
                    mark=90.0,
                )
                for place, title in enumerate(("TTFT", "TBT"))
            ]
        ],
    )
