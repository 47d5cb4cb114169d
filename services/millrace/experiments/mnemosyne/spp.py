"""Mnemosyne figures 14 to 16: prefill time over pipeline stages, and their cost for decode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.core.cost.profile import Profile
from millrace.core.instance.packing import PackingConfig
from millrace.experiments import long_context as mn
from millrace.experiments.medha import common as medha
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.plots import Panel
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.workload.workload import PlannedRequest, SloClass

CHUNK_TOKENS = 4096
STAGES = (1, 2, 4, 8, 16)
TOKENS = (mn.MILLION, 2 * mn.MILLION, 10 * mn.MILLION)

#: Floating point operations of a bf16 tensor core pass on one H100, by its data sheet.
_H100_FLOPS = 989e12

#: Llama-3-8B: 2 x parameters a token, and for every (query, key) pair 4 x width x layers.
_FLOPS_PER_TOKEN = 2 * 8.03e9
_FLOPS_PER_PAIR = 4 * 4096 * 32

_GPUS = 8  # of a stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefill:
    """One prompt on one pipeline. `whole_s`: the same GPUs with context parallelism."""

    ttft_s: float
    efficiency: float  # time on one stage over (stages x time)
    mfu: float  # causal attention counted once
    hold_s: float  # longest time of a stage: the longest wait of a new request
    whole_s: float


def flops(tokens: int) -> float:
    """Returns the operations of a whole prefill, with causal attention: half of all pairs."""
    return _FLOPS_PER_TOKEN * tokens + _FLOPS_PER_PAIR * tokens * tokens / 2


def prefill_s(tokens: int, stages: int) -> float:
    """Returns the TTFT of one prompt on an idle pipeline, by the simulator."""
    spec = SimSpec(
        profile=load_profile(mn.H100),
        mixed=1,
        spp=stages,
        decode_kv_tokens=2 * tokens,
        control_s=0.0,
        packing=PackingConfig(t_target_s=1.0, adaptive=False, fixed_chunk_tokens=CHUNK_TOKENS),
        scheduler=medha.scheduler("fcfs"),
    )
    slo = SloClass(name="long", ttft_s=1e9)
    alone = PlannedRequest(index=0, arrival_s=0.0, input_tokens=tokens, output_tokens=1, slo=slo)
    records: list[RequestRecord] = []
    Simulation(spec, iter([alone]), Collector(records.append)).run()
    return records[0].ttft_s


def hold_s(model: OperatorModel, tokens: int, stages: int) -> float:
    """Returns how long a prompt's last chunk holds a stage: the longest wait of a new request."""
    last = BatchShape(prefills=((CHUNK_TOKENS, tokens - CHUNK_TOKENS),))
    return mn.staged_s(model, model.pass_s(last), stages)


def whole_s(profile: Profile, tokens: int, degree: int) -> float:
    """The time of a prompt in one pass over `degree` servers: divided evenly, plus ring steps."""
    by_sp = profile.prefill.by_sp
    pass_s = profile.operators.pass_s(BatchShape(prefills=((tokens, 0),)))
    return pass_s / degree + by_sp[degree].a - by_sp[1].a


Found = Mapping[int, Mapping[int, Prefill]]  # by tokens and stages


def measure(quick: bool, announce: Announce) -> Outcome:
    """Measures every length on every pipeline, and decode steps at 2M tokens."""
    lengths, stages = ((mn.MILLION,), (1, 16)) if quick else (TOKENS, STAGES)
    profile = load_profile(mn.H100)
    model = profile.operators
    found: dict[int, dict[int, Prefill]] = {}
    for tokens in lengths:
        single_s = prefill_s(tokens, 1)
        for count in stages:
            announce(f"{tokens / mn.MILLION:g}M tokens, {count} stages")
            ttft_s = prefill_s(tokens, count)
            found.setdefault(tokens, {})[count] = Prefill(
                ttft_s=ttft_s,
                efficiency=single_s / (count * ttft_s),
                mfu=flops(tokens) / (count * _GPUS * _H100_FLOPS * ttft_s),
                hold_s=hold_s(model, tokens, count),
                whole_s=whole_s(profile, tokens, count),
            )
    steps_s = {count: mn.step_s(model, 2 * mn.MILLION, count) for count in stages}
    return Outcome(
        title="Mnemosyne figures 14 to 16: stream pipeline parallelism, Llama-3-8B on H100s",
        assumptions=(
            f"TP8 stages, chunks of {CHUNK_TOKENS}; what stages send each other is left out: "
            "32 MiB a chunk, 0.1 ms over eight cards",
            "context parallelism: evenly divided, plus the ring steps that Table 1 of Tetris shows",
            "MFU counts causal attention once (half of all pairs), 989 TFLOP/s a GPU",
        ),
        findings=[*_prefills(found), *_steps(steps_s)],
        results={
            "prefill": {
                f"{tokens}": {f"{count} stages": asdict(one) for count, one in row.items()}
                for tokens, row in found.items()
            },
            "decode_step_2m_s": steps_s,
        },
        panels=[[_times(found), _efficiencies(found)]],
    )


def _prefills(found: Found) -> list[Finding]:
    findings = []
    for tokens, row in found.items():
        most = max(row)
        at, length = row[most], f"{tokens / mn.MILLION:g}M tokens, {_GPUS * most} GPUs"
        papers = {(mn.MILLION, 16): "14", (10 * mn.MILLION, 16): "636"}
        findings += [
            Finding(f"{length}: TTFT (s)", papers.get((tokens, most), ""), f"{at.ttft_s:.1f}"),
            Finding(f"{length}: scaling efficiency", "above 80 %", f"{at.efficiency:.0%}"),
            Finding(f"{length}: MFU", "", f"{at.mfu:.0%}"),
        ]
    row = found[mn.MILLION]
    most = max(row)
    return [
        *findings,
        Finding(
            f"1M tokens, {_GPUS * most} GPUs: time with context parallelism, times SPP's",
            "1.64",
            f"{row[most].whole_s / row[most].ttft_s:.2f}",
        ),
        Finding(
            "1M tokens, 8 GPUs: a newcomer waits at most, whole prompt (s)",
            "120",
            f"{row[1].whole_s:.0f}",
        ),
        Finding(
            f"1M tokens, {_GPUS * most} GPUs: a newcomer waits at most, SPP (ms)",
            "62",
            f"{1e3 * row[most].hold_s:.0f}",
        ),
    ]


def _steps(steps_s: Mapping[int, float]) -> list[Finding]:
    papers = {8: "16 %"}  # Medha, appendix B.1
    return [
        Finding(
            f"decode step at 2M tokens: longer with {count} stages than with one by",
            papers.get(count, ""),
            f"{step_s / steps_s[1] - 1:.0%}",
        )
        for count, step_s in steps_s.items()
        if count > 1
    ]


def _times(found: Found) -> Panel:
    lines = {
        f"{tokens / mn.MILLION:g}M, SPP": [(_GPUS * n, one.ttft_s) for n, one in row.items()]
        for tokens, row in found.items()
    }
    lines["1M, context parallelism"] = [
        (_GPUS * n, one.whole_s) for n, one in found[mn.MILLION].items()
    ]
    return Panel("Prefill alone", "GPUs", "TTFT (s)", lines, log_x=True, log_y=True, mark=30)


def _efficiencies(found: Found) -> Panel:
    return Panel(
        "Scaling efficiency",
        "stages of eight GPUs",
        "% of linear",
        {
            f"{tokens / mn.MILLION:g}M": [(n, 100 * one.efficiency) for n, one in row.items()]
            for tokens, row in found.items()
        },
        mark=80.0,
    )
