"""Passes as an instance makes them, for the parts that check and measure them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from millrace.engine import decode_batch
from millrace.engine.assembly import Engine
from millrace.engine.attention_cost import settled_s
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec

_LAUNCHES = ("LaunchKernel", "GraphLaunch", "LaunchCooperativeKernel")
_WAITS = ("Synchronize", "EventQuery")


@contextmanager
def decoding(
    engine: Engine, contexts: Sequence[int], tokens: int, *, fast: bool
) -> Iterator[DecodeBatch]:
    """Yields a greedy batch with a sequence for each context, over the pool's present content.

    `fast`: by graphs and ahead of the tokens; else operator by operator, one step after another.
    Each sequence takes `tokens` steps.
    """
    spec = SamplingSpec(max_tokens=tokens + 1)
    batch = DecodeBatch(
        engine.runner, engine.pool, Sampler(), max_batch=len(contexts), runs_ahead=fast
    )
    if fast:
        engine.runner.follow(batch.page_table)
    else:
        engine.runner.states.page_table = batch.page_table
    held: list[int] = []
    for number, context in enumerate(contexts):
        pages = engine.pool.allocate(engine.layout.pages_for(context + tokens))
        held += pages
        batch.add(
            decode_batch.Sequence(
                request_id=str(number),
                choice=0,
                pages=pages,
                prompt_tokens=context,
                first_token_id=number,
                spec=spec,
            )
        )
    yield batch
    engine.pool.free(held)


def tokens_of(batch: DecodeBatch) -> dict[str, list[int]]:
    """Runs the batch to its end. Returns each sequence's tokens."""
    found: dict[str, list[int]] = {}
    while batch.is_due:
        for out in batch.step():
            found.setdefault(out.request_id, []).append(out.token_id)
    return found


def seconds_per_step(engine: Engine, batch: DecodeBatch, steps: int) -> float:
    """Returns the mean seconds of `steps` steps, from an idle device to an idle device."""
    for _ in range(3):  # what later steps use again
        batch.step()
    begun_s = settled_s(engine.device)
    for _ in range(steps):
        batch.step()
    return (settled_s(engine.device) - begun_s) / steps


def profiled(engine: Engine, batch: DecodeBatch, steps: int) -> tuple[float, float]:
    """Returns the launches of a step, on a CPU torch's operators, and the host's microseconds in
    torch's and the driver's calls of a step, without waits."""
    is_cuda = engine.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
    with profile(activities=activities) as profiler:
        for _ in range(steps):
            batch.step()
        settled_s(engine.device)
    calls, host_us = 0, 0.0
    for event in profiler.key_averages():
        is_launch = any(name in event.key for name in _LAUNCHES)
        calls += event.count if (is_launch if is_cuda else event.key.startswith("aten::")) else 0
        if not any(name in event.key for name in _WAITS):
            host_us += event.self_cpu_time_total
    return calls / steps, host_us / steps


def times_s(device: torch.device, repeats: int, work: Callable[[], object]) -> list[float]:
    """Returns seconds of each call, with the device idle before and after; one more goes before."""
    work()
    found = []
    for _ in range(repeats):
        begun_s = settled_s(device)
        work()
        found.append(settled_s(device) - begun_s)
    return found


def prefill_s(engine: Engine, tokens: int, chunk_tokens: int, repeats: int) -> float:
    """Returns the median seconds of a whole prompt in passes of at most `chunk_tokens`."""
    pages = engine.pool.allocate(engine.layout.pages_for(tokens))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(engine.shape.vocab_size, (tokens,), generator=generator)

    def prompt() -> None:
        for start in range(0, tokens, chunk_tokens):
            end = min(start + chunk_tokens, tokens)
            task = PrefillTask(
                token_ids=ids[start:end],
                history_tokens=start,
                pages=pages,
                want_logits=end == tokens,
            )
            for _ in engine.runner.prefill_batch([task]):
                pass

    seconds = statistics.median(times_s(engine.device, repeats, prompt))
    engine.pool.free(pages)
    return seconds


@torch.inference_mode()
def followed(engine: Engine, prompt: Sequence[int], pages: list[int], tokens: int) -> list[int]:
    """Returns a prompt's next tokens, the likeliest at each step, by prefill and decode steps."""
    task = PrefillTask(token_ids=torch.tensor(prompt), history_tokens=0, pages=pages)
    for _ in engine.runner.prefill_batch([task]):
        pass
    assert task.logits is not None  # the task asked for logits
    first = int(task.logits.argmax())
    batch = DecodeBatch(engine.runner, engine.pool, Sampler(), max_batch=1, runs_ahead=True)
    engine.runner.follow(batch.page_table)
    batch.add(
        decode_batch.Sequence(
            request_id="a",
            choice=0,
            pages=pages,
            prompt_tokens=len(prompt),
            first_token_id=first,
            spec=SamplingSpec(max_tokens=tokens),
        )
    )
    return [first, *tokens_of(batch)["a"]]
