"""Measures the execution pool by itself: the wait of a preemption, and the cost of the checks.

It runs in this process, over `engine.execution_pool.ExecutionPool` as a prefill instance uses it.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from millrace.core.arithmetic import ceil_div
from millrace.engine.assembly import Engine
from millrace.engine.attention_cost import settled_s
from millrace.engine.device.run_ahead import Pace
from millrace.engine.execution_pool import ChunkTask, ExecutionPool, StopPoint
from millrace.engine.forward.prefill_task import PrefillTask

_WAIT_S = 120.0  # seconds for a task, before the pool counts as broken
LEAST_SIGNALS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocking:
    """Milliseconds from signal to effect, and the longest single operator of the same passes.

    `deciles_ms`: the least, each tenth, and the longest. `free_p99_ms`: until the device has ended
    what was enqueued, too; on the CPU that is nothing.
    """

    granularity: str
    chunk_tokens: int
    signals: int
    mean_ms: float
    median_ms: float
    p99_ms: float
    longest_ms: float
    longest_operator_ms: float
    free_p99_ms: float
    deciles_ms: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Median seconds of one prefill: bare, and through the pool.

    `cost`: the relative extra time through the pool, median over the rounds; `cpu_cost`: the same
    for CPU time, which other processes disturb less.
    """

    tokens: int
    rounds: int
    bare_s: float
    pool_s: float
    cost: float
    cpu_cost: float


class LongPrefill:
    """One prompt for the pool: passes of at most `chunk_tokens`, in pages of its own."""

    def __init__(self, engine: Engine, tokens: int, chunk_tokens: int) -> None:
        """`tokens`: no more than `engine.pool_context_tokens`."""
        self._engine = engine
        self._ids = torch.zeros(tokens, dtype=torch.int64, device=engine.device)
        self._pages = engine.pool.allocate(engine.layout.pages_for(tokens))
        self._chunk_tokens = chunk_tokens
        self.longest_operator_s = 0.0

    def free(self) -> None:
        """Gives the pages back."""
        self._engine.pool.free(self._pages)

    def passes(self) -> Iterator[PrefillTask]:
        tokens = len(self._ids)
        for start in range(0, tokens, self._chunk_tokens):
            end = min(start + self._chunk_tokens, tokens)
            yield PrefillTask(
                token_ids=self._ids[start:end],
                history_tokens=start,
                pages=self._pages,
                want_logits=end == tokens,
            )

    @torch.inference_mode()
    def bare(self) -> None:
        """Runs the runner's own loop, without the pool, until the device is idle."""
        for task in self.passes():
            for _ in self._engine.runner.prefill_batch([task]):
                pass
        settled_s(self._engine.device)

    def steps(self, pace: Pace) -> Generator[StopPoint]:
        """Yields for the pool: a boundary after every operator and pass. `pace`: of its task."""
        for task in self.passes():
            for boundary in self._engine.runner.prefill_batch([task]):
                pace.operator = boundary.operator
                yield StopPoint.after(boundary.operator)
            yield StopPoint.PASS

    def timed_steps(self, pace: Pace) -> Generator[StopPoint]:
        """Runs `steps` and measures the longest operator."""
        steps = self.steps(pace)
        while True:
            begun_s = time.perf_counter()
            boundary = next(steps, None)
            self.longest_operator_s = max(self.longest_operator_s, time.perf_counter() - begun_s)
            if boundary is None:
                return
            yield boundary


