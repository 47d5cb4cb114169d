"""Every operation against the float64 reference, where Triton's kernels run: in its
interpreter with TRITON_INTERPRET=1 (tiny tiles), else on a CUDA device (the committed tiles).

`test_comparisons.py` runs this file in a process of its own, because Triton reads that variable
when it is imported. bfloat16 runs on a device only: the interpreter computes it wrongly.
"""

from __future__ import annotations

import dataclasses
import os

import pytest
import torch

from millrace_kernels import reference
from millrace_kernels.triton_backend import attention, configs, linear, moe, rows, sampling
from support.attention_calls import Call

INTERPRETED = bool(os.environ.get("TRITON_INTERPRET"))
DEVICE = "cpu" if INTERPRETED else "cuda"
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize(
    "dtype", [d for d in TOLERANCE if not (INTERPRETED and d == torch.bfloat16)], ids=str
)
TINY = {"block_m": 16, "block_n": 16, "block_k": 16, "num_warps": 1, "num_stages": 1}


@pytest.fixture(autouse=True)
def tiles():
    """Uses tiny tiles in the interpreter: a step of a kernel takes it milliseconds."""
    if not INTERPRETED:
        yield
        return
    few = {**TINY, "split_slots": 32}
    with (
        configs.trying(
            attend_few=few,
            attend_rows={**few, "block_m": 32, "split_slots": 64},
            skinny_linear=TINY,
            experts_few={**TINY, "block_m": 4},
            experts_rows=TINY,
        ),
    ):
        yield


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        actual.double().cpu(), expected.double().cpu(), rtol=tolerance, atol=tolerance
    )


SMALL = {"kv_heads": 2, "group": 3, "head_dim": 20, "page_tokens": 4}
CALLS = {
    "decode": Call((1, 1, 1), (70, 1, 37), **SMALL),
    "prefill with history": Call((3, 17, 2), (40, 17, 30), **SMALL),
    "nothing to see": Call((2, 0, 1), (0, 5, 9), **SMALL),
    "window": Call((1, 12), (90, 70), window=20, **SMALL),
    "soft cap": Call((1, 9), (40, 20), soft_cap=1.5, **SMALL),
    "not causal": Call((1, 9), (40, 20), causal=False, **SMALL),
    "zigzag": Call((14, 1), (60, 20), layout="zigzag", **SMALL),
    "striped, window": Call((12, 2), (50, 3), layout="striped", window=13, **SMALL),
    "shuffled": Call((9, 1), (30, 40), layout="shuffled", **SMALL),
    "pages of whole blocks": Call((1, 9), (70, 40), **{**SMALL, "page_tokens": 32}),
    "one head": Call((1, 5), (20, 30), kv_heads=1, group=1, head_dim=16, page_tokens=7),
}
LARGE = {
    "long": Call((1, 300, 1), (9000, 2000, 70), group=4, head_dim=128),
    "short chunk, long history": Call((70,), (40_000,), kv_heads=2, group=4, head_dim=128),
    "large pages": Call((1, 300), (9000, 2000), group=4, head_dim=128, page_tokens=128),
    "wide heads": Call((1, 130), (3000, 900), head_dim=256, window=700, soft_cap=20.0),
    "odd heads": Call((1, 130), (3000, 900), head_dim=80, group=7, layout="zigzag"),
}


