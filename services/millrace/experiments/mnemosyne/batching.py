"""Mnemosyne figures 7 and 22: small chunks' attention, and decodes batched beside a prefill."""

from __future__ import annotations

from millrace.core.cost.operators import OPERATORS, BatchShape, OperatorModel
from millrace.experiments import long_context as mn
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel

CHUNKS = (32, 64, 128, 256, 512, 1024, 2048)
DECODES = (0, 16, 32, 64, 128)
HISTORY = 950_000  # where P95 of a 1M prefill's iterations lies

_ATTENTION = OPERATORS.index("attn")


def attention_s(model: OperatorModel, chunk: int) -> float:
    """Returns the seconds of attention of a 1M prefill in chunks; a scaled sum over every hundredth
    chunk.
    """
    parts = 100
    step = mn.MILLION // parts
    sampled_s = sum(
        model.layer_s(BatchShape(prefills=((chunk, step * part + step // 2),)))[_ATTENTION]
        for part in range(parts)
    )
    return model.layers * sampled_s / parts * mn.MILLION / chunk


def increase(model: OperatorModel, chunk: int, decodes: int) -> float:
    """Returns the share by which `decodes` of 1,000 tokens each lengthen a late iteration."""

    def pass_s(count: int) -> float:
        return model.pass_s(
            BatchShape(
                prefills=((chunk, HISTORY),), decodes=count, decode_context_tokens=1000 * count
            )
        )

    return pass_s(decodes) / pass_s(0) - 1.0


def measure(quick: bool, announce: Announce) -> Outcome:
    model = mn.operators(mn.H100)
    large = mn.operators(mn.LARGE_H100)
    added = {
        chunk: {decodes: increase(model, chunk, decodes) for decodes in DECODES} for chunk in CHUNKS
    }
    attention = {chunk: attention_s(large, chunk) for chunk in CHUNKS}
    return Outcome(
        title="Mnemosyne figures 7 and 22: chunk size and batching beside a 1M prefill",
        assumptions=(
            "figure 22: Llama-3-8B on eight H100s, iterations at 950k tokens of history",
            "figure 7: Llama-3-70B on eight H100s, attention alone",
        ),
        findings=[
            *(
                Finding(
                    f"chunk {chunk}: 128 decodes lengthen the iteration by",
                    "at most 5 %",
                    f"{by_decodes[128]:.1%}",
                )
                for chunk, by_decodes in added.items()
            ),
            *(
                Finding(
                    f"attention of 1M tokens in chunks of {chunk}, more than of 2048",
                    "11 %" if chunk == 32 else "",
                    f"{attention[chunk] / attention[2048] - 1:.1%}",
                )
                for chunk in CHUNKS[:-1]
            ),
        ],
        results={"iteration_increase": added, "attention_s": attention},
        panels=[
            [
                Panel(
                    "Decodes beside a chunk of a 1M prefill",
                    "decodes",
                    "longer iteration (%)",
                    {
                        f"chunk {chunk}": [(n, 100 * share) for n, share in row.items()]
                        for chunk, row in added.items()
                    },
                    mark=5.0,
                ),
                Panel(
                    "Attention of 1M tokens, 70B on eight H100s",
                    "chunk (tokens)",
                    "seconds",
                    {"attention": list(attention.items())},
                    log_x=True,
                ),
            ]
        ],
    )
