"""Start the small model with an induction circuit, so that it copies from its context.

Source: Olsson et al., "In-context Learning and Induction Heads", 2022. Training finds this circuit
by itself, but only after thousands of steps, which a short run on one core does not have. It is two
attention layers: layer 0 copies the previous token's embedding to a place of its own, layer 1 looks
for the place that holds the current token there, and so finds what came after it the last time.

Both are random orthogonal maps between the embedding and the heads. One hidden dimension is set to
a constant, which gives layer 0 a query and a key that depend on the position only: turned by one
position against each other, they match best at a distance of one. Layer 1 matches contents, so it
uses the rotary dimensions that turn slowly; they hardly depend on the distance.
"""

from __future__ import annotations

import math

import torch
from tiny_llama import Attention, TinyConfig, TinyLlama
from torch import Tensor

EMBEDDING_STD = 0.06
PREVIOUS_GAIN = 40.0  # score of the previous token in layer 0, before the softmax
WRITE_GAIN = 1.5  # strength of the copied embedding beside the token's own
MATCH_GAIN = 8.0  # sharpness of the match in layer 1
COPY_GAIN = 8.0  # strength of the token that layer 1 proposes
FAST = 0.02  # radians a position: rotary dimensions above it tell positions apart
HAND_SET = tuple(f"model.layers.{layer}.self_attn." for layer in (0, 1))


def _orthogonal(rows: int, columns: int) -> Tensor:
    columns_rc: Tensor = torch.linalg.qr(torch.randn(rows, columns))[0]
    return columns_rc


def _previous_token_heads(config: TinyConfig, attention: Attention, level: float) -> None:
    """Queries and keys from the constant dimension 0, whose value is `level` after the norm."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** -(torch.arange(half) / half)
    fast = frequency > FAST
    size = math.sqrt(PREVIOUS_GAIN * math.sqrt(config.head_dim) / int(fast.sum())) / level
    for weight, turn in ((attention.q_proj.weight, -1.0), (attention.k_proj.weight, 0.0)):
        weight.zero_()
        heads = weight.view(-1, 2, half, config.hidden_size)
        heads[:, 0, :, 0] = torch.where(fast, size * torch.cos(turn * frequency), 0.0)
        heads[:, 1, :, 0] = torch.where(fast, size * torch.sin(turn * frequency), 0.0)


def _matching_heads(config: TinyConfig, attention: Attention, own: Tensor, before: Tensor) -> None:
    """Queries from the token's own embedding, keys from the previous token's place."""
    half = config.head_dim // 2
    frequency = config.rope_theta ** -(torch.arange(half) / half)
    slow = (frequency <= FAST).nonzero().flatten()
    dims = torch.cat((slow, slow + half))
    for weight, source, gain in (
        (attention.q_proj.weight, own, MATCH_GAIN),
        (attention.k_proj.weight, before, 1.0),
    ):
        weight.zero_()
        heads = weight.shape[0] // config.head_dim
        for head in range(heads):
            first = head * config.num_kv_heads // heads * config.head_dim
            columns = source[:, first : first + len(dims)]
            weight[head * config.head_dim + dims, 1:] = columns.T * gain


def _carry(config: TinyConfig, attention: Attention, read: Tensor, write: Tensor) -> None:
    """Values read with `read`, outputs written with `write`, shared by the heads of a group."""
    attention.v_proj.weight.zero_()
    attention.v_proj.weight[:, 1:] = read.T
    attention.o_proj.weight.zero_()
    group = config.num_heads // config.num_kv_heads
    size = config.head_dim
    for head in range(config.num_heads):
        first = head // group * size
        attention.o_proj.weight[1:, head * size : (head + 1) * size] = (
            write[:, first : first + size] / group
        )


@torch.no_grad()
def start_with_induction(model: TinyLlama) -> None:
    """Set the embedding and the first two layers' attention. Uses torch's global generator."""
    config = model.config
    embedding = model.model.embed_tokens.weight
    embedding.normal_(std=EMBEDDING_STD)
    embedding[:, 0] = EMBEDDING_STD * math.sqrt(config.hidden_size)
    level = float((embedding[:, 0] / embedding.pow(2).mean(-1).sqrt()).mean())
    width = config.num_kv_heads * config.head_dim
    own = _orthogonal(config.hidden_size - 1, width)
    before = _orthogonal(config.hidden_size - 1, width)
    first, second = model.attention(0), model.attention(1)
    _previous_token_heads(config, first, level)
    _carry(config, first, own, before * EMBEDDING_STD * WRITE_GAIN)
    _matching_heads(config, second, own, before)
    _carry(config, second, own, own * EMBEDDING_STD * COPY_GAIN)
