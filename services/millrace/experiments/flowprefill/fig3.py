"""FlowPrefill figures 3 and 4: the cost of chunks for a long prompt, the gain of batches."""

from __future__ import annotations

from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.experiments.flowprefill import common as fp
from millrace.experiments.outcome import Announce, Finding, Outcome
from millrace.sim.results.plots import Panel

MODEL = "Llama-3-8B"
PROMPT = 32_768
CHUNKS = (256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
LENGTHS = (32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
BATCHES = (1, 2, 4, 8, 16, 32)


def chunked_s(model: OperatorModel, chunk: int) -> float:
    """Returns the seconds of the long prompt in chunks of so many tokens."""
    return sum(
        model.pass_s(BatchShape(prefills=((chunk, done),))) for done in range(0, PROMPT, chunk)
    )


def batch_s(model: OperatorModel, tokens: int, batch: int) -> float:
    """Returns the seconds of one pass over `batch` prompts of `tokens`, the TTFT of each."""
    return model.pass_s(BatchShape(prefills=((tokens, 0),) * batch))


def measure(quick: bool, announce: Announce) -> Outcome:
    del quick, announce  # it takes milliseconds
    model = fp.operator_profile(fp.MODELS[MODEL]).operators
    chunked = {chunk: chunked_s(model, chunk) for chunk in CHUNKS}
    batched = {
        tokens: {batch: batch_s(model, tokens, batch) for batch in BATCHES} for tokens in LENGTHS
    }
    return Outcome(
        title="FlowPrefill figures 3 and 4: chunks of a long prompt, batches of short ones",
        assumptions=(
            "A100 80 GB by the operator model, for the paper's A100 40 GB",
            "one pass at a time: no request waits",
        ),
        findings=[
            *(
                Finding(
                    f"32k tokens in chunks of {chunk}: throughput, of the whole prompt's",
                    "collapses with small chunks",
                    f"{chunked[PROMPT] / seconds:.2f}",
                )
                for chunk, seconds in chunked.items()
            ),
            *(
                Finding(
                    f"{tokens} tokens, batch of 8 over 1: throughput, TTFT",
                    "much, little" if tokens <= 256 else "little, in proportion",
                    f"{8 * row[1] / row[8]:.2f}x, {row[8] / row[1]:.2f}x",
                )
                for tokens, row in batched.items()
            ),
        ],
        results={"chunked_s": chunked, "batched_s": batched},
        panels=[
            [
                Panel(
                    "32k tokens in chunks",
                    "chunk (tokens)",
                    "throughput (tokens/s)",
                    {MODEL: [(chunk, PROMPT / seconds) for chunk, seconds in chunked.items()]},
                    log_x=True,
                ),
                Panel(
                    "batches: throughput",
                    "prompts in a pass",
                    "tokens/s",
                    {
                        f"{tokens} tokens": [(n, n * tokens / s) for n, s in row.items()]
                        for tokens, row in batched.items()
                    },
                ),
                Panel(
                    "batches: TTFT",
                    "prompts in a pass",
                    "TTFT, of one prompt's",
                    {
                        f"{tokens} tokens": [(n, s / row[1]) for n, s in row.items()]
                        for tokens, row in batched.items()
                    },
                ),
            ]
        ],
    )
