"""Part *speed*: a dense model of the size of Llama-3-8B beside the device's measured peaks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.roofline import (
    Peaks,
    decode_bytes,
    expected_decode,
    expected_prefill,
    prefill_flops,
)
from millrace.bench.gpu.shapes import FAMILIES, LLAMA_3_8B, write_config
from millrace.bench.gpu.steps import decoding, prefill_s, seconds_per_step, times_s
from millrace.bench.hol.pool import blocking
from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.attention_cost import settled_s
from millrace.engine.model.config import ModelConfig, parse_config
from millrace_kernels import flashinfer_backend
from millrace_kernels.api import plan_attention, run_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. `chunk_tokens`: the most of one pass; `blocking_chunks`: of preempted ones.
    Over `long_context` K/V, `short_rows` are compared with `long_rows`, row by row.
    """

    prompts: Sequence[int]
    short_prompts: Sequence[int]
    chunk_tokens: int
    blocking_chunks: Sequence[int]
    batches: Sequence[int]
    context: int
    attention: Sequence[tuple[int, int]]  # rows of a chunk, and the K/V they see
    long_context: int
    short_rows: int
    long_rows: int
    gemm_side: int
    copy_bytes: int
    repeats: int
    blocking_s: float


_PAGE_TOKENS: Final = EngineConfig().page_tokens_on("cuda")
"""Tokens of a page in the measured attention: a GPU's default."""

ON_CUDA = Sizes(
    prompts=(8192, 32_768),
    short_prompts=(16, 128, 512),
    chunk_tokens=8192,
    blocking_chunks=(2048, 8192),
    batches=(1, 32, 128),
    context=2048,
    attention=(
        *((512, 8192), (512, 262_144), (2048, 32_768), (8192, 8192), (8192, 32_768)),
        *((32, 131_072), (1, 32_768)),
    ),
    long_context=1 << 20,
    short_rows=32,
    long_rows=2048,
    gemm_side=8192,
    copy_bytes=2 << 30,
    repeats=3,
    blocking_s=6.0,
)
ON_CPU = Sizes(
    prompts=(64,),
    short_prompts=(16,),
    chunk_tokens=64,
    blocking_chunks=(64,),
    batches=(1, 3),
    context=32,
    attention=((8, 40), (1, 40)),
    long_context=512,
    short_rows=4,
    long_rows=64,
    gemm_side=128,
    copy_bytes=1 << 20,
    repeats=2,
    blocking_s=0.2,
)


def check(context: Context) -> None:
    """Measures the peaks first, then the model beside them."""
    measure(context, LLAMA_3_8B if context.is_cuda else FAMILIES["llama"], is_whole=True)


@torch.inference_mode()
def measure(context: Context, shape: Mapping[str, Any], *, is_whole: bool) -> None:
    """Measures one model; with `is_whole` attention and preemption too."""
    sizes = ON_CUDA if context.is_cuda else ON_CPU
    peaks = measure_peaks(context, sizes)
    if is_whole:
        measure_attention(context, sizes, parse_config(shape, {}, where="shape"))
    with TemporaryDirectory() as name:
        engine = open_engine(
            write_config(Path(name) / "model", shape),
            EngineConfig(
                device=str(context.device),
                dtype="bfloat16",
                load_format="dummy",
                kv_bytes=0 if context.is_cuda else 64 << 20,
                max_batch=max(sizes.batches),
                cuda_graph_batches=",".join(map(str, sizes.batches)),
            ),
        )
    for tokens in sizes.prompts:
        measure_prefill(context, engine, sizes, peaks, tokens)
    measure_short_prefills(context, engine, sizes)
    for batch in sizes.batches:
        measure_decode(context, engine, sizes, peaks, batch)
    if is_whole:
        for chunk_tokens in sizes.blocking_chunks:
            measure_blocking(context, engine, sizes, chunk_tokens)
    engine.close()


def measure_peaks(context: Context, sizes: Sizes) -> Peaks:
    """Measures the rate of a square bfloat16 product, and of a copy, read and written bytes."""
    side = sizes.gemm_side
    left = torch.randn(side, side, device=context.device, dtype=torch.bfloat16)
    seconds = best_s(context, sizes.repeats + 2, lambda: torch.mm(left, left))
    flops_per_s = 2.0 * side**3 / seconds
    source = torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    seconds = best_s(context, sizes.repeats + 2, lambda: target.copy_(source))
    bytes_per_s = 2.0 * sizes.copy_bytes / seconds
    context.figure("bfloat16 GEMM", flops_per_s / 1e12, "TFLOP/s")
    context.figure("copy, read and written", bytes_per_s / 1e9, "GB/s")
    return Peaks(flops_per_s, bytes_per_s)


def best_s(context: Context, repeats: int, work: Callable[[], object]) -> float:
    """Returns seconds of the fastest call, after one that is not timed."""
    return min(times_s(context.device, repeats, work))


def measure_prefill(
    context: Context, engine: Engine, sizes: Sizes, peaks: Peaks, tokens: int
) -> None:
    """Measures a whole prompt in passes of at most `chunk_tokens`."""
    seconds = prefill_s(engine, tokens, sizes.chunk_tokens, sizes.repeats)
    context.figure(
        f"prefill of {tokens} tokens",
        tokens / seconds,
        "tokens/s",
        expected=expected_prefill(engine.shape, tokens, peaks),
        share=prefill_flops(engine.shape, tokens) / seconds / peaks.flops_per_s,
    )


