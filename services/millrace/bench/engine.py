"""`millrace bench engine`: tokens/s of the engine on the CPU, beside transformers in the same run.

Both run one random-weight Llama of about 100 million parameters with the same weights and the same
number of threads. Repetitions of the two take turns, so that other load on the machine hits both
alike, and the medians are compared. Before anything is timed, their logits must agree.

Prefill is one prompt in one chunk, to the logits of its last position. Decode is a batch that
stands at one context length: model step and greedy choice, without sampling, scheduler or
detokeniser. transformers runs its forward pass with a DynamicCache, which is what `generate` does
less its own bookkeeping.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from millrace.bench.timed_engines import (
    MODEL,
    PAGE_TOKENS,
    Engine,
    MillraceEngine,
    TransformersEngine,
    make_model,
)
from millrace.core.errors import MillraceError
from millrace_kernels import describe_backends

_AGREEMENT_TOKENS = 300
_LOGIT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}
"""Largest difference of two logits (themselves about 0.5 wide), by dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the comparison. `tokens`: of the prompt, or of context in each sequence."""

    phase: Literal["prefill", "decode"]
    dtype: str
    batch: int
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Median tokens/s of both sides; `ratio` above 1 means Millrace is the faster."""

    case: Case
    millrace_tokens_per_s: float
    other_tokens_per_s: float
    ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What to measure: every prefill length, and every decode batch at every context length."""

    dtypes: Sequence[str] = ("float32", "bfloat16")
    prefill_tokens: Sequence[int] = (512, 2048, 8192)
    batches: Sequence[int] = (1, 8)
    contexts: Sequence[int] = (512, 2048)
    steps: int = 24
    repeats: int = 3
    model: Mapping[str, int] = field(default_factory=lambda: MODEL)

    def cases(self, dtype: str) -> list[Case]:
        """The lines of one dtype, in the order they run."""
        prefill = [
            Case(phase="prefill", dtype=dtype, batch=1, tokens=tokens)
            for tokens in self.prefill_tokens
        ]
        return prefill + [
            Case(phase="decode", dtype=dtype, batch=batch, tokens=tokens)
            for batch in self.batches
            for tokens in self.contexts
        ]

    @property
    def pool_tokens(self) -> int:
        """KV that the largest case needs, each sequence in pages of its own."""
        decode = max(self.contexts) + self.steps + 1 + PAGE_TOKENS
        return max(_AGREEMENT_TOKENS, *self.prefill_tokens, max(self.batches) * decode)

    def prompt(self, tokens: int) -> Tensor:
        """Random token ids, int64 [tokens]."""
        return torch.randint(self.model["vocab_size"], (tokens,))


def tokens_per_s(case: Case, engine: Engine, settings: Settings) -> float:
    """One repetition. Caches are made, and one decode step run, before the clock starts."""
    if case.phase == "prefill":
        prompt = settings.prompt(case.tokens)
        started = time.perf_counter()
        engine.prefill(prompt)
        return case.tokens / (time.perf_counter() - started)
    step = engine.start_decode(case.batch, case.tokens)
    token_ids = step(torch.zeros(case.batch, dtype=torch.int64))
    started = time.perf_counter()
    for _ in range(settings.steps):
        token_ids = step(token_ids)
    return case.batch * settings.steps / (time.perf_counter() - started)


def check_agreement(ours: Engine, other: Engine, dtype: str, prompt: Tensor) -> float:
    """The largest difference of the two engines' logits; MillraceError when it is too large."""
    difference = float((ours.prefill(prompt) - other.prefill(prompt).float()).abs().max())
    if not difference <= _LOGIT_TOLERANCE[dtype]:
        raise MillraceError(
            f"the engines' {dtype} logits differ by {difference:g}: they don't run the same model"
        )
    return difference


