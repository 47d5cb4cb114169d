"""Draws from softmax(logits / temperature), plain or filtered, in Triton; sums are float64.

Order of tokens: the higher logit first, of equal logits the lower id. A token's `key` is that order
as one int64 (the logit's bits made monotonic, above the id counted backwards), unique and
invertible. The tokens that top_k, top_p and min_p keep are a prefix of the order, so their keys are
at least some threshold.
"""

# ruff: noqa: PLR0913 - a kernel's arguments are all that reaches it.
from __future__ import annotations

import triton.language as tl

from millrace_kernels.triton_backend.jit import jit

LAST_ID = tl.constexpr(0x7FFFFFFF)
LEAST_KEY = tl.constexpr(-(1 << 63))
GREATEST_KEY = tl.constexpr((1 << 63) - 1)
KEY_BITS = tl.constexpr(64)


@jit()
def _weigh(logits: tl.tensor, peak: tl.tensor, temperature: tl.tensor) -> tl.tensor:
    """Returns probabilities times a factor that makes the likeliest 1."""
    return tl.exp((logits.to(tl.float64) - peak) / temperature)


@jit()
def _is_filtered(top_k: tl.tensor, top_p: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    return (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)


@jit("vocab")
def sum_weights(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (b, blocks of the vocabulary): writes each block's sum of weights into masses [b,
    blocks].
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + i, mask=i < vocab, other=float("-inf"))
        weights = _weigh(logits, tl.load(peaks_ptr + row), temperature)
        tl.store(masses_ptr + row * tl.num_programs(1) + tl.program_id(1), tl.sum(weights, 0))


@jit("vocab", "blocks")
def draw_plain(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    blocks: tl.tensor,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Grid (b,): finds the id where uniform * mass falls in the running sum by id, for rows that
    are neither greedy nor filtered.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    filtered = _is_filtered(
        tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    )
    if (temperature > 0) & (filtered == 0):
        b = tl.arange(0, BLOCKS)
        masses = tl.load(masses_ptr + row * blocks + b, mask=b < blocks, other=0.0)
        running = tl.cumsum(masses, 0)
        target = tl.load(uniforms_ptr + row) * tl.sum(masses, 0)
        # Sums in another order may differ in the last bit: if no sum exceeds the target, the last
        # id with weight is taken, in both steps.
        weighty = tl.max(tl.where(masses > 0, b, 0), 0)
        chosen = tl.min(tl.where((running > target) & (masses > 0), b, weighty), 0)
        target -= tl.sum(tl.where(b < chosen, masses, 0.0), 0)

        i = chosen * BLOCK + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + row * row_stride + i, mask=i < vocab, other=float("-inf"))
        weights = _weigh(logits, tl.load(peaks_ptr + row), temperature)
        last = tl.max(tl.where(weights > 0, i, 0), 0)
        found = (tl.cumsum(weights, 0) > target) & (weights > 0)
        tl.store(ids_ptr + row, tl.min(tl.where(found, i, last), 0).to(tl.int64))


