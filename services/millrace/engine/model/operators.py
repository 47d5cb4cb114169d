"""A model as a flat sequence of operators over an explicit activation state.

FlowPrefill section 5.1 puts preemption checks at the boundaries of the core operators: qkv_proj,
attn, o_proj, gate_up_proj, down_proj; in an MoE layer gate and experts take the place of the last
two. Everything between two of them belongs to one of them (norms and residual adds to the
projection that reads them, rotary embedding and the KV write to attn, the activation to the
projection after it). So a pass may stop after any operator and continue later exactly: all its
state is in `Activations` and in the KV pages. embed and lm_head are ours, at the ends; so are the
points within a long attn, between slices of its rows.

Shape letters: n tokens of all sequences, r rows whose logits are wanted, h q heads, k kv heads, d
head_dim, H hidden, I intermediate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

import torch
from torch import Tensor

from millrace.engine.attention.kvp_owner import RemoteAttention
from millrace.engine.attention.ring import RingAttention
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.moe import Routing, run_router
from millrace.engine.model.scratch import Scratch
from millrace.engine.model.weights.fused import LayerWeights, ModelWeights
from millrace_kernels import api as kernels
from millrace_kernels.plan import AttentionPlan

_T = TypeVar("_T")

ATTN_ROWS: Final = "attn_rows"
"""What a pass yields within ``attn``, after each slice of its rows but the last."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The attention of the rows `start` to `stop` - 1 of a pass."""

    start: int
    stop: int
    plan: AttentionPlan


@dataclass(slots=True, kw_only=True, eq=False)
class Activations:
    """Everything a forward pass carries from one operator to the next."""

    num_tokens: int  # n
    token_ids: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]: page * page_tokens + offset of each token's K/V
    cos: Tensor  # float32 [n, d / 2]
    sin: Tensor  # float32 [n, d / 2]
    lse: Tensor  # float32 [n, h], of the current layer; nothing reads it
    plans: Mapping[int | None, AttentionPlan]  # by sliding window
    sliced: Mapping[int | None, Sequence[PlannedRows]] = field(default_factory=dict)
    """By sliding window, in place of `plans` where attention is computed slice by slice."""
    ring: RingAttention | None = None  # attends in place of `plans`, over a group's K/V
    remote: RemoteAttention | None = None  # merges the K/V at other instances in, beside `plans`
    rows: Tensor | None = None  # int64 [r]; None: all rows
    last_plan: AttentionPlan | None = None  # the last layer's, when it computes `rows` alone
    keeps_rows: bool = False  # the last layer's attention is of all, what follows of `rows` alone
    into: Tensor | None = None  # memory of the next output, in place of scratch
    scratch: Scratch | None = None  # None: operators get memory of their own

    x: Tensor = field(init=False)  # [n, H], not yet added to the residual
    residual: Tensor | None = None  # [n, H], the sum so far; None before the first layer
    qkv: Tensor = field(init=False)  # [n, (h + 2k) d]
    q: Tensor = field(init=False)  # [n, h, d], rotated: a view of `qkv`
    attended: Tensor = field(init=False)  # [n, h d]
    gate_up: Tensor = field(init=False)  # [n, 2I]
    routing: Routing = field(init=False)
    rest: deque[Callable[[], object]] = field(default_factory=deque)
    """Calls that complete the present operator; a pass may stop between two of them."""
    hidden: Tensor | None = None  # [n, H] after the final norm, unless `is_cut`
    logits: Tensor = field(init=False)  # float32 [r, vocab]; the caller's, never scratch

    @property
    def is_cut(self) -> bool:
        """Returns whether the last layer computes `rows` alone, from its attention on."""
        return self.last_plan is not None if self.ring is None else self.ring.is_cut

    def take(self, width: int) -> Tensor | None:
        """Returns memory [n, width] for an operator's output."""
        taken, self.into = self.into, None
        if taken is None and self.scratch is not None:
            taken = self.scratch.take(self.num_tokens, width)
        return taken

    def room(self, width: int, dtype: torch.dtype) -> Tensor:
        """Returns memory [n, width] for a pass's input."""
        taken, shape = self.take(width), (self.num_tokens, width)
        return self.cos.new_empty(shape, dtype=dtype) if taken is None else taken

    def give(self, tensor: Tensor) -> None:
        """Takes back memory that no operator reads any more."""
        if self.scratch is not None:
            self.scratch.give(tensor)

    def give_all(self) -> None:
        """Takes back all memory, at the end of a pass wherever it ends."""
        for name in ("x", "residual", "qkv", "attended", "gate_up"):
            tensor = getattr(self, name, None)
            if tensor is not None:
                self.give(tensor)


Run = Callable[[Activations], None]
Reduce = Callable[[Tensor], None]
"""Makes a rank's partial sum [n, H] the whole one, in place, where tensor parallelism split it."""


