"""A model as a flat sequence of operators over an explicit activation state.

FlowPrefill section 5.1 puts preemption checks at the boundaries of the core operators: qkv_proj,
attn, o_proj, gate_up_proj, down_proj; in an MoE layer gate and experts take the place of the last
two. Everything between two of them belongs to one of them (norms and residual adds to the
projection that reads them, rotary embedding and the KV write to attn, the activation to the
projection after it), so that a pass may stop after any operator and go on later exactly: all it
needs is in `Activations` and in the KV pages. embed and lm_head are ours, at the ends.

Shape letters: n tokens of all sequences, r rows whose logits are wanted, h q heads, k kv heads,
d head_dim, H hidden, I intermediate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import functional

from millrace.engine.model_config import ModelConfig
from millrace.engine.models.moe import Routing, run_experts, run_router
from millrace.engine.models.weights import LayerWeights, ModelWeights
from millrace_kernels import api as kernels
from millrace_kernels.plan import AttentionPlan


@dataclass(slots=True, kw_only=True, eq=False)
class Activations:
    """Everything a forward pass carries from one operator to the next."""

    token_ids: Tensor  # int64 [n]
    slots: Tensor  # int64 [n]: page * page_tokens + offset of each token's K/V
    cos: Tensor  # float32 [n, d / 2]
    sin: Tensor  # float32 [n, d / 2]
    plans: dict[int | None, AttentionPlan]  # by sliding window
    rows: Tensor | None = None  # int64 [r]; None: every row there is
    last_plan: AttentionPlan | None = None  # the last layer's, when it computes `rows` alone

    residual: Tensor = field(init=False)  # [n, H], the sum so far
    x: Tensor | None = None  # [n, H], not yet added to the residual; None at the first layer
    qkv: Tensor = field(init=False)  # [n, (h + 2k) d]
    attended: Tensor = field(init=False)  # [n, h d]
    gate_up: Tensor = field(init=False)  # [n, 2I]
    routing: Routing = field(init=False)
    hidden: Tensor = field(init=False)  # [n, H], or [r, H] with `last_plan`; after the final norm
    logits: Tensor = field(init=False)  # float32 [r, vocab]


Run = Callable[[Activations], None]


@dataclass(frozen=True, slots=True)
class Operator:
    """One uninterruptible step. ``layer`` is -1 for embed and num_layers for lm_head."""

    layer: int
    name: str
    run: Run


def build_operators(
    config: ModelConfig, weights: ModelWeights, kv_layers: list[Tensor]
) -> tuple[Operator, ...]:
    """The whole model in order. ``kv_layers[i]``: [pages, 2, k, page_tokens, d] of layer i."""
    last = config.num_layers - 1
    operators = [Operator(-1, "embed", _embed(weights.embedding))]
    for i, layer in enumerate(weights.layers):
        attn = _attn(config, layer, kv_layers[i], config.sliding_windows[i], is_last=i == last)
        operators.append(Operator(i, "qkv_proj", _qkv_proj(config, layer)))
        operators.append(Operator(i, "attn", attn))
        operators.append(Operator(i, "o_proj", _o_proj(layer)))
        operators.extend(Operator(i, name, run) for name, run in _mlp(config, layer, i))
    operators.append(Operator(config.num_layers, "lm_head", _lm_head(config, weights)))
    return tuple(operators)


def _embed(embedding: Tensor) -> Run:
    def embed(state: Activations) -> None:
        state.residual = functional.embedding(state.token_ids, embedding)

    return embed


def _normed(state: Activations, weight: Tensor, eps: float) -> Tensor:
    """Adds what the last operator left to the residual and returns its norm."""
    if state.x is None:
        return kernels.rms_norm(state.residual, weight, eps)
    normed, state.residual = kernels.add_rms_norm(state.x, state.residual, weight, eps)
    state.x = None
    return normed


def _qkv_proj(config: ModelConfig, layer: LayerWeights) -> Run:
    eps = config.norm_eps

    def qkv_proj(state: Activations) -> None:
        normed = _normed(state, layer.input_norm, eps)
        state.qkv = kernels.linear(normed, layer.qkv, layer.qkv_bias)

    return qkv_proj


def _attn(
    config: ModelConfig, layer: LayerWeights, kv_layer: Tensor, window: int | None, *, is_last: bool
) -> Run:
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    splits = (heads, kv_heads, kv_heads)
    scale, eps = head_dim**-0.5, config.norm_eps
    q_norm, k_norm = layer.q_norm, layer.k_norm

    def attn(state: Activations) -> None:
        qkv_nhd = state.qkv.view(-1, heads + 2 * kv_heads, head_dim)
        q_nhd, k_nhd, v_nhd = qkv_nhd.split_with_sizes(splits, 1)
        if q_norm is not None and k_norm is not None:
            q_nhd = kernels.rms_norm(q_nhd, q_norm, eps)
            k_nhd = kernels.rms_norm(k_nhd, k_norm, eps)
        q_nhd, k_nhd = kernels.apply_rope(q_nhd, k_nhd, state.cos, state.sin)
        kernels.write_kv(kv_layer, k_nhd, v_nhd, state.slots)
        del state.qkv
        plan = state.plans[window]
        if is_last and state.last_plan is not None and state.rows is not None:
            # Nothing reads the other rows of the last layer.
            plan, q_nhd = state.last_plan, q_nhd[state.rows]
            state.residual = state.residual[state.rows]
            state.rows = None
        out_nhd, _ = kernels.run_attention(plan, q_nhd, kv_layer, scale=scale)
        state.attended = out_nhd.view(-1, heads * head_dim)

    return attn


def _o_proj(layer: LayerWeights) -> Run:
    def o_proj(state: Activations) -> None:
        state.x = kernels.linear(state.attended, layer.o, layer.o_bias)
        del state.attended

    return o_proj


def _mlp(config: ModelConfig, layer: LayerWeights, index: int) -> Iterator[tuple[str, Run]]:
    if config.is_moe(index):
        yield "gate", _gate(config, layer)
        yield "experts", _experts(layer)
    else:
        yield "gate_up_proj", _gate_up_proj(config, layer)
        yield "down_proj", _down_proj(layer)


def _gate_up_proj(config: ModelConfig, layer: LayerWeights) -> Run:
    eps = config.norm_eps
    gate_up = _required(layer.gate_up)

    def gate_up_proj(state: Activations) -> None:
        normed = _normed(state, layer.post_norm, eps)
        state.gate_up = kernels.linear(normed, gate_up, layer.gate_up_bias)

    return gate_up_proj


def _down_proj(layer: LayerWeights) -> Run:
    down = _required(layer.down)

    def down_proj(state: Activations) -> None:
        state.x = kernels.linear(kernels.silu_mul(state.gate_up), down, layer.down_bias)
        del state.gate_up

    return down_proj


def _gate(config: ModelConfig, layer: LayerWeights) -> Run:
    eps, moe = config.norm_eps, config.moe
    router = _required(layer.router)
    assert moe is not None  # the layer is an MoE layer

    def gate(state: Activations) -> None:
        normed = _normed(state, layer.post_norm, eps)
        state.routing = run_router(normed, router, moe)

    return gate


def _experts(layer: LayerWeights) -> Run:
    gate_up, down = _required(layer.experts_gate_up), _required(layer.experts_down)

    def experts(state: Activations) -> None:
        state.x = run_experts(state.routing, gate_up, down)
        del state.routing

    return experts


def _lm_head(config: ModelConfig, weights: ModelWeights) -> Run:
    eps = config.norm_eps

    def lm_head(state: Activations) -> None:
        state.hidden = _normed(state, weights.final_norm, eps)
        wanted = state.hidden if state.rows is None else state.hidden[state.rows]
        state.logits = kernels.linear(wanted, weights.lm_head).float()

    return lm_head


def _required(weight: Tensor | None) -> Tensor:
    assert weight is not None  # `layer_specs` gave every layer of this kind one
    return weight
