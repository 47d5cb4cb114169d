"""Mnemosyne figures 18 and 21: TTFT against TBT by chunk and KVP degree; bandwidth of decode steps.

A prompt of n tokens with k workers puts n / k tokens on each, one after the other, as in figure 19.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.experiments import long_context as mn
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.profiles import load_profile
from millrace.sim.cluster.sharded_passes import spread_pass_s
from millrace.sim.results.plots import Panel

CONTEXTS = (mn.MILLION, 2 * mn.MILLION, 4 * mn.MILLION)
DEGREES = (1, 2, 4)
CHUNKS = (32, 64, 128, 256)
STAGES = 4
SAMPLES = 400  # iterations that stand for all of a prefill

MBU_CONTEXTS = (mn.MILLION, 4 * mn.MILLION, 10 * mn.MILLION)
HBM_BYTES_S = 3.35e12  # of an H100
WEIGHT_BYTES = 16.1e9
GPUS = 8  # of a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A prefill of one context, and a decode in all of its iterations."""

    ttft_s: float
    p95_tbt_s: float


def point(model: OperatorModel, tokens: int, degree: int, chunk: int) -> Point:
    """Returns a prefill in equal chunks on `STAGES` stages, from evenly spaced iterations."""
    sharding = mn.Sharding(shard_tokens=tokens // degree, workers=degree)
    chunks = tokens // chunk
    stage_s = []
    for sample in range(SAMPLES):
        done = (2 * sample + 1) * chunks // (2 * SAMPLES) * chunk
        shape = BatchShape(prefills=((chunk, done),), decodes=1, decode_context_tokens=1000)
        pass_s = spread_pass_s(model, shape, [sharding.degree(done + chunk)])
        stage_s.append(mn.staged_s(model, pass_s, STAGES))
    mean_s = sum(stage_s) / SAMPLES
    p95_s = sorted(stage_s)[int(0.95 * SAMPLES)]
    return Point(ttft_s=mean_s * chunks + (STAGES - 1) * stage_s[-1], p95_tbt_s=p95_s * STAGES)


def utilisation(model: OperatorModel, kv_bytes: int, context: int, degree: int) -> float:
    """Returns the share of the bandwidth that a decode step uses, at the KV owner."""
    read = (WEIGHT_BYTES + kv_bytes * context / degree) / GPUS
    return read / HBM_BYTES_S / model.decode_step_s(1, context, degree)


def measure(quick: bool, announce: Announce) -> Outcome:
    del quick, announce  # it takes seconds
    profile = load_profile(mn.H100)
    model = profile.operators
    found = {
        (tokens, degree): {chunk: point(model, tokens, degree, chunk) for chunk in CHUNKS}
        for tokens in CONTEXTS
        for degree in DEGREES
    }
    used = {
        degree: {
            context: utilisation(model, profile.kv_bytes_per_token, context, degree)
            for context in MBU_CONTEXTS
        }
        for degree in DEGREES
    }
    small, large = CHUNKS[0], CHUNKS[-1]
    said = {1: "above 1", 2: "about 1", 4: "below 1"}
    findings = [
        Finding(
            f"{tokens / mn.MILLION:g}M tokens, chunks of {small}: TTFT with 4 workers over 1",
            said[tokens // mn.MILLION],
            f"{found[tokens, 4][small].ttft_s / found[tokens, 1][small].ttft_s:.2f}",
        )
        for tokens in CONTEXTS
    ]
    findings += [
        Finding(
            f"{tokens / mn.MILLION:g}M tokens, {degree} workers, chunks of {small} and {large}: "
            "TTFT (s), P95 TBT (ms)",
            "",
            ", ".join(
                f"{row[chunk].ttft_s:.0f} and {1e3 * row[chunk].p95_tbt_s:.0f}"
                for chunk in (small, large)
            ),
        )
        for (tokens, degree), row in found.items()
    ]
    findings += [
        Finding(
            "4M tokens, 1 worker, chunks of 128: P95 TBT (ms)",
            "almost 100",
            f"{1e3 * found[4 * mn.MILLION, 1][128].p95_tbt_s:.0f}",
        ),
    ]
    findings += [
        Finding(
            f"MBU of a decode step with {degree} workers, 1M / 4M / 10M tokens",
            "up to 92 %",
            " / ".join(f"{share:.0%}" for share in row.values()),
        )
        for degree, row in used.items()
    ]
    return Outcome(
        title="Mnemosyne figures 18 and 21: TTFT against TBT, bandwidth of decode steps",
        assumptions=(
            f"Llama-3-8B on H100s, TP8 (the paper's figure 18: TP4), {STAGES} stages in figure 18",
            "one decode of 1,000 tokens beside every chunk; it goes through all stages",
        ),
        findings=findings,
        results={
            "tradeoff": {
                f"{tokens / mn.MILLION:g}M, kvp {degree}": {
                    chunk: {"ttft_s": one.ttft_s, "p95_tbt_s": one.p95_tbt_s}
                    for chunk, one in row.items()
                }
                for (tokens, degree), row in found.items()
            },
            "mbu": used,
        },
        panels=[
            [
                Panel(
                    f"{tokens / mn.MILLION:g}M tokens",
                    "TTFT (s)",
                    "P95 TBT (ms)",
                    {
                        f"KVP {degree}": sorted(
                            (one.ttft_s, 1e3 * one.p95_tbt_s)
                            for one in found[tokens, degree].values()
                        )
                        for degree in DEGREES
                    },
                )
                for tokens in CONTEXTS
            ]
        ],
    )
