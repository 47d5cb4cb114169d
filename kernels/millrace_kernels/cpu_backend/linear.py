"""Linears and experts in C++: one call for a product and the norm or activation before it.

Shape letters: n rows of x, H in, O out; E experts, X width of an expert, t experts per token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, get_num_threads

from millrace_kernels import cpu_backend, determinism
from millrace_kernels.recording import launch

if cpu_backend.AVAILABLE:
    from millrace_kernels import _cpu


ALL_ROWS: Final = 2**31 - 1

FEW_ROWS: Final = 8
"""Rows of x up to which only the reading of the weights takes time: kFewRows of the C++ code."""


def most_rows(dtype: torch.dtype) -> int:
    """Returns the rows of x up to which C++ runs a linear, and not torch, on this processor.

    All rows if the kernels are deterministic, few rows always. Many rows in float32 with AVX2,
    where C++ beats MKL, and in bfloat16 with any x86 vectors. With AVX-512 torch's float32 product
    is faster, and on other processors torch uses the vendor's library.
    """
    native = cpu_backend.variant()
    is_faster = native == "avx2" or (dtype == torch.bfloat16 and native != "portable")
    return ALL_ROWS if is_faster or determinism.is_on() else FEW_ROWS


def most_assignments() -> int:
    """Returns the most assignments (rows of x times experts of each) that C++ runs. Torch makes
    many small calls per expert, so C++ runs them always, if it uses the processor's vectors.
    """
    is_slower = cpu_backend.variant() == "portable" and not determinism.is_on()
    return FEW_ROWS if is_slower else ALL_ROWS


def _shape(*tensors: Tensor) -> str:
    return ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)


class CpuLinear:
    """Computes x @ weight.T + bias over a contiguous weight [O, H], whose address C++ keeps.

    A decode step makes dozens of these calls on a few rows, so each attribute of a tensor is read
    once for the checks. `out` and `total` are written and returned where they are given; `out` may
    not overlap the inputs, `total` may be the residual itself.
    """

    __slots__ = ("_norm", "_norm_at", "_tensors", "dtype", "inputs", "native", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Raises ValueError unless both are contiguous on the CPU and the bias fits."""
        if not weight.is_contiguous() or not cpu_backend.takes(weight):
            raise ValueError(f"weight must be contiguous on the CPU, got {_shape(weight)}")
        if bias is not None and (
            bias.shape != weight.shape[:1]
            or bias.dtype != weight.dtype
            or not bias.is_cpu
            or not bias.is_contiguous()
        ):
            raise ValueError(f"bias must be contiguous [O] of the weight's dtype: {_shape(bias)}")
        self._tensors = (weight, bias)
        self._norm: Tensor | None = None
        self._norm_at = 0
        self.dtype = weight.dtype
        self.outputs, self.inputs = weight.shape
        self.native = _cpu.Linear(
            cpu_backend.TYPES[weight.dtype],
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.inputs,
            self.outputs,
        )

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps x [n, H], with rows contiguous or not, to [n, O]. Raises ValueError for another
        shape.
        """
        x, rows, stride = self._rows(x, self.inputs)
        out = self._room(out, rows, self.outputs)
        launch(self.native.run, x.data_ptr(), stride, rows, out.data_ptr(), get_num_threads())
        return out

    def after_norm(
        self,
        x: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor,
        eps: float,
        out: Tensor | None = None,
        total: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns (linear(rms_norm(total)), total), bitwise equal to norm and linear one by one.

        x, residual [n, H]; norm_weight [H]. Raises ValueError for other shapes or dtypes.
        """
        x, rows, stride = self._rows(x, self.inputs)
        if norm_weight is not self._norm:
            self._check_norm(norm_weight)
        residual_at = total_at = 0
        if residual is None:
            total = x
        else:
            if not self._fits(residual, rows, self.inputs):
                residual = self._like(x, residual)
            if total is not residual:
                total = self._room(total, rows, self.inputs)
            residual_at, total_at = residual.data_ptr(), total.data_ptr()
        out = self._room(out, rows, self.outputs)
        launch(
            self.native.run_after_norm,
            x.data_ptr(),
            stride,
            residual_at,
            rows,
            self._norm_at,
            eps,
            total_at,
            out.data_ptr(),
            get_num_threads(),
        )
        return out, total

    def after_silu(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns linear(silu(gate) * up) for gate_up [n, 2 * H], bitwise equal to both one by
        one.
        """
        gate_up, rows, stride = self._rows(gate_up, 2 * self.inputs)
        if stride != 2 * self.inputs:
            gate_up = gate_up.contiguous()
        out = self._room(out, rows, self.outputs)
        launch(
            self.native.run_after_silu,
            gate_up.data_ptr(),
            rows,
            out.data_ptr(),
            get_num_threads(),
        )
        return out

    def _rows(self, x: Tensor, width: int) -> tuple[Tensor, int, int]:
        """Returns x with contiguous rows, the number of rows, and their distance."""
        shape = x.shape
        if len(shape) != 2 or shape[1] != width or x.dtype is not self.dtype or not x.is_cpu:
            raise ValueError(f"x must be {self.dtype} [n, {width}] on the CPU, got {_shape(x)}")
        if x.is_contiguous():
            return x, shape[0], width
        stride, step = x.stride()
        if step != 1 and width != 1:
            return x.contiguous(), shape[0], width
        return x, shape[0], stride

    def _fits(self, tensor: Tensor, rows: int, width: int) -> bool:
        return (
            tensor.shape == (rows, width)
            and tensor.dtype is self.dtype
            and tensor.is_contiguous()
            and tensor.is_cpu
        )

    def _room(self, given: Tensor | None, rows: int, width: int) -> Tensor:
        if given is None:
            return torch.empty((rows, width), dtype=self.dtype)
        if not self._fits(given, rows, width):
            raise ValueError(
                f"out and total must be contiguous {self.dtype} on the CPU, here "
                f"[{rows}, {width}], got {_shape(given)}"
            )
        return given

    def _like(self, x: Tensor, residual: Tensor) -> Tensor:
        if residual.shape != x.shape or residual.dtype != self.dtype or not residual.is_cpu:
            raise ValueError(f"residual must be like x: {_shape(residual, x)}")
        return residual.contiguous()

    def _check_norm(self, norm_weight: Tensor) -> None:
        if (
            norm_weight.shape != (self.inputs,)
            or norm_weight.dtype != self.dtype
            or not norm_weight.is_cpu
            or not norm_weight.is_contiguous()
        ):
            raise ValueError(
                f"norm_weight must be contiguous {self.dtype} [{self.inputs}], "
                f"got {_shape(norm_weight)}"
            )
        self._norm = norm_weight  # the next call has the same weight
        self._norm_at = norm_weight.data_ptr()


class CpuExperts:
    """SwiGLU experts whose projections each run as one loop over all experts."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """Takes gate_up [E, 2 * X, H] and down [E, H, X], contiguous on the CPU, else raises
        ValueError.
        """
        for projection in (gate_up, down):
            if not projection.is_contiguous() or not cpu_backend.takes(projection):
                raise ValueError(f"experts must be contiguous on the CPU: {_shape(projection)}")
        self._tensors = (gate_up, down)
        self.dtype = gate_up.dtype
        experts, self.hidden, width = down.shape
        self.native = _cpu.Experts(
            cpu_backend.TYPES[down.dtype],
            gate_up.data_ptr(),
            down.data_ptr(),
            experts,
            width,
            self.hidden,
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Maps x [n, H], expert_ids int64 [n, t], weights float32 [n, t] to [n, H].

        Raises ValueError for other shapes or dtypes, IndexError for an unknown expert.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(f"x must be {self.dtype} [n, {self.hidden}], got {_shape(x)}")
        if (
            expert_ids.shape[:1] != x.shape[:1]
            or expert_ids.shape != weights.shape
            or expert_ids.dtype != torch.int64
            or weights.dtype != torch.float32
        ):
            raise ValueError(
                f"expert_ids int64 [n, t] and weights float32 [n, t] don't fit x: "
                f"{_shape(expert_ids, weights, x)}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
        out = torch.empty(x.shape, dtype=self.dtype)
        self.native.run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            expert_ids.data_ptr(),
            weights.data_ptr(),
            expert_ids.shape[1],
            out.data_ptr(),
            get_num_threads(),
        )
        return out