def measure_short_prefills(context: Context, engine: Engine, sizes: Sizes) -> None:
    """Measures short prompts operator by operator and, on a GPU, by graphs."""
    alone_s = {}
    for tokens in sizes.short_prompts:
        alone_s[tokens] = prefill_s(engine, tokens, sizes.chunk_tokens, sizes.repeats)
        name = f"short prefill of {tokens} tokens, operator by operator"
        context.figure(name, 1e3 * alone_s[tokens], "ms")
    if not context.is_cuda:
        return
    torch.cuda.empty_cache()  # as the capture does: its memory is what is taken from now on
    begun_s, before = settled_s(context.device), torch.cuda.memory_reserved(context.device)
    engine.runner.capture_prefills()
    context.figure("capture of short prefills' graphs", settled_s(context.device) - begun_s, "s")
    taken = torch.cuda.memory_reserved(context.device) - before
    context.figure("memory of short prefills' graphs", taken / (1 << 20), "MiB")
    for tokens in sizes.short_prompts:
        seconds = prefill_s(engine, tokens, sizes.chunk_tokens, sizes.repeats)
        context.figure(f"short prefill of {tokens} tokens, by graphs", 1e3 * seconds, "ms")
        context.figure("the same, faster than without by", alone_s[tokens] / seconds, "times")
    counts = engine.runner.states.prefills
    context.claim("short prefills ran by graphs", counts.graph > 0, f"{counts}")


def measure_decode(
    context: Context, engine: Engine, sizes: Sizes, peaks: Peaks, batch: int
) -> None:
    """Measures greedy steps of `batch` sequences over the pool's present content, as an instance
    makes them."""
    steps = 8 * sizes.repeats
    if batch * engine.layout.pages_for(sizes.context + steps + 4) > engine.pool.free_pages:
        context.claim(f"decode of {batch} sequences", False, "the KV pool is too small")
        return
    with decoding(engine, (sizes.context,) * batch, steps + 4, fast=True) as running:
        seconds = seconds_per_step(engine, running, steps)
    read = decode_bytes(engine.shape, batch, sizes.context)
    context.figure(
        f"decode of {batch} sequences of {sizes.context} tokens",
        batch / seconds,
        "tokens/s",
        expected=expected_decode(engine.shape, batch, sizes.context, peaks),
        share=read / seconds / peaks.bytes_per_s,
    )


def measure_attention(context: Context, sizes: Sizes, shape: ModelConfig) -> None:
    """Measures one layer's attention, of a chunk at the end of its K/V, by each backend."""
    backends = ["triton"] if context.is_cuda else ["auto"]
    if not flashinfer_backend.unavailable(context.device):
        backends.append("flashinfer")
    pages = sizes.long_context // _PAGE_TOKENS
    kv_layer = torch.randn(
        (pages, 2, shape.num_kv_heads, _PAGE_TOKENS, shape.head_dim),
        device=context.device,
        dtype=torch.bfloat16,
    )
    # A pool that has served for a while gives pages in any order.
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0)).int()[None]
    long = [(rows, sizes.long_context) for rows in (sizes.short_rows, sizes.long_rows)]
    per_row: dict[tuple[str, int], float] = {}
    for rows, seen in (*sizes.attention, *long):
        found = {}
        for backend in backends:
            seconds = one_call_s(context, sizes, shape, kv_layer, table, rows, seen, backend)
            found[backend] = per_row[backend, rows] = seconds
            context.figure(f"attention of {rows} rows over {seen}, {backend}", 1e3 * seconds, "ms")
        if "flashinfer" in found:
            ratio = found["flashinfer"] / found["triton"]
            context.figure("the same, Triton's speed beside FlashInfer's", ratio, "times")
    for backend in backends:
        short, whole = (per_row[backend, rows] / rows for rows, _ in long)
        context.figure(
            f"a row of {sizes.short_rows} over {sizes.long_context}, beside one of "
            f"{sizes.long_rows}, {backend}",
            short / whole,
            "times as long",
        )


def one_call_s(
    context: Context,
    sizes: Sizes,
    shape: ModelConfig,
    kv_layer: Tensor,
    table: Tensor,
    rows: int,
    seen: int,
    backend: str,
) -> float:
    """Returns seconds of one attention call, the median of some."""
    plan = plan_attention(
        q_indptr=torch.tensor([0, rows], dtype=torch.int32),
        kv_lens=torch.tensor([seen], dtype=torch.int32),
        page_table=table,
        page_tokens=_PAGE_TOKENS,
        num_q_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=torch.bfloat16,
        device=context.device,
        backend=backend,
    )
    q_nhd = torch.randn(rows, shape.num_heads, shape.head_dim, device=context.device).bfloat16()
    repeats = max(2, min(8 * sizes.repeats, int(2e9 // (rows * seen))))
    return statistics.median(
        times_s(
            context.device,
            repeats,
            lambda: run_attention(plan, q_nhd, kv_layer, scale=shape.head_dim**-0.5),
        )
    )


def measure_blocking(context: Context, engine: Engine, sizes: Sizes, chunk_tokens: int) -> None:
    """Measures the time from a preemption's signal to its effect on the host's thread, and until
    the device has ended what was enqueued."""
    found = blocking(
        engine,
        tokens=sizes.prompts[-1],
        chunk_tokens=chunk_tokens,
        granularity="operator",
        budget_s=sizes.blocking_s,
        seed=0,
    )
    name = f"preemption in chunks of {chunk_tokens}, p99 of {found.signals} signals"
    context.figure(name, found.p99_ms, "ms")
    context.figure(f"{name}, until the device is free", found.free_p99_ms, "ms")
