"""Mixed batches of one engine: errors of predictions, chunks sized by predictions, decodes beside
chunks.

Passes are `ModelRunner.mixed` with sampling, as an instance of the mixed role runs them, on pages
with arbitrary content: times depend on the amount of data, not on its values.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from millrace.bench.common.options import Announce
from millrace.colocated.predictor import Predictor
from millrace.core.cost.operators import BatchShape, OperatorModel
from millrace.core.instance.packing import Packer, PackingConfig
from millrace.profiler.measure import Measured, usual
from millrace.profiler.workload import Workload

Document = dict[str, Any]

#: About how many iterations per way the document keeps.
POINTS = 64
#: Passes that the target of an iteration is taken from.
TARGETS = 5
#: The smallest adaptive chunk.
LEAST_CHUNK_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The content of one pass: chunks (tokens, history), and decodes by their contexts."""

    chunks: tuple[tuple[int, int], ...]
    contexts: tuple[int, ...]

    @property
    def shape(self) -> BatchShape:
        return BatchShape(
            prefills=self.chunks,
            decodes=len(self.contexts),
            decode_context_tokens=sum(self.contexts),
        )


# ---- predictor


def random_batches(
    count: int, *, most_tokens: int, most_history: int, most_decodes: int, seed: int = 0
) -> list[Batch]:
    """Makes batches of one chunk, or of two chunks in a quarter of them, beside up to
    `most_decodes` decodes. The logarithms of lengths are uniform; three in ten chunks have no
    history.
    """
    draw = random.Random(seed)

    def length(least: int, most: int) -> int:
        return round(least * math.exp(draw.random() * math.log(most / least)))

    def chunk() -> tuple[int, int]:
        history = 0 if draw.random() < 0.3 else length(32, most_history)
        return length(16, most_tokens), history

    return [
        Batch(
            chunks=tuple(chunk() for _ in range(1 + (draw.random() < 0.25))),
            contexts=tuple(length(16, 2048) for _ in range(draw.randint(0, most_decodes))),
        )
        for _ in range(count)
    ]


def predictor(
    workload: Workload,
    model: OperatorModel,
    measured: Measured,
    batches: Sequence[Batch],
    rounds: int,
    announce: Announce,
) -> Document:
    """Runs every batch `rounds` times, in rounds over all batches. Predictions come from the
    profile alone, and corrected by earlier batches, as in a mixed instance.
    """
    fitting = [
        batch
        for batch in batches
        if workload.has_room_for([*batch.contexts, *map(sum, batch.chunks)])
    ]
    taken_s: list[list[float]] = [[] for _ in fitting]
    for number in range(rounds):
        announce(f"predictor: random mixed batches (round {number + 1} of {rounds})")
        for batch, times in zip(fitting, taken_s, strict=True):
            times.append(workload.mixed_s(batch.chunks, batch.contexts))
    corrected = Predictor(model)
    points: list[Document] = []
    for batch, times in zip(fitting, taken_s, strict=True):
        measured_s, predicted_s = usual(times), model.pass_s(batch.shape)
        corrected_s = corrected.pass_s(batch.shape)
        corrected.observe(batch.shape, measured_s)
        points.append(
            {
                "chunks": batch.chunks,
                "decodes": len(batch.contexts),
                "context_tokens": sum(batch.contexts),
                "measured_s": measured_s,
                "predicted_s": predicted_s,
                "error": predicted_s / measured_s - 1.0,
                "corrected_error": corrected_s / measured_s - 1.0,
                # The noise that no predictor can know.
                "spread": median(abs(taken / measured_s - 1.0) for taken in times),
            }
        )
    errors = [abs(point["error"]) for point in points]
    corrected_errors = [abs(point["corrected_error"]) for point in points]
    return {
        "batches": len(points),
        "fitted_in_s": measured.spent_s,
        "median_error": median(errors),
        "p90_error": _percentile(errors, 90),
        "corrected_median_error": median(corrected_errors),
        "corrected_p90_error": _percentile(corrected_errors, 90),
        "spread": median(point["spread"] for point in points),
        "points": points,
    }


# ---- chunking


@dataclass(slots=True, eq=False)
class Prompt:
    """A long prompt under one way of chunking, as the packer sees it."""

    packer: Packer
    prompt_tokens: int
    t_target_s: float  # the static chunks' objective
    predictor: Predictor | None = None  # of adaptive chunks, corrected by their passes
    done: int = 0


