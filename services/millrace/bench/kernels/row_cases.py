"""Cases of the row-by-row kernels: norms, rope, linears, experts, sampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from millrace.bench.kernels.case import DTYPES, Case, Sides, Sizes, copies, random, turns
from millrace.core.arithmetic import ceil_div
from millrace_kernels import api, torch_backend

_EPS = 1e-5


def row_cases(sizes: Sizes, dtype: str) -> Iterator[Case]:
    """Yields every case of one dtype."""
    for case in (_merge_case, _rope_case, _norm_case, _silu_case):
        for rows in sizes.rows:
            yield case(sizes, dtype, rows)
    for inputs, outputs in sizes.linear_shapes:
        for rows in sizes.linear_rows:
            yield _linear_case(sizes, dtype, rows, inputs, outputs)
    for case in (_after_norm_case, _after_silu_case, _experts_case):
        for rows in sizes.fused_rows:
            yield case(sizes, dtype, rows)
    if dtype == "float32":  # logits always are
        for batch in sizes.batches:
            yield _sample_case(sizes, batch)


def _merge_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    """Merges a partial result of the dtype into a float32 result."""
    shape = (rows, sizes.num_q_heads, sizes.head_dim)

    def make() -> Sides:
        out, lse = random(shape, torch.float32), random(shape[:2], torch.float32)
        partial, partial_lse = random(shape, DTYPES[dtype]), random(shape[:2], torch.float32)
        torch_out, torch_lse = out.clone(), lse.clone()

        def ours() -> Tensor:
            api.merge_attention_(out, lse, partial, partial_lse)
            return out

        def other() -> Tensor:
            torch_backend.merge_attention_(torch_out, torch_lse, partial, partial_lse)
            return torch_out

        return Sides(ours, other)

    return _row_case("merge", sizes, dtype, rows, math.prod(shape), (8, 1), make)


def _rope_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    s, kind = sizes, DTYPES[dtype]
    heads = s.num_q_heads + 2 * s.num_kv_heads

    def make() -> Sides:
        qkv = random((rows, heads, s.head_dim), kind)
        angles = random((rows, s.head_dim // 2), torch.float32)
        cos, sin = angles.cos(), angles.sin()
        pages = ceil_div(rows, s.page_tokens)
        layer = random((pages, 2, s.num_kv_heads, s.page_tokens, s.head_dim), kind)
        slots = torch.randperm(pages * s.page_tokens)[:rows]
        torch_qkv, torch_layer = qkv.clone(), layer.clone()

        def ours() -> Tensor:
            return api.rope_write_kv(qkv, cos, sin, layer, slots, num_q_heads=s.num_q_heads)

        def other() -> Tensor:
            q, k, v = torch_qkv.tensor_split([s.num_q_heads, heads - s.num_kv_heads], 1)
            torch_backend.rope_(q, cos, sin)
            torch_backend.rope_(k, cos, sin)
            torch_backend.write_kv(torch_layer, k, v, slots)
            return q

        return Sides(ours, other)

    return _row_case("rope_write_kv", s, dtype, rows, rows * heads * s.head_dim, (0, 2), make)


def _norm_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    shape, kind = (rows, sizes.hidden), DTYPES[dtype]

    def make() -> Sides:
        x, residual, weight = random(shape, kind), random(shape, kind), random(shape[1:], kind)

        def other() -> Tensor:
            return functional.rms_norm(x + residual, shape[1:], weight, _EPS)

        return Sides(lambda: api.add_rms_norm(x, residual, weight, _EPS)[0], other)

    return _row_case("add_rms_norm", sizes, dtype, rows, math.prod(shape), (0, 4), make)


def _silu_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    def make() -> Sides:
        gate_up = random((rows, 2 * sizes.intermediate), DTYPES[dtype])
        return Sides(lambda: api.silu_mul(gate_up), lambda: torch_backend.silu_mul(gate_up))

    return _row_case("silu_mul", sizes, dtype, rows, rows * sizes.intermediate, (0, 3), make)


def _row_case(
    kernel: str,
    sizes: Sizes,
    dtype: str,
    rows: int,
    elements: int,
    moved: tuple[int, int],
    make: Callable[[], Sides],
) -> Case:
    """`moved`: bytes of float32 data, and accesses to data of the dtype, for each element."""
    return Case(
        kernel=kernel,
        shape=f"{rows} rows of {elements // rows}",
        dtype=dtype,
        flops=0.0,
        moved_bytes=elements * (moved[0] + moved[1] * DTYPES[dtype].itemsize),
        make=make,
    )


def _linear_case(sizes: Sizes, dtype: str, rows: int, inputs: int, outputs: int) -> Case:
    def make() -> Sides:
        weights = _weights(sizes, dtype, inputs, outputs)
        weight, linear = turns(weights), turns([api.prepare_linear(w) for w in weights])
        x = random((rows, inputs), DTYPES[dtype])
        return Sides(lambda: next(linear)(x), lambda: functional.linear(x, next(weight)))

    return _product_case("linear", dtype, rows, inputs, outputs, make)


def _after_norm_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    inputs, kind = sizes.hidden, DTYPES[dtype]
    outputs = (sizes.num_q_heads + 2 * sizes.num_kv_heads) * sizes.head_dim

    def make() -> Sides:
        linears = [api.prepare_linear(w) for w in _weights(sizes, dtype, inputs, outputs)]
        linear, alone = turns(linears), turns(linears)
        x, residual, norm = (random(shape, kind) for shape in ((rows, inputs),) * 2 + ((inputs,),))
        return Sides(
            lambda: next(linear).after_norm(x, residual, norm, _EPS)[0],
            lambda: next(alone)(api.add_rms_norm(x, residual, norm, _EPS)[0]),
        )

    return _product_case("after_norm", dtype, rows, inputs, outputs, make, against="pieces")


def _after_silu_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    inputs, outputs = sizes.intermediate, sizes.hidden

    def make() -> Sides:
        linears = [api.prepare_linear(w) for w in _weights(sizes, dtype, inputs, outputs)]
        linear, alone = turns(linears), turns(linears)
        gate_up = random((rows, 2 * inputs), DTYPES[dtype])
        return Sides(
            lambda: next(linear).after_silu(gate_up),
            lambda: next(alone)(api.silu_mul(gate_up)),
        )

    return _product_case("after_silu", dtype, rows, inputs, outputs, make, against="pieces")


def _weights(sizes: Sizes, dtype: str, inputs: int, outputs: int) -> list[Tensor]:
    return copies(random((outputs, inputs), DTYPES[dtype]) * inputs**-0.5, sizes)


def _product_case(
    kernel: str,
    dtype: str,
    rows: int,
    inputs: int,
    outputs: int,
    make: Callable[[], Sides],
    against: str = "torch",
) -> Case:
    elements = inputs * outputs + rows * (inputs + outputs)
    return Case(
        kernel=kernel,
        shape=f"{rows} x {inputs} -> {outputs}",
        dtype=dtype,
        flops=2.0 * rows * inputs * outputs,
        moved_bytes=elements * DTYPES[dtype].itemsize,
        make=make,
        against=against,
    )


def _experts_case(sizes: Sizes, dtype: str, rows: int) -> Case:
    s, kind = sizes, DTYPES[dtype]
    ids = torch.rand(rows, s.experts).topk(s.experts_per_token).indices
    chosen = sorted(set(ids.flatten().tolist()))
    matrices = 3 * s.hidden * s.expert_width

    def make() -> Sides:
        gate_up = random((s.experts, 2 * s.expert_width, s.hidden), kind) * s.hidden**-0.5
        down = random((s.experts, s.hidden, s.expert_width), kind) * s.expert_width**-0.5
        experts = api.prepare_experts(gate_up, down)
        x, weights = random((rows, s.hidden), kind), torch.rand(ids.shape).softmax(1)

        def other() -> Tensor:
            out = torch.zeros(x.shape)
            for expert in chosen:
                row, place = (ids == expert).nonzero(as_tuple=True)
                inner = torch_backend.silu_mul(functional.linear(x[row], gate_up[expert]))
                part = functional.linear(inner, down[expert]) * weights[row, place, None]
                out.index_add_(0, row, part.float())
            return out.to(kind)

        return Sides(lambda: experts(x, ids, weights), other)

    return Case(
        kernel="experts",
        shape=f"{rows} rows, {s.experts_per_token} of {s.experts}",
        dtype=dtype,
        flops=2.0 * ids.numel() * matrices,
        moved_bytes=len(chosen) * matrices * kind.itemsize,
        make=make,
    )


def _sample_case(sizes: Sizes, batch: int) -> Case:
    """Samples with temperature 0.8, top-k 50, top-p 0.95."""
    temperature, top_k, top_p = 0.8, 50, 0.95

    def make() -> Sides:
        logits = random((batch, sizes.vocab), torch.float32)
        uniforms = torch.rand(batch, dtype=torch.float64)
        temperatures, top_ps, min_ps = (
            torch.full_like(uniforms, value) for value in (temperature, top_p, 0.0)
        )
        settings = (temperatures, torch.full((batch,), top_k), top_ps, min_ps, uniforms)

        def other() -> Tensor:
            kept, ids = (logits / temperature).topk(top_k)
            shares = kept.softmax(1)
            shares[shares.cumsum(1) - shares >= top_p] = 0.0
            sums = shares.cumsum(1)
            drawn = uniforms.float()[:, None] * sums[:, -1:]
            place = torch.searchsorted(sums, drawn, right=True)
            return torch.take_along_dim(ids, place, 1)[:, 0]

        return Sides(lambda: api.sample(logits, *settings)[0], other)

    shape = f"{batch} x {sizes.vocab}"
    moved = 4 * batch * sizes.vocab
    return Case(
        kernel="sample", shape=shape, dtype="float32", flops=0.0, moved_bytes=moved, make=make
    )
