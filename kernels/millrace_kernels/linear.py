"""Prepares weight matrices once, at load, for their device and dtype.

Shape letters: n rows of x, H in, O out; E experts, X width of an expert, t experts per token.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from millrace_kernels import dispatch, torch_backend
from millrace_kernels.composed import ComposedLinear
from millrace_kernels.cpu_backend import linear as cpu_linear
from millrace_kernels.cpu_backend.linear import ALL_ROWS
from millrace_kernels.plan import Backend
from millrace_kernels.row_operations import Rows


class NativeLinear(Protocol):
    """A backend's own `Linear`."""

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor: ...

    def after_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]: ...

    def after_silu(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor: ...


class NativeExperts(Protocol):
    """A backend's own `Experts`."""

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor: ...


class Linear(ComposedLinear):
    """Computes x @ weight.T + bias, alone or together with the operation before it.

    `out` [n, O] and `total` [n, H], contiguous and of x's dtype, are written and returned where
    they are given. `out` may not overlap the inputs; `total` may be the residual itself.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Takes weight [O, H], bias [O]. Raises ValueError when they don't fit each other."""
        if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
            raise ValueError(
                f"bias is {bias.dtype} {tuple(bias.shape)}, "
                f"the weight {weight.dtype} {tuple(weight.shape)}"
            )
        self.weight = weight.contiguous()
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self._native, self._native_rows = _native_linear(self.weight, bias)

    @property
    def _rows(self) -> Rows:
        return dispatch.rows(self.weight)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps x [n, H] to [n, O]. Raises ValueError or RuntimeError for another shape or dtype."""
        if self._native is not None and 0 < x.shape[0] <= self._native_rows:
            return self._native(x, out)
        return torch_backend.linear(x, self.weight, self.bias, out)

    def after_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (linear(rms_norm(total)), total) for total = x + residual, or x without a
        residual.
        """
        if self._native is not None and 0 < x.shape[0] <= self._native_rows:
            return self._native.after_norm(x, residual, norm_weight, eps, out, total)
        return super().after_norm(x, residual, norm_weight, eps, out, total)

    def after_silu(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns linear(silu(gate) * up) for gate_up [n, 2 * H] with gate in the first half."""
        if self._native is not None and 0 < gate_up.shape[0] <= self._native_rows:
            return self._native.after_silu(gate_up, out)
        return super().after_silu(gate_up, out)


class Experts:
    """The SwiGLU experts of a mixture; each row of x uses its own few experts."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """Takes gate_up [E, 2 * X, H] with gate first, down [E, H, X]. Raises ValueError
        otherwise.
        """
        experts, wide, hidden = gate_up.shape
        if down.shape != (experts, hidden, wide // 2) or wide % 2 or down.dtype != gate_up.dtype:
            raise ValueError(
                f"gate_up is {tuple(gate_up.shape)} and down {tuple(down.shape)}: not the two "
                f"projections of the same experts"
            )
        gate_up, down = gate_up.contiguous(), down.contiguous()
        self._native, self._native_rows = _native_experts(gate_up, down)
        self.gate_up = [Linear(weight) for weight in gate_up]
        self.down = [Linear(weight) for weight in down]

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Returns [n, H]: the outputs of each row's experts, weighted and summed in float32.

        x [n, H]; expert_ids int64 [n, t]; weights float32 [n, t]. Rows are sorted by expert, so
        that each chosen expert runs one matrix product per projection.
        """
        tokens, per_token = expert_ids.shape
        if self._native is not None and 0 < tokens * per_token <= self._native_rows:
            return self._native(x, expert_ids, weights)
        flat_ids = expert_ids.view(-1)
        order = flat_ids.argsort(stable=True)
        counts: list[int] = flat_ids.bincount(minlength=len(self.down)).tolist()
        rows = x[order // per_token]
        out = torch.empty_like(rows)
        start = 0
        for gate_up, down, count in zip(self.gate_up, self.down, counts, strict=True):
            if count:
                own = slice(start, start + count)
                out[own] = down.after_silu(gate_up(rows[own]))
                start += count
        weighted = torch.empty(out.shape, dtype=torch.float32, device=out.device)
        weighted[order] = out * weights.view(-1)[order, None]
        return weighted.view(tokens, per_token, -1).sum(1).to(x.dtype)


def _native_linear(weight: Tensor, bias: Tensor | None) -> tuple[NativeLinear | None, int]:
    """Returns the backend's linear, and the most rows of x that it takes; torch takes more rows."""
    backend = dispatch.rows_backend(weight.device, weight.dtype)
    if backend is Backend.TORCH or not weight.numel():
        return None, 0
    if backend is Backend.CPU:
        return cpu_linear.CpuLinear(weight, bias), cpu_linear.most_rows(weight.dtype)
    from millrace_kernels.triton_backend.linear import TritonLinear

    return TritonLinear(weight, bias), ALL_ROWS


def _native_experts(gate_up: Tensor, down: Tensor) -> tuple[NativeExperts | None, int]:
    """Returns the backend's experts, and the most assignments that they take."""
    backend = dispatch.rows_backend(down.device, down.dtype)
    if backend is Backend.TORCH or not down.numel():
        return None, 0
    if backend is Backend.CPU:
        return cpu_linear.CpuExperts(gate_up, down), cpu_linear.most_assignments()
    from millrace_kernels.triton_backend.moe import TritonExperts

    return TritonExperts(gate_up, down), ALL_ROWS


def prepare_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """Prepares a linear: weight [O, H], bias [O]. A contiguous weight is not copied."""
    return Linear(weight, bias)


def prepare_experts(gate_up: Tensor, down: Tensor) -> Experts:
    """Prepares experts: gate_up [E, 2 * X, H] with gate first, down [E, H, X]."""
    return Experts(gate_up, down)