@jit("vocab", "blocks")
def draw_among(
    keys_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    settled_ptr: tl.tensor,
    vocab: tl.tensor,
    blocks: tl.tensor,
    COUNT: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCKS: tl.constexpr,
) -> None:
    """Grid (b,): draws for filtered rows from the keys [b, COUNT] of their likeliest, in order.

    settled int32 [b]: 0 where the filters may keep tokens beyond the COUNT.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    tl.store(settled_ptr + row, 1)
    if (temperature > 0) & _is_filtered(top_k, top_p, min_p):
        i = tl.arange(0, BLOCK_C)
        keys = tl.load(keys_ptr + row * COUNT + i, mask=i < COUNT, other=LEAST_KEY)
        ordered = (keys >> 32).to(tl.int32)
        logits = (ordered ^ ((ordered >> 31) & LAST_ID)).to(tl.float32, bitcast=True)
        limit = tl.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        within = (i < limit) & (i < COUNT)
        weights = _weigh(logits, tl.load(peaks_ptr + row), temperature)
        weights = tl.where(within, weights, 0.0)
        running = tl.cumsum(weights, 0)
        b = tl.arange(0, BLOCKS)
        masses = tl.load(masses_ptr + row * blocks + b, mask=b < blocks, other=0.0)
        total = tl.where(limit <= COUNT, tl.sum(weights, 0), tl.sum(masses, 0))
        kept = within & (weights >= min_p)
        # An infinite share means off exactly: no rounding of sums can drop a token.
        share = tl.where(top_p < 1.0, top_p, float("inf"))
        kept = kept & (running - weights < share * total) | (i == 0)
        last = tl.min(tl.where(kept, BLOCK_C, i), 0) - 1

        mass = tl.sum(tl.where(i == last, running, 0.0), 0)
        found = (running > tl.load(uniforms_ptr + row) * mass) & (weights > 0)
        chosen = tl.min(tl.where(found, i, last), 0)
        key = tl.max(tl.where(i == chosen, keys, LEAST_KEY), 0)
        tl.store(ids_ptr + row, (key & LAST_ID) ^ LAST_ID)
        # Of logits equal to the last candidate's, some may not be among the candidates.
        least = tl.max(tl.where(i == COUNT - 1, ordered, -LAST_ID - 1), 0)
        above = tl.max(tl.where(i == last, ordered, -LAST_ID - 1), 0) > least
        known = (limit <= COUNT) | (limit == vocab) | (top_p >= 1.0)
        if (vocab > COUNT) & ((above & known) == 0):
            tl.store(settled_ptr + row, 0)


@jit()
def _tally(
    row_ptr: tl.tensor,
    vocab: tl.tensor,
    least: tl.tensor,
    peak: tl.tensor,
    temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tuple:
    """Returns how many tokens have a key of at least `least`, their mass, and the last one's
    weight.
    """
    count = tl.full((), 0, tl.int64)
    mass = tl.full((), 0.0, tl.float64)
    lightest = tl.full((), float("inf"), tl.float64)
    for start in range(0, vocab, BLOCK):
        i = start + tl.arange(0, BLOCK)
        logits = tl.load(row_ptr + i, mask=i < vocab, other=float("-inf"))
        bits = (logits + 0.0).to(tl.int32, bitcast=True)
        ordered = bits ^ ((bits >> 31) & LAST_ID)
        keys = (ordered.to(tl.int64) << 32) | (i ^ LAST_ID).to(tl.int64)
        chosen = (keys >= least) & (i < vocab)
        weights = _weigh(logits, peak, temperature)
        count += tl.sum(chosen.to(tl.int64), 0)
        mass += tl.sum(tl.where(chosen, weights, 0.0), 0)
        lightest = tl.minimum(lightest, tl.min(tl.where(chosen, weights, float("inf")), 0))
    return count, mass, lightest


@jit()
def _middle(low: tl.tensor, high: tl.tensor) -> tl.tensor:
    return (low >> 1) + (high >> 1) + (low & high & 1)


@jit("vocab")
def draw_by_bisection(
    logits_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    temperatures_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    uniforms_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    settled_ptr: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (b,): draws for unsettled rows from the whole vocabulary, by bisecting thresholds.

    Up to 3 * 64 passes over the row; such rows are rare (a flat distribution, nearly unfiltered).
    """
    row = tl.program_id(0).to(tl.int64)
    if tl.load(settled_ptr + row) == 0:
        row_ptr = logits_ptr + row * row_stride
        peak = tl.load(peaks_ptr + row)
        temperature = tl.load(temperatures_ptr + row)
        top_k = tl.load(top_k_ptr + row)
        top_p = tl.load(top_p_ptr + row)
        min_p = tl.load(min_p_ptr + row)

        # The mass that top_p is a share of: the mass of the first top_k.
        limit = tl.where((top_k > 0) & (top_k < vocab), top_k, vocab)
        low = tl.full((), LEAST_KEY, tl.int64)
        count, total, lightest = _tally(row_ptr, vocab, low, peak, temperature, BLOCK)
        if limit < vocab:
            high = tl.full((), GREATEST_KEY, tl.int64)
            for _ in range(KEY_BITS):
                middle = _middle(low, high)
                count, mass, lightest = _tally(row_ptr, vocab, middle, peak, temperature, BLOCK)
                fits = count <= limit
                high = tl.where(fits, middle, high)
                total = tl.where(fits, mass, total)
                low = tl.where(fits, low, middle)

        # The kept mass: the lowest threshold whose last token passes all three filters.
        low = tl.full((), LEAST_KEY, tl.int64)
        high = tl.full((), GREATEST_KEY, tl.int64)
        kept_mass = tl.full((), 0.0, tl.float64)
        for _ in range(KEY_BITS):
            middle = _middle(low, high)
            count, mass, lightest = _tally(row_ptr, vocab, middle, peak, temperature, BLOCK)
            in_p = (top_p >= 1.0) | (mass - lightest < top_p * total)
            kept = (count <= 1) | ((count <= limit) & (lightest >= min_p) & in_p)
            high = tl.where(kept, middle, high)
            kept_mass = tl.where(kept, mass, kept_mass)
            low = tl.where(kept, low, middle)

        # The token: the highest threshold whose mass exceeds the target is its key.
        target = tl.load(uniforms_ptr + row) * kept_mass
        low = tl.full((), LEAST_KEY, tl.int64)
        high = tl.full((), GREATEST_KEY, tl.int64)
        for _ in range(KEY_BITS):
            middle = _middle(low, high)
            count, mass, lightest = _tally(row_ptr, vocab, middle, peak, temperature, BLOCK)
            beyond = mass > target
            low = tl.where(beyond, middle, low)
            high = tl.where(beyond, high, middle)
        tl.store(ids_ptr + row, (low & LAST_ID) ^ LAST_ID)
