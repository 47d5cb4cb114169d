"""Linear layers on a CUDA device: our kernel up to 8 rows, cuBLAS (through torch) above."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from millrace_kernels import torch_backend
from millrace_kernels.composed import ComposedLinear
from millrace_kernels.row_operations import Rows
from millrace_kernels.triton_backend import configs, rows
from millrace_kernels.triton_backend.jit import dot_precision, launch
from millrace_kernels.triton_backend.kernels import linear as linear_kernels

FEW_ROWS: Final = 8
"""Rows of x up to which the kernel runs: decode of a few sequences, bound by reading weights."""

_BLOCK_M: Final = 16


@dataclass(frozen=True, slots=True)
class TritonLinear(ComposedLinear):
    """Computes x @ weight.T + bias with the operation before it. weight [out, in] contiguous, bias
    [out].
    """

    weight: Tensor
    bias: Tensor | None = None

    @property
    def _rows(self) -> Rows:
        return rows

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    @property
    def out_features(self) -> int:
        return self.weight.shape[0]

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns [n, out] of x [n, in] whose rows are contiguous. Raises ValueError for another
        width.
        """
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"x is {tuple(x.shape)} for a linear of {self.in_features} inputs")
        if 0 < x.shape[0] <= FEW_ROWS and x.stride(1) == 1 and self.weight.is_contiguous():
            result = multiply_few_rows(x, self.weight, self.bias)
            return result if out is None else out.copy_(result)
        return torch_backend.linear(x, self.weight, self.bias, out)


def multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns [n, out] of at most 8 rows x [n, in], weight [out, in] contiguous, bias [out]."""
    outputs, inputs = weight.shape
    config = configs.lookup("skinny_linear", x.device, x.dtype)
    out = torch.empty((x.shape[0], outputs), dtype=x.dtype, device=x.device)
    launch(
        linear_kernels.multiply_few_rows,
        (-(-outputs // config["block_n"]),),
        x,
        weight,
        weight if bias is None else bias,
        out,
        x.shape[0],
        x.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        BLOCK_M=_BLOCK_M,
        BLOCK_N=config["block_n"],
        BLOCK_K=config["block_k"],
        BIASED=bias is not None,
        PRECISION=dot_precision(x.dtype),
        num_warps=config["num_warps"],
        num_stages=config["num_stages"],
    )
    return out
