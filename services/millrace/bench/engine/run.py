"""`millrace bench engine`: compares tokens/s of CPU engines in one run.

All engines run one random-weight Llama of about 100 million parameters with the same weights and
the same number of threads. Before the timing, their logits must agree.

Prefill is one prompt to the logits of its last position. Decode is a batch at one context length:
model step and greedy choice, without sampling, scheduler or detokeniser. transformers runs its
forward pass with a DynamicCache, as `generate` does, without its bookkeeping; llama.cpp runs
`llama_decode`, each sequence with K/V of its own.

The engines take turns, so that other load on the machine affects all equally, and medians are
compared. Each has `budget_s` seconds in a case and repeats it up to `repeats` times, at least once.
Its first repetition warms up and does not count if others follow.

Tokens/s come with Millrace's share of the machine's limit: for prefill, the FLOPs of
`model_costs.prefill_flops` against the best product of large matrices; for decode, the bytes of
`model_costs.decode_step_bytes` against the best streaming reader, both measured in the same run.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from millrace.bench.common.machine_limits import (
    describe_machine,
    gemm_flops_per_s,
    read_bytes_per_s,
    torch_threads,
)
from millrace.bench.common.options import Announce
from millrace.bench.common.random_model import write_random_llama
from millrace.bench.engine.command import DETERMINISM, Settings
from millrace.bench.engine.llama_cpp import LlamaCppEngine, check_packages, write_gguf
from millrace.bench.engine.model_costs import decode_step_bytes, prefill_flops
from millrace.bench.engine.timed_engines import (
    PAGE_TOKENS,
    Engine,
    MillraceEngine,
    TransformersEngine,
)
from millrace.core.errors import MillraceError

OURS = "millrace"

_AGREEMENT_TOKENS = 300
_LOGIT_TOLERANCE = {"float32": 5e-3, "bfloat16": 0.2}
"""Largest difference of two logits (about 0.5 wide), by dtype; llama.cpp's K/V is F16 always."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the comparison. `tokens`: of the prompt, or of context in each sequence."""

    phase: Literal["prefill", "decode"]
    dtype: str
    batch: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.phase} {self.dtype} {self.batch} x {self.tokens}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Median tokens/s by engine, the repetitions behind each median, and their meaning: `ratios`
    above 1 say that Millrace is faster, `machine_share` is Millrace's.
    """

    case: Case
    tokens_per_s: dict[str, float]
    repetitions: dict[str, int]
    ratios: dict[str, float]
    machine_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The machine's limits, in one dtype."""

    gemm_flops_per_s: float
    read_bytes_per_s: float


def cases(settings: Settings, dtype: str) -> list[Case]:
    """Returns the cases of one dtype, in the order they run."""
    prefill = [
        Case(phase="prefill", dtype=dtype, batch=1, tokens=tokens)
        for tokens in settings.prefill_tokens
    ]
    return prefill + [
        Case(phase="decode", dtype=dtype, batch=batch, tokens=tokens)
        for batch in settings.batches
        for tokens in settings.contexts
    ]


def pool_tokens(settings: Settings) -> int:
    """Returns the KV tokens that the largest case needs, each sequence in pages of its own."""
    decode = max(settings.contexts) + settings.steps + 1 + PAGE_TOKENS
    return max(_AGREEMENT_TOKENS, *settings.prefill_tokens, max(settings.batches) * decode)


def prompt_of(settings: Settings, tokens: int) -> Tensor:
    """Returns random token ids, int64 [tokens]."""
    return torch.randint(settings.model["vocab_size"], (tokens,))


def machine_share(settings: Settings, case: Case, tokens_per_s: float, limits: Limits) -> float:
    """Returns a rate's share of the machine's limit."""
    if case.phase == "prefill":
        flops = prefill_flops(settings.model, case.tokens) / case.tokens
        return flops * tokens_per_s / limits.gemm_flops_per_s
    element_bytes = getattr(torch, case.dtype).itemsize
    context = case.tokens + settings.steps // 2
    read = decode_step_bytes(settings.model, case.batch, context, element_bytes)
    return read * (tokens_per_s / case.batch) / limits.read_bytes_per_s


def tokens_per_s(case: Case, engine: Engine, settings: Settings) -> float:
    """Runs one repetition. The clock starts after caches are made and one decode step has run.

    Decode ends early, between two steps, when the budget is spent.
    """
    if case.phase == "prefill":
        prompt = prompt_of(settings, case.tokens)
        started = time.perf_counter()
        engine.prefill(prompt)
        return case.tokens / (time.perf_counter() - started)
    step = engine.start_decode(case.batch, case.tokens)
    token_ids = step(torch.zeros(case.batch, dtype=torch.int64))
    started = time.perf_counter()
    spent_s, steps = 0.0, 0
    while steps < settings.steps and spent_s <= settings.budget_s:
        token_ids = step(token_ids)
        steps += 1
        spent_s = time.perf_counter() - started
    return case.batch * steps / spent_s


