"""Measures prompts on groups of live instances: lengths and histories of each SP degree."""

from __future__ import annotations

import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

from millrace.core.scheduler.planning.plan import PlannedChunk
from millrace.profiler.groups.run import Run
from millrace.profiler.measure import HELD_OUT, LEAST_TOKENS, MOST_ROUNDS, Prefill, usual

#: Shorter prompts are hardly worth a group.
FEWEST_TOKENS = 64
#: Equal chunks of the prompts that show the cost of history.
CHUNKS = 4
#: Prompts of `measure.HELD_OUT` that are also measured on groups.
HELD_OUT_PROMPTS = 3

Compute = Callable[[Sequence[PlannedChunk]], Awaitable[Run]]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredGroups:
    """Typical seconds of every case by SP degree. `held_out`: cases that are never fitted to."""

    seconds: Mapping[int, Mapping[Prefill, float]]
    held_out: frozenset[Prefill]
    cores: int
    rounds: int
    spent_s: float


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Chunks of a prompt. All chunk times count; of a held-out prompt, only the last."""

    chunks: tuple[int, ...]
    is_held_out: bool = False

    def cases(self) -> list[Prefill | None]:
        found: list[Prefill | None] = []
        start = 0
        for tokens in self.chunks:
            found.append(Prefill(tokens, start))
            start += tokens
        if self.is_held_out:
            found[:-1] = [None] * (len(found) - 1)
        return found


async def measure_groups(
    compute: Compute,
    degrees: Sequence[int],
    *,
    longest: int,
    budget_s: float,
    cores: int,
    progress: Callable[[float], None] = lambda share: None,
) -> MeasuredGroups:
    """Measures for about `budget_s` seconds, one round at least.

    compute: computes a prompt on the first instances of a fleet. longest: tokens of the longest
    prompt. cores: of the machine that all instances share.
    """
    prompts = _prompts(longest)
    samples: dict[int, dict[Prefill, list[float]]] = {sp: {} for sp in degrees}
    begun_s = time.perf_counter()
    for sp in degrees:
        await compute([PlannedChunk(prompts[0].chunks[0], tuple(range(sp)))])  # they connect
    order = random.Random(0)
    work = [(sp, prompt) for sp in degrees for prompt in prompts]
    first_s = time.perf_counter()
    rounds = 0
    while rounds < MOST_ROUNDS:
        order.shuffle(work)
        for sp, prompt in work:
            run = await compute([PlannedChunk(n, tuple(range(sp))) for n in prompt.chunks])
            for case, chunk in zip(prompt.cases(), run.chunks, strict=True):
                if case is not None:
                    samples[sp].setdefault(case, []).append(chunk.compute_s)
            progress(min((time.perf_counter() - begun_s) / budget_s, 1.0))
        rounds += 1
        now_s = time.perf_counter()
        if now_s - begun_s + (now_s - first_s) / rounds > budget_s:
            break
    progress(1.0)
    fitted = {case for one in prompts if not one.is_held_out for case in one.cases()}
    return MeasuredGroups(
        seconds={
            sp: {case: usual(found) for case, found in sorted(of_sp.items())}
            for sp, of_sp in samples.items()
        },
        held_out=frozenset(case for sp in degrees for case in samples[sp]) - fitted,
        cores=cores,
        rounds=rounds,
        spent_s=time.perf_counter() - begun_s,
    )


def _prompts(longest: int) -> list[_Prompt]:
    """Lists the prompts to measure, the shortest first."""
    tokens = min(FEWEST_TOKENS, longest)
    prompts = []
    while tokens < longest:
        prompts.append(_Prompt((tokens,)))
        tokens *= 2
    prompts.append(_Prompt((longest,)))
    if longest // CHUNKS >= LEAST_TOKENS:
        prompts.append(_Prompt((longest // CHUNKS,) * CHUNKS))
    for share, history_share in HELD_OUT[:HELD_OUT_PROMPTS]:
        chunks = (round(history_share * longest), round(share * longest))
        if chunks[1] >= LEAST_TOKENS:
            prompts.append(_Prompt(tuple(n for n in chunks if n), is_held_out=True))
    return prompts


def devices_of(names: Sequence[str], instances: int, ranks: int) -> list[str]:
    """Returns CUDA_VISIBLE_DEVICES of each prefill instance, then of decode: `ranks` devices each.

    Decode shares the devices of the first instance when no other devices are left.

    names: of the machine's devices. Raises ValueError when there are too few.
    """
    if len(names) < instances * ranks:
        raise ValueError(
            f"{instances} instances of {ranks} devices each; there are {len(names)} devices"
        )
    shares = [",".join(names[i : i + ranks]) for i in range(0, len(names), ranks)]
    whole = len(names) // ranks
    return [*shares[:instances], shares[instances] if whole > instances else shares[0]]
