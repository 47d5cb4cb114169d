"""The interface of a backend's module for all operations other than attention."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Rows(Protocol):
    """The operations other than attention, one module per backend; `api` describes the
    functions.
    """

    def merge_attention_(
        self, out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor, /
    ) -> None: ...

    def rope_write_kv(  # noqa: PLR0913 - as the API has it
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_layer: Tensor,
        slots: Tensor,
        *,
        num_q_heads: int,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
    ) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, /) -> Tensor: ...

    def add_rms_norm(
        self,
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        total: Tensor | None = None,
        /,
    ) -> tuple[Tensor, Tensor]: ...

    def silu_mul(self, gate_up: Tensor, /) -> Tensor: ...

    def choose_experts(
        self, logits: Tensor, per_token: int, normalised: bool, /
    ) -> tuple[Tensor, Tensor]: ...

    def sample(
        self,
        logits: Tensor,
        temperatures: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        min_p: Tensor,
        uniforms: Tensor,
        /,
    ) -> tuple[Tensor, Tensor]: ...