class Head(Protocol):
    """A prepared lm_head, as `kernels.Linear`."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class Operator:
    """One uninterruptible step. ``layer`` is -1 for embed and num_layers for lm_head."""

    layer: int
    name: str
    run: Run
    halves: tuple[Run, Run] | None = None  # of attn: rotation with the K/V write; attention


def required(value: _T | None) -> _T:
    """Returns a value that the model's config, its stage or the operator before has set."""
    assert value is not None
    return value


def whole(x: Tensor) -> None:
    """The `Reduce` of a model on one rank: x is whole already."""


def build_operators(
    config: ModelConfig,
    weights: ModelWeights,
    kv_layers: list[Tensor],
    head: Head | None,
    reduce: Reduce = whole,
) -> tuple[Operator, ...]:
    """Builds the whole model in order; for a stage without embedding its layers alone.

    ``kv_layers[i]``: [pages, 2, k, page_tokens, d] of layer i; ``head``: the prepared lm_head.
    ``reduce`` ends the operators whose sums are split between ranks: o_proj, down_proj, experts.
    """
    operators = []
    if weights.embedding is not None:
        operators.append(Operator(-1, "embed", _embed(weights.embedding)))
    for i, layer in enumerate(weights.layers):
        operators.append(Operator(i, "qkv_proj", _qkv_proj(config, layer)))
        operators.append(_attn(config, layer, kv_layers[i], i))
        operators.append(Operator(i, "o_proj", _o_proj(layer, reduce)))
        operators.extend(Operator(i, name, run) for name, run in _mlp(config, layer, i, reduce))
    if head is not None:
        lm_head = _lm_head(config, required(weights.final_norm), head)
        operators.append(Operator(config.num_layers, "lm_head", lm_head))
    return tuple(operators)


def operator_names(config: ModelConfig) -> tuple[str, ...]:
    """Returns the names of `build_operators`, for a whole model."""
    names = ["embed"]
    for layer in range(config.num_layers):
        mlp = ("gate", "experts") if config.is_moe(layer) else ("gate_up_proj", "down_proj")
        names += ["qkv_proj", "attn", "o_proj", *mlp]
    return (*names, "lm_head")


def _embed(embedding: Tensor) -> Run:
    width = embedding.shape[1]

    def embed(state: Activations) -> None:
        state.x = torch.index_select(embedding, 0, state.token_ids, out=state.take(width))

    return embed


def _qkv_proj(config: ModelConfig, layer: LayerWeights) -> Run:
    project = kernels.prepare_linear(layer.qkv, layer.qkv_bias)
    norm, eps = layer.input_norm, config.norm_eps
    width = project.out_features

    def qkv_proj(state: Activations) -> None:
        x, residual = state.x, state.residual
        state.qkv, state.residual = project.after_norm(
            x, residual, norm, eps, state.take(width), residual
        )
        if residual is not None:  # else x is the residual now
            state.give(x)
        del state.x

    return qkv_proj


def _attn(config: ModelConfig, layer: LayerWeights, kv_layer: Tensor, index: int) -> Operator:
    rotate = _rotate(config, layer, kv_layer)
    attend = _attend(config, kv_layer, index)

    def attn(state: Activations) -> None:
        rotate(state)
        attend(state)

    return Operator(index, "attn", attn, (rotate, attend))


def _rotate(config: ModelConfig, layer: LayerWeights, kv_layer: Tensor) -> Run:
    heads, head_dim = config.num_heads, config.head_dim
    fused = (-1, heads + 2 * config.num_kv_heads, head_dim)
    q_norm, k_norm, eps = layer.q_norm, layer.k_norm, config.norm_eps

    def rotate(state: Activations) -> None:
        state.q = kernels.rope_write_kv(
            state.qkv.view(fused),
            state.cos,
            state.sin,
            kv_layer,
            state.slots,
            num_q_heads=heads,
            q_norm=q_norm,
            k_norm=k_norm,
            eps=eps,
        )

    return rotate