def blocking(
    engine: Engine, *, tokens: int, chunk_tokens: int, granularity: str, budget_s: float, seed: int
) -> Blocking:
    """Preempts a prefill of `tokens` at random moments for about `budget_s` seconds, and at least
    `LEAST_SIGNALS` times.

    The preempting task waits for the device alone. The next signal comes after a random time of up
    to two granules. Signals while nothing runs, after the long prompt, don't count.
    """
    long = LongPrefill(engine, tokens, chunk_tokens)
    found: list[float] = []
    free_s: list[float] = []
    pool = ExecutionPool(engine.device, most_held=4, blocked=found.append)
    pool.set_granularity(StopPoint.of(granularity))
    rng = random.Random(f"{seed}/{granularity}/{chunk_tokens}")
    try:
        begun_s = time.perf_counter()
        long.bare()  # warm, and the duration of a granule
        alone_s = time.perf_counter() - begun_s
        granules = _granules(engine, granularity, ceil_div(tokens, chunk_tokens))
        until_s = time.perf_counter() + budget_s
        number = 0

        def goes_on() -> bool:
            return time.perf_counter() < until_s or len(found) < LEAST_SIGNALS

        while goes_on():
            ended = _submit(
                pool, f"long {number}", long.timed_steps(pace := Pace(chunk_tokens)), pace
            )
            while not ended.done() and goes_on():
                time.sleep(rng.uniform(0.0, 2.0) * alone_s / granules)
                number += 1
                pool.order([f"short {number}"])
                begun_s = time.perf_counter()
                _submit(pool, f"short {number}", _device_is_free(engine)).result(_WAIT_S)
                free_s.append(time.perf_counter() - begun_s)
    finally:
        pool.close()
        long.free()
    ms = 1e3 * np.array(found or [0.0])
    return Blocking(
        granularity=granularity,
        chunk_tokens=min(chunk_tokens, tokens),
        signals=len(found),
        mean_ms=float(ms.mean()),
        median_ms=float(np.median(ms)),
        p99_ms=float(np.percentile(ms, 99)),
        longest_ms=float(ms.max()),
        longest_operator_ms=1e3 * long.longest_operator_s,
        free_p99_ms=1e3 * float(np.percentile(free_s, 99)),
        deciles_ms=tuple(float(one) for one in np.percentile(ms, range(0, 101, 10))),
    )


def checks(engine: Engine, *, tokens: int, rounds: int) -> Checks:
    """Prefills `tokens` bare and through the pool, in turns that swap the order.

    Both run on a thread of their own: memory costs a thread more than the process's first thread.
    """
    long = LongPrefill(engine, tokens, tokens)
    pool = ExecutionPool(engine.device, most_held=1)
    pool.set_granularity(StopPoint.OPERATOR)
    seconds: dict[str, list[tuple[float, float]]] = {"bare": [], "pool": []}  # wall, CPU

    def through_pool() -> None:
        _submit(pool, "long", long.steps(pace := Pace(tokens)), pace).result(_WAIT_S)
        settled_s(engine.device)

    thread = ThreadPoolExecutor(1)

    def on_a_thread() -> None:
        thread.submit(long.bare).result(_WAIT_S)

    ways = [("bare", on_a_thread), ("pool", through_pool)]
    try:
        for number in range(rounds + 1):
            for name, way in ways if number % 2 else ways[::-1]:
                begun_s, cpu_s = time.perf_counter(), time.process_time()
                way()
                seconds[name].append((time.perf_counter() - begun_s, time.process_time() - cpu_s))
    finally:
        thread.shutdown()
        pool.close()
        long.free()
    bare, pooled = seconds["bare"][1:], seconds["pool"][1:]  # the first round warms up

    def cost(kind: int) -> float:
        return statistics.median(p[kind] / b[kind] for p, b in zip(pooled, bare, strict=True)) - 1

    return Checks(
        tokens=tokens,
        rounds=rounds,
        bare_s=statistics.median(wall_s for wall_s, _ in bare),
        pool_s=statistics.median(wall_s for wall_s, _ in pooled),
        cost=cost(0),
        cpu_cost=cost(1),
    )


def _granules(engine: Engine, granularity: str, passes: int) -> int:
    """Returns the granules of a whole prefill. For operators, layers: a signal hits any operator of
    one.
    """
    return passes if granularity == "chunk" else passes * engine.layout.num_layers


class _Chunk(ChunkTask):
    """A `ChunkTask` of given steps; `done` is set at its end, with its error."""

    def __init__(self, name: str, steps: Generator[StopPoint]) -> None:
        super().__init__(name, steps)
        self.done: Future[None] = Future()

    def ended(self, error: Exception | None) -> None:
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def _submit(
    pool: ExecutionPool, name: str, steps: Generator[StopPoint], pace: Pace | None = None
) -> Future[None]:
    """Returns a future that is done at the task's end, with the task's error."""
    task = _Chunk(name, steps)
    task.pace = pace or task.pace
    pool.submit(task)
    return task.done


def _device_is_free(engine: Engine) -> Generator[StopPoint]:
    settled_s(engine.device)
    yield from ()