def attend(call: Call, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q_nhd, kv_layer = call.data()
    plan = attention.plan(call.plan("reference", device=DEVICE))
    out = torch.full(q_nhd.shape, torch.nan, dtype=out_dtype, device=DEVICE)
    lse = torch.full(q_nhd.shape[:2], torch.nan, device=DEVICE)
    q_nhd, kv_layer = q_nhd.to(DEVICE), kv_layer.to(DEVICE)
    plan.run(q_nhd, kv_layer, scale=call.head_dim**-0.5, out_nhd=out, lse_nh=lse)
    return out, lse


@pytest.mark.parametrize("name", CALLS if INTERPRETED else CALLS | LARGE)
def test_attention(name):
    for dtype in [torch.float32] if INTERPRETED else TOLERANCE:
        call = dataclasses.replace((CALLS | LARGE)[name], dtype=dtype)
        expected, expected_lse = call.run("reference")
        out, lse = attend(call, torch.float32)
        close(out, expected, dtype)
        close(lse, expected_lse, dtype)


def test_attention_rounds_to_its_dtype():
    call = dataclasses.replace(CALLS["prefill with history"], dtype=torch.float16)
    out, lse = attend(call, torch.float16)
    expected, expected_lse = call.run("reference")
    close(out, expected, torch.float16)
    close(lse, expected_lse, torch.float16)


def test_a_sequence_gets_the_same_bits_in_any_batch():
    call = CALLS["decode"]
    together, _ = attend(call, torch.float32)
    q_nhd, kv_layer = (tensor.to(DEVICE) for tensor in call.data())
    q_indptr, kv_lens, page_table = call.tables()
    alone = attention.plan(
        call.plan(
            "reference",
            device=DEVICE,
            q_indptr=q_indptr[:2],
            kv_lens=kv_lens[:1],
            page_table=page_table[:1],
        )
    )
    out, lse = torch.empty_like(q_nhd[:1]), torch.empty(q_nhd[:1].shape[:2], device=DEVICE)
    alone.run(q_nhd[:1], kv_layer, scale=call.head_dim**-0.5, out_nhd=out, lse_nh=lse)
    assert torch.equal(out, together[:1])


def test_a_page_table_on_the_device_is_read_where_it_is():
    call = CALLS["decode"]
    expected, _ = attend(call, torch.float32)
    q_nhd, kv_layer = (tensor.to(DEVICE) for tensor in call.data())
    _, _, page_table = call.tables()
    kept = torch.full((len(page_table) + 2, page_table.shape[1] + 7), 9, dtype=torch.int32)
    kept[: len(page_table), : page_table.shape[1]] = page_table
    kept = kept.to(DEVICE)[: len(page_table)]
    plan = attention.plan(call.plan("reference", device=DEVICE, device_table=kept))
    out, lse = torch.empty_like(expected), torch.empty(expected.shape[:2], device=DEVICE)
    plan.run(q_nhd, kv_layer, scale=call.head_dim**-0.5, out_nhd=out, lse_nh=lse)
    assert plan.page_table is kept and torch.equal(out, expected)


def test_pages_outside_the_pool_and_a_scale_of_0_are_refused():
    call = CALLS["decode"]
    q_nhd, kv_layer = call.data()
    plan = attention.plan(call.plan("reference", device=DEVICE))
    with pytest.raises(IndexError, match="is past the pool's 3"):
        plan.run(q_nhd, kv_layer[:3], scale=1.0, out_nhd=q_nhd, lse_nh=q_nhd[:, :, 0])
    with pytest.raises(ValueError, match="scale is 0"):
        plan.run(q_nhd, kv_layer, scale=0.0, out_nhd=q_nhd, lse_nh=q_nhd[:, :, 0])
    with pytest.raises(IndexError, match="page -1"):
        attention.plan(call.plan("reference", page_table=torch.full((3, 18), -1).int()))


@DTYPES
def test_merging_partial_results(dtype):
    outs = randn(2, 4, 3, 20, dtype=dtype)
    lses = randn(2, 4, 3, dtype=torch.float32, seed=1) * 3
    lses[0, 0] = lses[1, 1] = lses[:, 2] = -torch.inf
    outs[lses.isneginf()] = 0
    weights = torch.where(lses.isneginf(), 0.0, lses.double().exp())
    total = weights.sum(0)
    mixed = (outs.double() * weights[..., None]).sum(0)
    expected = mixed / torch.where(total > 0, total, 1.0)[..., None]
    attention.merge_attention_(outs[0], lses[0], outs[1].float(), lses[1])
    close(outs[0], expected, dtype)
    close(lses[0], total.log(), torch.float32)


@DTYPES
def test_norms_and_silu(dtype):
    x, residual = randn(2, 5, 40, dtype=dtype)
    weight = randn(40, dtype=dtype, seed=1)
    close(rows.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)
    normed, total = rows.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    close(normed, reference.rms_norm(total, weight, 1e-5), dtype)
    in_place = rows.add_rms_norm(x, residual, weight, 1e-5, residual)
    assert in_place[1].data_ptr() == residual.data_ptr() and torch.equal(residual, total)
    assert torch.equal(in_place[0], normed)
    fused = randn(6, 7, 20, dtype=dtype)[:, 2:5]
    close(
        rows.rms_norm(fused, weight[:20], 0.0), reference.rms_norm(fused, weight[:20], 0.0), dtype
    )
    close(rows.silu_mul(x * 4), reference.silu_mul(x * 4), dtype)


@DTYPES
@pytest.mark.parametrize("normed", [False, True], ids=["plain", "normed"])
def test_rotating_and_writing(dtype, normed):
    heads, kv_heads, head_dim = 6, 2, 12
    qkv = randn(5, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = randn(5, head_dim // 2, dtype=torch.float32, seed=1) * 9
    pool = randn(3, 2, kv_heads, 4, head_dim, dtype=dtype, seed=2)
    slots = torch.tensor([3, 11, 0, 12, 4], device=DEVICE)  # 12 is past the pool's 3 pages
    norms = randn(2, head_dim, dtype=dtype, seed=3) if normed else (None, None)
    q, k, v = (part.double() for part in qkv.split((heads, kv_heads, kv_heads), 1))
    if normed:
        q, k = (reference.rms_norm(x, w, 1e-6) for x, w in zip((q, k), norms, strict=True))
    q, k = (reference.rope(x, angles.cos(), angles.sin()) for x in (q, k))
    expected, written = pool.double(), slots < 12
    reference.write_kv(expected, k[written], v[written], slots[written])
    out = rows.rope_write_kv(
        qkv,
        angles.cos(),
        angles.sin(),
        pool,
        slots,
        num_q_heads=heads,
        q_norm=norms[0],
        k_norm=norms[1],
        eps=1e-6,
    )
    assert out.data_ptr() == qkv.data_ptr() and out.shape == (5, heads, head_dim)
    close(out, q, dtype)
    close(pool, expected, dtype)


@DTYPES
def test_linear(dtype):
    x, weight = randn(20, 70, dtype=dtype), randn(37, 70, dtype=dtype, seed=1) / 8
    bias = randn(37, dtype=dtype, seed=2)
    layer = linear.TritonLinear(weight, bias)
    assert (layer.in_features, layer.out_features) == (70, 37)
    for count in (0, 1, 8, 20):
        close(layer(x[:count]), reference.linear(x[:count], weight, bias), dtype)
    assert torch.equal(layer(x[2:3]), layer(x[:8])[2:3])
    norm = randn(70, dtype=dtype, seed=3)
    out, total = layer.after_norm(x[:3], x[3:6], norm, 1e-6)
    assert torch.equal(total, x[:3] + x[3:6])
    close(out, reference.linear(reference.rms_norm(total, norm, 1e-6), weight, bias), dtype)
    gate_up = randn(3, 140, dtype=dtype, seed=4)
    close(
        layer.after_silu(gate_up),
        reference.linear(reference.silu_mul(gate_up), weight, bias),
        dtype,
    )
    with pytest.raises(ValueError, match="a linear of 70 inputs"):
        layer(x[:, :69])


@DTYPES
@pytest.mark.parametrize("tokens", [9, 60], ids=["few", "rows"])
def test_experts(dtype, tokens):
    experts, width, hidden, per_token = 3, 24, 40, 2
    gate_up = randn(experts, 2 * width, hidden, dtype=dtype) / 6
    down = randn(experts, hidden, width, dtype=dtype, seed=1) / 5
    x = randn(tokens, hidden, dtype=dtype, seed=2)
    weights = randn(tokens, per_token, dtype=torch.float32, seed=3).softmax(-1)
    # The second expert gets no rows.
    ids = torch.stack([torch.randperm(2)[:per_token] * 2 for _ in range(tokens)]).to(DEVICE)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64, device=DEVICE)
    for i in range(tokens):
        for expert, share in zip(ids[i].tolist(), weights[i].double(), strict=True):
            gate, up = (gate_up[expert].double() @ x[i].double()).chunk(2)
            expected[i] += share * (down[expert].double() @ (gate * gate.sigmoid() * up))
    layer = moe.TritonExperts(gate_up, down)
    close(layer(x, ids, weights), expected, dtype)
    assert layer(x[:0], ids[:0], weights[:0]).shape == (0, hidden)


@DTYPES
@pytest.mark.parametrize("normalised", [False, True])
def test_choosing_experts(dtype, normalised):
    logits = (randn(5, 2 * 11, dtype=dtype)[:, :11] * 4).round() / 2  # rows apart, and ties
    ids, weights = moe.choose_experts(logits, 3, normalised)
    expected_ids, expected = reference.choose_experts(logits, 3, normalised)
    assert torch.equal(ids, expected_ids)
    close(weights, expected, torch.float32)
    if not INTERPRETED:  # NumPy warns of the subtraction
        logits[1] = torch.nan
        ids, _ = moe.choose_experts(logits, 3, normalised)
        assert ids[1].min() >= 0 and ids[1].max() < 11


@pytest.mark.parametrize("count", [1, 40])
def test_few_and_many_assignments_are_sorted_alike(count, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 6, (count, 1), generator=generator).repeat(1, 2).view(-1).to(DEVICE)
    gate_up, down = randn(7, 16, 16, dtype=torch.float32), randn(7, 16, 8, dtype=torch.float32)
    layer = moe.TritonExperts(gate_up, down)
    x, shares = randn(count, 16, dtype=torch.float32), torch.ones(count, 2, device=DEVICE)
    found = []
    for few in (0, ids.numel()):
        monkeypatch.setattr(moe, "FEW_ASSIGNMENTS", few)
        found.append(layer(x, ids.view(count, 2), shares))
    assert torch.equal(*found)


def drawn(logits, temperature, top_k, top_p, min_p, uniform) -> int:
    """Draws one row's token by the definition: float64, one full sort."""
    wide, vocab = logits.double().cpu(), logits.numel()
    if temperature == 0:
        return int(wide.argmax())
    order = torch.arange(vocab)
    if top_k > 0 or top_p < 1 or min_p > 0:
        order = torch.tensor(sorted(range(vocab), key=lambda i: (-float(wide[i]), i)))
    weights = ((wide[order] - wide.max()) / temperature).exp()
    if top_k > 0:
        weights[top_k:] = 0
    running = weights.cumsum(0)
    share = top_p if top_p < 1 else torch.inf
    kept = (weights >= min_p) & (running - weights < share * running[-1])
    kept[(top_k or vocab) :] = False
    kept[0] = True
    last = int(kept.sum()) - 1 if top_k > 0 or top_p < 1 or min_p > 0 else vocab - 1
    return int(order[torch.searchsorted(running, uniform * running[last], right=True)])


SETTINGS = (  # temperature, top_k, top_p, min_p
    (0.0, 0, 1.0, 0.0),
    (0.5, 0, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (2.0, 20, 0.8, 0.05),
    (1.5, 30, 0.99, 0.0),
    (1.0, 0, 1.0, 0.3),
    (1.0, 1, 1.0, 0.0),
)


def sample(logits, settings, uniforms) -> None:
    temperatures, top_k, top_p, min_p = torch.tensor(settings, dtype=torch.float64).T.unbind()
    ids, peaks = sampling.sample(logits, temperatures, top_k.long(), top_p, min_p, uniforms)
    expected = [
        drawn(row, *setting, uniform)
        for row, setting, uniform in zip(logits, settings, uniforms.tolist(), strict=True)
    ]
    assert ids.tolist() == expected
    assert torch.equal(peaks, logits.amax(-1))


@pytest.mark.parametrize("seed", range(2))
def test_sampling(seed):
    vocab = 50 if INTERPRETED else 5000
    logits = randn(len(SETTINGS), vocab, dtype=torch.float32, seed=seed) * 2
    logits[0, 3] = -torch.inf
    if seed % 2:
        logits = (logits * 2).round() / 2  # many ties
    uniforms = torch.rand(len(SETTINGS), generator=torch.Generator().manual_seed(seed)).double()
    sample(logits, SETTINGS, uniforms)


@pytest.mark.parametrize("setting", [(2.0, 20, 0.9, 0.0), (1.0, 0, 0.95, 0.02)], ids=str)
def test_sampling_beyond_the_candidates(setting, monkeypatch):
    monkeypatch.setattr(sampling, "CANDIDATES", 4)
    logits = (randn(1, 30, dtype=torch.float32) * 2).round() / 4
    sample(logits, [setting], torch.tensor([0.97], dtype=torch.float64))


def test_peaks_that_are_not_finite_come_back():
    logits = randn(3, 40, dtype=torch.float32)
    logits[1, 7], logits[2, 9] = torch.nan, torch.inf
    ones = torch.ones(3, dtype=torch.float64)
    _, peaks = sampling.sample(logits, ones * 0, ones.long() * 0, ones, ones * 0, ones / 2)
    assert peaks.isfinite().tolist() == [True, False, False] and peaks[1].isnan()
    with pytest.raises(ValueError, match="logits must be float32"):
        sampling.sample(logits.half(), ones, ones.long(), ones, ones, ones)
