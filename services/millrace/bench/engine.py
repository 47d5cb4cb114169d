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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from millrace.core.errors import MillraceError
from millrace.core.kv_layout import KvLayout
from millrace.engine.kv_pool import KvPool
from millrace.engine.loader import load_model
from millrace.engine.model_runner import ModelRunner, PrefillTask
from millrace_kernels import describe_backends

PAGE_TOKENS = 16
MODEL = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
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


class Engine(Protocol):
    """What is timed, for one engine with its weights loaded."""

    def prefill(self, prompt: Tensor) -> Tensor:
        """prompt: int64 [n]; returns logits [vocab] of its last position."""

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        """Give `batch` sequences a random context and return their step.

        A step takes token ids int64 [batch] and returns those chosen next.
        """


class MillraceEngine:
    """The model runner over a paged pool big enough for the largest case."""

    def __init__(self, folder: Path, dtype: str, pool_tokens: int) -> None:
        model = load_model(folder, device="cpu", dtype=dtype)
        config = model.config
        layout = KvLayout(
            model_hash=model.hash,
            dtype=dtype,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            page_tokens=PAGE_TOKENS,
            head_start=0,
            head_count=config.num_kv_heads,
            num_pages=-(-pool_tokens // PAGE_TOKENS),
        )
        self._pool = KvPool(layout)
        self._pool.storage.normal_()
        self._runner = ModelRunner(model, self._pool)

    def prefill(self, prompt: Tensor) -> Tensor:
        pages = self._pool.allocate(-(-len(prompt) // PAGE_TOKENS))
        task = PrefillTask(token_ids=prompt, history_tokens=0, pages=pages)
        for _ in self._runner.prefill(task):
            pass
        self._pool.free(pages)
        assert task.logits is not None  # the task asked for them
        return task.logits

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        pages_each = self._pool.num_pages // batch
        table = torch.arange(batch * pages_each, dtype=torch.int32).view(batch, pages_each)
        positions = torch.full((batch,), context_tokens)

        def step(token_ids: Tensor) -> Tensor:
            kv_lens = (positions + 1).to(torch.int32)
            logits = self._runner.decode(token_ids, positions, table, kv_lens)
            positions.add_(1)
            return logits.argmax(-1)

        return step


class TransformersEngine:
    """`LlamaForCausalLM` with sdpa attention and its KV cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        import transformers

        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._new_cache = transformers.DynamicCache

    def prefill(self, prompt: Tensor) -> Tensor:
        out = self._model(input_ids=prompt[None], use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1]
        return logits

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        config = self._model.config
        cache = self._new_cache(config=config)
        shape = (batch, config.num_key_value_heads, context_tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape).to(self._model.dtype)
            cache.update(keys, values, layer)

        def step(token_ids: Tensor) -> Tensor:
            out = self._model(input_ids=token_ids[:, None], past_key_values=cache, use_cache=True)
            chosen: Tensor = out.logits[:, -1].argmax(-1)
            return chosen

        return step


def make_model(folder: Path) -> int:
    """Write the random model to `folder` as transformers saves it; return its parameter count."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**MODEL))
    model.save_pretrained(folder)
    return int(model.num_parameters())


def time_case(case: Case, engine: Engine, steps: int) -> float:
    """Tokens/s of one repetition, caches made and one step run before the clock starts."""
    if case.phase == "prefill":
        prompt = torch.randint(int(MODEL["vocab_size"]), (case.tokens,))
        started = time.perf_counter()
        engine.prefill(prompt)
        return case.tokens / (time.perf_counter() - started)
    step = engine.start_decode(case.batch, case.tokens)
    token_ids = step(torch.zeros(case.batch, dtype=torch.int64))
    started = time.perf_counter()
    for _ in range(steps):
        token_ids = step(token_ids)
    return case.batch * steps / (time.perf_counter() - started)


def check_agreement(ours: Engine, other: Engine, dtype: str) -> float:
    """The largest difference of the two engines' logits; MillraceError when it is too large."""
    prompt = torch.randint(int(MODEL["vocab_size"]), (300,))
    difference = float((ours.prefill(prompt) - other.prefill(prompt).float()).abs().max())
    if not difference <= _LOGIT_TOLERANCE[dtype]:
        raise MillraceError(
            f"the engines' {dtype} logits differ by {difference:g}: they don't run the same model"
        )
    return difference


def run(
    *,
    dtypes: Sequence[str] = ("float32", "bfloat16"),
    prefill_tokens: Sequence[int] = (512, 2048, 8192),
    batches: Sequence[int] = (1, 8),
    contexts: Sequence[int] = (512, 2048),
    steps: int = 24,
    repeats: int = 3,
    threads: int | None = None,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measure every case and return the report as one JSON-ready document.

    on_progress(done, total, what) is called before each repetition. Raises MillraceError when the
    engines' logits disagree.
    """
    threads_before = torch.get_num_threads()
    torch.set_num_threads(threads or threads_before)
    lengths = [*prefill_tokens, *(b * (c + steps + 2) for b in batches for c in contexts), 300]
    cases = [
        *(
            Case(phase="prefill", dtype=d, batch=1, tokens=n)
            for d in dtypes
            for n in prefill_tokens
        ),
        *(
            Case(phase="decode", dtype=d, batch=b, tokens=c)
            for d in dtypes
            for b in batches
            for c in contexts
        ),
    ]
    results: list[Result] = []
    differences: dict[str, float] = {}
    try:
        with tempfile.TemporaryDirectory() as name, torch.inference_mode():
            parameters = make_model(Path(name))
            for dtype in dtypes:
                ours = MillraceEngine(Path(name), dtype, max(lengths) + PAGE_TOKENS * max(batches))
                other = TransformersEngine(Path(name), dtype)
                differences[dtype] = check_agreement(ours, other, dtype)
                for case in (case for case in cases if case.dtype == dtype):
                    done = len(results) * repeats
                    turn = _reporting(done, len(cases) * repeats, case, repeats, on_progress)
                    results.append(_compare(case, ours, other, steps, turn))
        used_threads = torch.get_num_threads()
    finally:
        torch.set_num_threads(threads_before)
    return {
        "benchmark": "engine",
        "against": "transformers",
        "machine": _machine(used_threads),
        "model": {**MODEL, "parameters": parameters},
        "steps": steps,
        "repeats": repeats,
        "largest_logit_difference": differences,
        "results": [asdict(result) for result in results],
    }


def _reporting(
    done: int, total: int, case: Case, repeats: int, on_progress: Callable[[int, int, str], None]
) -> Iterator[None]:
    for repeat in range(repeats):
        on_progress(done + repeat, total, f"{case.phase} {case.dtype} {case.batch}x{case.tokens}")
        yield


def _compare(case: Case, ours: Engine, other: Engine, steps: int, turns: Iterator[None]) -> Result:
    time_case(case, ours, 1)  # first touch of memory and of the thread pools
    time_case(case, other, 1)
    rates: tuple[list[float], list[float]] = ([], [])
    for _ in turns:
        rates[0].append(time_case(case, ours, steps))
        rates[1].append(time_case(case, other, steps))
    medians = [statistics.median(side) for side in rates]
    return Result(
        case=case,
        millrace_tokens_per_s=medians[0],
        other_tokens_per_s=medians[1],
        ratio=medians[0] / medians[1],
    )


def _machine(threads: int) -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "threads": threads,
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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("loading")
        report = run(
            dtypes=chosen,
            prefill_tokens=_numbers(prefill),
            batches=_numbers(batches),
            contexts=_numbers(contexts),
            steps=steps,
            repeats=repeats,
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