def check_agreement(ours: Engine, other: Engine, dtype: str, prompt: Tensor) -> float:
    """Returns the largest difference of two engines' logits; raises MillraceError when it is too
    large.
    """
    difference = float((ours.prefill(prompt) - other.prefill(prompt).float()).abs().max())
    if not difference <= _LOGIT_TOLERANCE[dtype]:
        raise MillraceError(
            f"the engines' {dtype} logits differ by {difference:g}: they don't run the same model"
        )
    return difference


class _Turns:
    """One engine's repetitions of one case, and whether another fits its budget."""

    def __init__(self, case: Case, engine: Engine, settings: Settings) -> None:
        self._case, self._engine, self._settings = case, engine, settings
        self._rates: list[float] = []
        self._spent_s = 0.0

    @property
    def done(self) -> bool:
        taken = len(self._rates)
        if taken == 0:
            return False
        next_s = self._spent_s / taken
        return taken > self._settings.repeats or self._spent_s + next_s > self._settings.budget_s

    @property
    def counted(self) -> list[float]:
        """Returns all repetitions but the first, which warmed up, unless it is the only one."""
        return self._rates[1:] or self._rates

    def take(self) -> None:
        begun = time.perf_counter()
        self._rates.append(tokens_per_s(self._case, self._engine, self._settings))
        self._spent_s += time.perf_counter() - begun


def run(
    settings: Settings,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures every case and returns the report as one JSON-ready document.

    on_progress(cases done, in total, the running step) is
    called before each repetition. Raises MillraceError when the engines' logits disagree or one of
    the others is not installed.
    """
    if "llama.cpp" in settings.against:
        check_packages()  # before a minute of other work
    cases_of = {dtype: cases(settings, dtype) for dtype in settings.dtypes}
    total = sum(map(len, cases_of.values()))
    results: list[Result] = []
    limits: dict[str, Limits] = {}
    differences: dict[str, dict[str, float]] = {}
    with torch_threads(settings.threads):
        with tempfile.TemporaryDirectory() as name, torch.inference_mode():
            parameters = write_random_llama(Path(name), settings.model)
            read = read_bytes_per_s()
            for dtype in settings.dtypes:
                on_progress(len(results), total, f"loading {dtype}")
                gemm = gemm_flops_per_s(dtype)
                limits[dtype] = Limits(gemm_flops_per_s=gemm, read_bytes_per_s=read)
                with ExitStack() as stack:
                    engines = _open_engines(Path(name), dtype, settings, stack)
                    prompt = prompt_of(settings, _AGREEMENT_TOKENS)
                    differences[dtype] = {
                        other: check_agreement(engines[OURS], engines[other], dtype, prompt)
                        for other in settings.against
                    }
                    for case in cases_of[dtype]:
                        found = _compare(
                            case,
                            engines,
                            settings,
                            lambda what: on_progress(len(results), total, what),
                        )
                        results.append(_result(case, found, settings, limits[dtype]))
        machine = describe_machine()
    return {
        "benchmark": "engine",
        "against": list(settings.against),
        "machine": machine,
        "limits": {dtype: asdict(found) for dtype, found in limits.items()},
        "model": {**settings.model, "parameters": parameters},
        "steps": settings.steps,
        "repeats": settings.repeats,
        "budget_s": settings.budget_s,
        "largest_logit_difference": differences,
        "results": [asdict(result) for result in results],
    }


def _open_engines(
    folder: Path, dtype: str, settings: Settings, stack: ExitStack
) -> dict[str, Engine]:
    engines: dict[str, Engine] = {OURS: MillraceEngine(folder, dtype, pool_tokens(settings))}
    for name in settings.against:
        if name == "transformers":
            engines[name] = TransformersEngine(folder, dtype)
        elif name in DETERMINISM:
            engines[name] = MillraceEngine(folder, dtype, pool_tokens(settings), DETERMINISM[name])
        else:
            path = folder / f"{dtype}.gguf"
            write_gguf(folder, path, dtype)
            llama_cpp = LlamaCppEngine(path, torch.get_num_threads())
            stack.callback(llama_cpp.close)
            engines[name] = llama_cpp
    return engines


def _compare(
    case: Case,
    engines: Mapping[str, Engine],
    settings: Settings,
    announce: Announce,
) -> dict[str, list[float]]:
    """Returns tokens/s of each engine's repetitions of a case; the engines take turns."""
    turns = {name: _Turns(case, engine, settings) for name, engine in engines.items()}
    while waiting := [name for name in turns if not turns[name].done]:
        for name in waiting:
            announce(f"{case}, {name}")
            turns[name].take()
    return {name: own.counted for name, own in turns.items()}


def _result(
    case: Case, found: Mapping[str, Sequence[float]], settings: Settings, limits: Limits
) -> Result:
    medians = {name: statistics.median(rates) for name, rates in found.items()}
    return Result(
        case=case,
        tokens_per_s=medians,
        repetitions={name: len(rates) for name, rates in found.items()},
        ratios={name: medians[OURS] / rate for name, rate in medians.items() if name != OURS},
        machine_share=machine_share(settings, case, medians[OURS], limits),
    )