def run(
    settings: Settings,
    *,
    threads: int | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measure every case and return the report as one JSON-ready document.

    threads: torch's own choice when None. on_progress(repetitions done, in total, what runs now)
    is called before each repetition. Raises MillraceError when the engines' logits disagree.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    total = sum(len(settings.cases(dtype)) for dtype in settings.dtypes) * settings.repeats
    results: list[Result] = []
    differences: dict[str, float] = {}

    def announce(case: Case, repeat: int) -> None:
        what = f"{case.phase} {case.dtype} {case.batch} x {case.tokens}"
        on_progress(len(results) * settings.repeats + repeat, total, what)

    try:
        with tempfile.TemporaryDirectory() as name, torch.inference_mode():
            folder = Path(name)
            parameters = make_model(folder, settings.model)
            for dtype in settings.dtypes:
                ours = MillraceEngine(folder, dtype, settings.pool_tokens)
                other = TransformersEngine(folder, dtype)
                prompt = settings.prompt(_AGREEMENT_TOKENS)
                differences[dtype] = check_agreement(ours, other, dtype, prompt)
                for case in settings.cases(dtype):
                    results.append(_compare(case, ours, other, settings, announce))
        machine = _machine()
    finally:
        torch.set_num_threads(threads_before)
    return {
        "benchmark": "engine",
        "against": "transformers",
        "machine": machine,
        "model": {**settings.model, "parameters": parameters},
        "steps": settings.steps,
        "repeats": settings.repeats,
        "largest_logit_difference": differences,
        "results": [asdict(result) for result in results],
    }


def _compare(
    case: Case,
    ours: Engine,
    other: Engine,
    settings: Settings,
    announce: Callable[[Case, int], None],
) -> Result:
    rates: tuple[list[float], list[float]] = ([], [])
    for repeat in range(settings.repeats):
        announce(case, repeat)
        for engine, measured in zip((ours, other), rates, strict=True):
            if repeat == 0:  # first touch of memory and of the thread pools
                tokens_per_s(case, engine, settings)
            measured.append(tokens_per_s(case, engine, settings))
    ours_median, other_median = (statistics.median(measured) for measured in rates)
    return Result(
        case=case,
        millrace_tokens_per_s=ours_median,
        other_tokens_per_s=other_median,
        ratio=ours_median / other_median,
    )


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "architecture": platform.machine(),
        "torch": torch.__version__,
        "kernels": describe_backends(),
    }


def as_table(report: dict[str, Any]) -> Table:
    """The report's results, a row a case; ratios below 1 in red."""
    table = Table(title=f"tokens/s, medians; {report['machine']['threads']} threads")
    for heading in ("phase", "dtype"):
        table.add_column(heading)
    for heading in ("batch", "tokens", "millrace", report["against"], "ratio"):
        table.add_column(heading, justify="right")
    for result in report["results"]:
        case, ratio = result["case"], result["ratio"]
        table.add_row(
            case["phase"],
            case["dtype"],
            str(case["batch"]),
            str(case["tokens"]),
            f"{result['millrace_tokens_per_s']:.1f}",
            f"{result['other_tokens_per_s']:.1f}",
            f"[{'green' if ratio >= 1 else 'red'}]{ratio:.2f}",
        )
    return table


def draw(report: dict[str, Any], path: Path) -> None:
    """Bars of the ratios, one a case, as a PNG at `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    results = report["results"]
    labels = ["{phase} {dtype}\n{batch} x {tokens}".format(**result["case"]) for result in results]
    figure, axes = pyplot.subplots(figsize=(max(6, len(results)), 4.5), layout="constrained")
    bars = axes.bar(labels, [result["ratio"] for result in results])
    axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1, color="black", linewidth=1)
    axes.set_ylabel(f"tokens/s, Millrace / {report['against']}")
    axes.tick_params(axis="x", labelsize=7)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers like 512,2048") from error
    if min(numbers) < 1:
        raise typer.BadParameter(f"{text!r}: every number must be at least 1")
    return numbers


def command(  # noqa: PLR0913 - every option of the command line is a parameter
    against: Annotated[
        str, typer.Option("--against", metavar="ENGINE", help="What to compare with: transformers.")
    ] = "transformers",
    dtypes: Annotated[
        str, typer.Option("--dtypes", help="Comma-separated: float32, bfloat16.")
    ] = "float32,bfloat16",
    prefill: Annotated[
        str, typer.Option("--prefill", metavar="TOKENS", help="Prompt lengths, comma-separated.")
    ] = "512,2048,8192",
    batches: Annotated[
        str, typer.Option("--batches", metavar="SIZES", help="Decode batches, comma-separated.")
    ] = "1,8",
    contexts: Annotated[
        str, typer.Option("--contexts", metavar="TOKENS", help="Decode contexts, comma-separated.")
    ] = "512,2048",
    steps: Annotated[int, typer.Option("--steps", min=1, help="Decode steps a repetition.")] = 24,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Repetitions; medians are reported.")
    ] = 3,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Default: as many as torch takes.")
    ] = None,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PATH", help="Write the ratios as a PNG.")
    ] = None,
) -> None:
    """Engine speed on the CPU: prefill and decode tokens/s beside transformers, in one run."""
    chosen = [part.strip() for part in dtypes.split(",")]
    if unknown := sorted(set(chosen) - set(_LOGIT_TOLERANCE)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(_LOGIT_TOLERANCE)}")
    if against != "transformers":
        raise typer.BadParameter(f"{against!r}: only transformers can be compared with")
    settings = Settings(
        dtypes=chosen,
        prefill_tokens=_numbers(prefill),
        batches=_numbers(batches),
        contexts=_numbers(contexts),
        steps=steps,
        repeats=repeats,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("loading")
        report = run(
            settings,
            threads=threads,
            on_progress=lambda done, total, what: progress.update(
                bar, completed=done, total=total, description=what
            ),
        )
        progress.update(bar, completed=len(report["results"]) * repeats, description="done")
    Console().print(as_table(report))
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    if plot is not None:
        draw(report, plot)