def chunking(
    workload: Workload,
    model: OperatorModel,
    *,
    prompt_tokens: int,
    static: Sequence[int],
    contexts: Sequence[int],
    announce: Announce,
) -> Document:
    """Runs a long prompt in static and in adaptive chunks beside the same decodes (Mnemosyne Figure
    8).

    Each static chunk has an adaptive way, whose target is that chunk's time at the prompt's end:
    iterations of at most equal length. (The longest chunk that a pass may have needs none: it can't
    be longer at the beginning.) The ways take turns, the least advanced first, so that a slow phase
    of the machine affects all of them.
    """
    prompts: dict[str, Prompt] = {}
    for tokens in static:
        last = (tokens, prompt_tokens - tokens)
        target_s = usual([workload.mixed_s([last], contexts) for _ in range(TARGETS)])
        if tokens < workload.max_chunk_tokens:
            predictor = Predictor(model)
            config = PackingConfig(
                t_target_s=target_s,
                min_chunk_tokens=LEAST_CHUNK_TOKENS,
                max_chunk_tokens=workload.max_chunk_tokens,
            )
            adaptive = Packer(predictor, config)
            prompts[f"adaptive {tokens}"] = Prompt(adaptive, prompt_tokens, target_s, predictor)
        fixed = _static(model, tokens + len(contexts))
        prompts[f"static {tokens}"] = Prompt(fixed, prompt_tokens, target_s)
    iterations: dict[str, list[tuple[int, int, float]]] = {name: [] for name in prompts}
    while running := [name for name, one in prompts.items() if one.done < prompt_tokens]:
        name = min(running, key=lambda name: prompts[name].done)
        now = prompts[name]
        announce(f"chunking: a prompt of {prompt_tokens} tokens ({now.done} done)")
        tokens = _next_chunk(now, contexts)
        batch = Batch(chunks=((tokens, now.done),), contexts=tuple(contexts))
        taken_s = workload.mixed_s(batch.chunks, contexts)
        if now.predictor is not None:
            now.predictor.observe(batch.shape, taken_s)
        iterations[name].append((now.done, tokens, taken_s))
        now.done += tokens
    ways = {name: _way(found, prompts[name].t_target_s) for name, found in iterations.items()}
    for tokens in static:
        if (beside := ways.get(f"adaptive {tokens}")) is not None:
            way = ways[f"static {tokens}"]
            way["over_adaptive"] = way["total_s"] / beside["total_s"]
    return {
        "prompt_tokens": prompt_tokens,
        "decodes": len(contexts),
        "context_tokens": sum(contexts),
        "ways": ways,
    }


def _next_chunk(prompt: Prompt, contexts: Sequence[int]) -> int:
    """Returns the tokens of a prompt's next chunk.

    Where decodes alone are predicted to fill the target, a prompt waits until some of them end.
    These never end, so the prompt gets its smallest chunk.
    """
    waiting = [(prompt, prompt.done)]
    packed = prompt.packer.pack(len(contexts), sum(contexts), waiting, _no_slack)
    least = min(LEAST_CHUNK_TOKENS, prompt.prompt_tokens - prompt.done)
    return packed[0][1] if packed else least


def _static(model: OperatorModel, budget: int) -> Packer:
    return Packer(model, PackingConfig(t_target_s=1.0, adaptive=False, fixed_chunk_tokens=budget))


def _no_slack(prompt: Prompt) -> float:
    return 0.0


def _way(found: Sequence[tuple[int, int, float]], t_target_s: float) -> Document:
    """Returns the decodes' time between tokens, which is an iteration's time: its percentiles, its
    growth from the prompt's first eighth to its last, and the whole prefill's time.
    """
    seconds = [taken_s for _, _, taken_s in found]
    end = found[-1][0] + found[-1][1]
    first = [s for done, _, s in found if done < end / 8]
    final = [s for done, tokens, s in found[:-1] if done + tokens > 7 * end / 8] or seconds[-1:]
    return {
        "iterations": len(found),
        "total_s": sum(seconds),
        "p50_s": median(seconds),
        "p99_s": _percentile(seconds, 99),
        "growth": median(final) / median(first),
        "t_target_s": t_target_s,
        "p99_over_target": _percentile(seconds, 99) / t_target_s,
        "points": found[:: max(1, len(found) // POINTS)],
    }


# ---- batching


def batching(
    workload: Workload,
    *,
    chunk_tokens: int,
    histories: Sequence[int],
    contexts: Sequence[int],
    rounds: int,
    announce: Announce,
) -> Document:
    """Measures an iteration of `chunk_tokens` with and without decodes in it (Mnemosyne Figure 22).

    same_tokens: the decodes' tokens are part of the budget, and the chunk is shorter by them;
    same_chunk: they are added to it. `whole` sums the iterations over the histories, as a prefill
    goes through them.
    """
    rows = []
    for history in histories:
        announce(f"batching: decodes beside a prefill (history of {history})")
        taken_s: dict[str, list[float]] = {"alone": [], "same_tokens": [], "same_chunk": []}
        for order in _turns(rounds):
            for kind in order:
                beside = () if kind == "alone" else contexts
                tokens = chunk_tokens - (len(contexts) if kind == "same_tokens" else 0)
                taken_s[kind].append(workload.mixed_s([(tokens, history)], beside))
        rows.append({"history": history} | {kind: usual(found) for kind, found in taken_s.items()})
    whole = {
        kind: sum(row[kind] for row in rows) / sum(row["alone"] for row in rows)
        for kind in ("same_tokens", "same_chunk")
    }
    return {
        "chunk_tokens": chunk_tokens,
        "decodes": len(contexts),
        "context_tokens": sum(contexts),
        "rows": rows,
        "whole": whole,
    }


def _turns(rounds: int) -> Iterator[Sequence[str]]:
    """Yields orders in which each kind is first, second and third equally often."""
    order = ["alone", "same_tokens", "same_chunk"]
    for number in range(rounds):
        first = number % len(order)
        yield order[first:] + order[:first]


def _percentile(values: Sequence[float], percent: int) -> float:
    if len(values) == 1:
        return values[0]
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def histories_of(prompt_tokens: int, chunk_tokens: int, count: int) -> list[int]:
    """Returns histories evenly spread over a prompt, from its start to its last chunk."""
    last = max(prompt_tokens - chunk_tokens, 0)
    return [math.floor(last * number / (count - 1)) for number in range(count)]
