"""Joins a linear with the operation before it, where no kernel does both in one call."""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.row_operations import Rows


class ComposedLinear:
    """Computes x @ weight.T + bias after a norm or an activation, which is a separate call of
    `_rows`.
    """

    __slots__ = ()

    @property
    def _rows(self) -> Rows:
        raise NotImplementedError

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Maps x [n, H] to [n, O], into `out` where it is given."""
        raise NotImplementedError

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
        if residual is None:
            return self(self._rows.rms_norm(x, norm_weight, eps), out), x
        normed, summed = self._rows.add_rms_norm(x, residual, norm_weight, eps, total)
        return self(normed, out), summed

    def after_silu(self, gate_up: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns linear(silu(gate) * up) for gate_up [n, 2 * H] with gate in the first half."""
        return self(self._rows.silu_mul(gate_up), out)