def _attend(config: ModelConfig, kv_layer: Tensor, index: int) -> Run:
    heads, head_dim = config.num_heads, config.head_dim
    window, is_last = config.sliding_windows[index], index == config.num_layers - 1
    width = heads * head_dim
    scale = head_dim**-0.5

    def attend(state: Activations) -> None:
        q_nhd, qkv = state.q, state.qkv
        del state.q
        is_cut = is_last and state.is_cut
        if is_cut:
            # Nothing reads the other rows of the last layer.
            rows, residual = required(state.rows), required(state.residual)
            q_nhd, state.residual = q_nhd[rows], residual[rows]
            state.rows = None
            state.give(residual)
            state.give(qkv)
            state.scratch = state.into = None
        attended = state.take(width)
        out_nhd = None if attended is None else attended.view(-1, heads, head_dim)
        slices = () if is_cut else state.sliced.get(window, ())
        if slices:
            out_nhd = q_nhd.new_empty(q_nhd.shape) if out_nhd is None else out_nhd
            state.rest.extend(
                partial(_attend_rows, one, q_nhd, kv_layer, scale, out_nhd, state.lse)
                for one in slices
            )
        elif state.ring is None:
            plan = required(state.last_plan) if is_cut else state.plans[window]
            lse_nh = state.lse[: len(q_nhd)]
            if state.remote is None:
                out_nhd, _ = kernels.run_attention(
                    plan, q_nhd, kv_layer, scale=scale, out=out_nhd, lse_out=lse_nh
                )
            else:
                out_nhd = state.remote.run(index, plan, q_nhd, kv_layer, scale, out_nhd, lse_nh)
        else:
            out_nhd = state.ring.run(index, q_nhd, kv_layer, scale, out_nhd)
        state.attended = out_nhd.view(-1, width) if attended is None else attended
        state.give(qkv)
        del state.qkv
        if is_last and state.keeps_rows:
            _keep_rows(state)

    return attend


def _attend_rows(
    rows: PlannedRows, q_nhd: Tensor, kv_layer: Tensor, scale: float, out_nhd: Tensor, lse: Tensor
) -> None:
    """Computes a slice of the rows of q_nhd [n, h, d] into the same rows of out_nhd and lse."""
    part = slice(rows.start, rows.stop)
    kernels.run_attention(
        rows.plan, q_nhd[part], kv_layer, scale=scale, out=out_nhd[part], lse_out=lse[part]
    )


def _keep_rows(state: Activations) -> None:
    """Keeps `rows` alone; nothing reads the other rows any more."""
    rows, residual, attended = required(state.rows), required(state.residual), state.attended
    state.attended, state.residual = attended[rows], residual[rows]
    state.rows = None
    state.give(residual)
    state.give(attended)
    state.scratch = None


def _o_proj(layer: LayerWeights, reduce: Reduce) -> Run:
    project = kernels.prepare_linear(layer.o, layer.o_bias)
    width = project.out_features

    def o_proj(state: Activations) -> None:
        state.x = project(state.attended, state.take(width))
        reduce(state.x)
        state.give(state.attended)
        del state.attended

    return o_proj


def _mlp(
    config: ModelConfig, layer: LayerWeights, index: int, reduce: Reduce
) -> Iterator[tuple[str, Run]]:
    if config.is_moe(index):
        yield "gate", _gate(config, layer)
        yield "experts", _experts(layer, reduce)
    else:
        yield "gate_up_proj", _gate_up_proj(config, layer)
        yield "down_proj", _down_proj(layer, reduce)


def _gate_up_proj(config: ModelConfig, layer: LayerWeights) -> Run:
    project = kernels.prepare_linear(required(layer.gate_up), layer.gate_up_bias)
    norm, eps = layer.post_norm, config.norm_eps
    width = project.out_features

    def gate_up_proj(state: Activations) -> None:
        residual = state.residual
        state.gate_up, state.residual = project.after_norm(
            state.x, residual, norm, eps, state.take(width), residual
        )
        state.give(state.x)
        del state.x

    return gate_up_proj


def _down_proj(layer: LayerWeights, reduce: Reduce) -> Run:
    project = kernels.prepare_linear(required(layer.down), layer.down_bias)
    width = project.out_features

    def down_proj(state: Activations) -> None:
        state.x = project.after_silu(state.gate_up, state.take(width))
        reduce(state.x)
        state.give(state.gate_up)
        del state.gate_up

    return down_proj


def _gate(config: ModelConfig, layer: LayerWeights) -> Run:
    router = kernels.prepare_linear(required(layer.router))
    norm, eps, moe = layer.post_norm, config.norm_eps, config.moe
    assert moe is not None  # the layer is an MoE layer

    def gate(state: Activations) -> None:
        residual = required(state.residual)
        normed, state.residual = kernels.add_rms_norm(state.x, residual, norm, eps)
        state.routing = run_router(normed, router, moe)
        del state.x

    return gate


def _experts(layer: LayerWeights, reduce: Reduce) -> Run:
    mixture = kernels.prepare_experts(required(layer.experts_gate_up), required(layer.experts_down))

    def experts(state: Activations) -> None:
        routing = state.routing
        del state.routing
        state.x = mixture(routing.x, routing.expert_ids, routing.weights)
        reduce(state.x)

    return experts


def _lm_head(config: ModelConfig, final_norm: Tensor, head: Head) -> Run:
    eps = config.norm_eps

    def lm_head(state: Activations) -> None:
        if state.rows is None:  # all rows are wanted
            logits, _ = head.after_norm(state.x, state.residual, final_norm, eps)
        else:
            residual = required(state.residual)
            state.hidden, _ = kernels.add_rms_norm(state.x, residual, final_norm, eps)
            logits = head(state.hidden[state.rows])
        state.logits = logits.float()

    return lm_head
