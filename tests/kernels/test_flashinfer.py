"""FlashInfer's plans: pieces, page lists and LSE, with the reference in place of its wrappers.

Its kernels need a GPU: on a GPU the same calls use them.
"""

from __future__ import annotations

import gc
import inspect
import math
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_kernels import flashinfer_backend, trial
from millrace_kernels.api import plan_attention, run_attention
from millrace_kernels.flashinfer_backend import Piece
from support.attention_calls import TOLERANCE, Call, attend, calls

CUDA = torch.device("cuda")
GPU_REASON = flashinfer_backend.unavailable(CUDA)
BF16 = torch.bfloat16


class PlayedEvent:
    """`torch.cuda.Event` of a device that is `behind` the host, or not."""

    behind = False

    def record(self):
        self.is_recorded = True

    def query(self):
        return self.is_recorded and not self.behind


class PlayedWrapper:
    """Computes FlashInfer's masks over its page lists by the float64 reference; base-2 LSE."""

    def __init__(self, workspace, kv_layout="NHD", **options):
        assert workspace.dtype == torch.uint8 and kv_layout == "HND"
        self.options, self.planned, self.ran = options, [], []
        self._buffer = torch.zeros(1)  # which every plan writes

    def _plan(self, qo_indptr, indptr, indices, last_page_len, shape, causal, options):
        h, k, d, page_tokens = shape
        self._buffer.add_(1)
        pages = indptr.diff()
        kv_lens = (pages - 1) * page_tokens + last_page_len
        assert (pages > 0).all() and (last_page_len > 0).all()
        table = torch.full((len(pages), int(pages.max())), -1, dtype=torch.int32)
        for row, (start, count) in enumerate(zip(indptr.tolist(), pages.tolist(), strict=False)):
            table[row, :count] = indices[start : start + count]
        pairs = zip(kv_lens.tolist(), qo_indptr.diff().tolist(), strict=True)
        positions = [torch.arange(kv_len - q_len, kv_len) for kv_len, q_len in pairs]
        assert options["q_data_type"] == options["kv_data_type"] and options["sm_scale"] == 1.0
        self._reference = plan_attention(
            q_indptr=qo_indptr,
            kv_lens=kv_lens,
            page_table=table,
            page_tokens=page_tokens,
            num_q_heads=h,
            num_kv_heads=k,
            head_dim=d,
            dtype=options["q_data_type"],
            device="cpu",
            q_positions=torch.cat(positions).int(),
            causal=causal,
            sliding_window=None if options["window_left"] < 0 else options["window_left"] + 1,
            soft_cap=options["logits_soft_cap"],
            backend="reference",
        )

    def run(self, *args, **options):
        self.ran.append((args, options))
        (q, kv_cache), out = args, options["out"]
        assert out is None or out.dtype == q.dtype
        out = torch.empty_like(q) if out is None else out
        lse = torch.empty(q.shape[:2])
        run_attention(self._reference, q, kv_cache, scale=options["q_scale"], out=out, lse_out=lse)
        return out, lse / math.log(2)


class PlayedPrefill(PlayedWrapper):
    def plan(self, *args, causal=False, **options):
        self.planned.append((args, {"causal": causal, **options}))
        self._plan(*args[:4], args[4:], causal, options)


class PlayedDecode(PlayedWrapper):
    def plan(self, *args, **options):
        self.planned.append((args, options))
        qo_indptr = torch.arange(len(args[0]), dtype=torch.int32)
        self._plan(qo_indptr, *args[:3], args[3:], False, options)


@pytest.fixture
def played(monkeypatch):
    """Simulates the package; `made` lists its wrappers."""
    made = []

    def making(kind):
        def make(*args, **options):
            made.append(kind(*args, **options))
            return made[-1]

        return make

    package = SimpleNamespace(
        BatchPrefillWithPagedKVCacheWrapper=making(PlayedPrefill),
        BatchDecodeWithPagedKVCacheWrapper=making(PlayedDecode),
        made=made,
    )
    monkeypatch.setattr(flashinfer_backend, "flashinfer", lambda: package)
    monkeypatch.setattr(flashinfer_backend, "new_event", PlayedEvent)
    flashinfer_backend.store_of.cache_clear()
    yield package
    flashinfer_backend.store_of.cache_clear()


def run(call, out_dtype=torch.float32):
    """Returns out_nhd in float32 and lse_nh, through a FlashInfer plan."""
    plan = flashinfer_backend.plan(call.plan("reference"))
    q_nhd, kv_layer = call.data()
    out = torch.full(q_nhd.shape, torch.nan, dtype=out_dtype)
    lse = torch.full(q_nhd.shape[:2], torch.nan)
    plan.run(q_nhd, kv_layer, scale=call.head_dim**-0.5, out_nhd=out, lse_nh=lse)
    return out.float(), lse


def assert_right(call, found):
    expected, expected_lse = call.run("reference")
    tolerance = TOLERANCE[BF16]
    torch.testing.assert_close(found[0], expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(found[1], expected_lse, rtol=1e-5, atol=tolerance / 2)


@settings(max_examples=60)
@given(call=calls(longest=300), out_dtype=st.sampled_from([torch.float32, BF16]))
def test_any_call_matches_the_reference_or_says_why_not(played, call, out_dtype):
    call = replace(call, dtype=BF16, head_dim=64)
    if flashinfer_backend.refusal(call.plan("reference")):
        assert call.layout != "plain"
        with pytest.raises(ValueError, match=r"in order of position|no sliding window"):
            flashinfer_backend.plan(call.plan("reference"))
    else:
        assert_right(call, run(call, out_dtype))


@pytest.mark.parametrize(
    ("call", "kinds"),
    [
        (Call(q_lens=(1, 1), kv_lens=(70, 3), group=1), ["PlayedDecode"]),
        (Call(q_lens=(1, 1), kv_lens=(70, 0)), ["PlayedDecode"]),
        (Call(q_lens=(1, 40, 9), kv_lens=(70, 40, 90), window=20), ["PlayedPrefill"]),
        (Call(q_lens=(30, 30), kv_lens=(70, 40), causal=False), ["PlayedPrefill"]),
        (Call(q_lens=(40, 1), kv_lens=(100, 5), layout="zigzag"), ["PlayedPrefill"]),
        (Call(q_lens=(0, 5), kv_lens=(9, 0), layout="zigzag"), []),
    ],
    ids=["decode", "decode of an empty", "prefill", "all see all", "zigzag", "nothing to see"],
)
def test_which_wrappers_are_planned(played, call, kinds):
    call = replace(call, dtype=BF16)
    assert_right(call, run(call))
    assert [type(wrapper).__name__ for wrapper in played.made] == kinds


def test_a_wrapper_serves_threads_in_and_out_of_inference_mode(played):
    call = Call(q_lens=(5,), kv_lens=(70,), dtype=BF16)
    with torch.inference_mode():
        assert_right(call, run(call))
    assert_right(call, run(call))
    (wrapper,) = played.made
    assert len(wrapper.planned) == 2


def ring_call(rank, source, chunk=20, ranks=3):
    """Makes one zigzag step: the rows of `rank` over the K/V of `source`, two chunks each."""

    def chunks(of):
        ends = (of, 2 * ranks - 1 - of)
        return torch.cat([torch.arange(c * chunk, (c + 1) * chunk) for c in ends])

    class Ring(Call):
        def positions(self):
            return chunks(rank).int(), chunks(source).int()

    return Ring(q_lens=(2 * chunk,), kv_lens=(2 * chunk,), dtype=BF16)


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("source", range(3))
def test_a_zigzag_step_is_one_piece(played, rank, source):
    call = ring_call(rank, source)
    assert_right(call, run(call))
    pieces = flashinfer_backend.pieces_of(call.plan("reference"))
    expected = {
        -1: (20, 40, 40, False),  # only the later half sees slots, and it sees all
        0: (0, 40, 40, True),
        1: (0, 40, 20, False),
    }[(rank > source) - (rank < source)]
    assert [(p.start, p.stop, p.kv_len, p.causal) for p in pieces] == [expected]


@st.composite
def placed(draw):
    """A stand-in of a plan: ascending slots, rows at any positions, in runs or not."""
    sequences, rows, slots = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        kv = sorted(draw(st.sets(st.integers(0, 40), max_size=25)))
        q = []
        for _ in range(draw(st.integers(0, 4))):
            start, step = draw(st.integers(0, 40)), draw(st.sampled_from([1, 1, 2, -1]))
            q.extend(start + step * i for i in range(draw(st.integers(1, 8))))
        sequences.append((len(rows), len(rows) + len(q), len(kv)))
        rows += q
        slots += kv
    first = next((s for s in sequences), None)
    assert first is not None
    return sequences, torch.tensor(rows), torch.tensor(slots)


@settings(max_examples=200)
@given(placed=placed(), causal=st.booleans())
def test_pieces_show_each_row_what_it_may_see(placed, causal):
    sequences, rows, slots = placed
    plan = Call(q_lens=(), kv_lens=()).plan(
        "reference",
        q_indptr=torch.tensor([0, *(stop for _, stop, _ in sequences)], dtype=torch.int32),
        kv_lens=torch.tensor([kv_len for _, _, kv_len in sequences], dtype=torch.int32),
        page_table=torch.zeros(len(sequences), 4, dtype=torch.int32),
        q_positions=rows.int(),
        kv_positions=slots.int(),
        causal=causal,
    )
    assert flashinfer_backend.refusal(replace(plan, dtype=BF16)) == ""
    before = [0]
    for *_, kv_len in sequences:
        before.append(before[-1] + kv_len)
    expected = {
        (row, before[index] + j)
        for index, (start, stop, kv_len) in enumerate(sequences)
        for row in range(start, stop)
        for j in range(kv_len)
        if not causal or slots[before[index] + j] <= rows[row]
    }
    found = [
        (row, before[piece.sequence] + j)
        for piece in flashinfer_backend.pieces_of(plan)
        for row in range(piece.start, piece.stop)
        for j in range(piece.kv_len - (piece.stop - 1 - row) * piece.causal)
    ]
    assert len(found) == len(set(found)) and set(found) == expected


@settings(max_examples=100)
@given(data=st.data(), page_tokens=st.integers(1, 9))
def test_page_lists_name_the_slots_of_the_table(data, page_tokens):
    batch = data.draw(st.integers(1, 4))
    table = torch.arange(batch * 5, dtype=torch.int32).view(batch, 5).flip(1)
    pieces = [
        Piece(sequence=sequence, start=0, stop=1, kv_len=kv_len, causal=True)
        for sequence, kv_len in data.draw(
            st.lists(
                st.tuples(st.integers(0, batch - 1), st.integers(1, 5 * page_tokens)), min_size=1
            )
        )
    ]
    lists = flashinfer_backend.page_lists(pieces, table, page_tokens)
    assert {t.dtype for t in (lists.indptr, lists.indices, lists.last_page_len)} == {torch.int32}
    assert lists.indptr[0] == 0 and lists.indptr[-1] == len(lists.indices)
    for i, piece in enumerate(pieces):
        own = lists.indices[lists.indptr[i] : lists.indptr[i + 1]]
        assert own.tolist() == table[piece.sequence, : len(own)].tolist()
        assert (len(own) - 1) * page_tokens + int(lists.last_page_len[i]) == piece.kv_len
        assert 1 <= lists.last_page_len[i] <= page_tokens


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (Call(q_lens=(1,), kv_lens=(3,)), "takes bfloat16 and float16, not torch.float32"),
        (Call(q_lens=(1,), kv_lens=(3,), dtype=BF16, head_dim=80), "head_dim 64, 128, 256, not 80"),
        (
            Call(q_lens=(4,), kv_lens=(9,), dtype=BF16, layout="zigzag", window=3),
            "no sliding window where positions are given",
        ),
        (
            Call(q_lens=(2, 4), kv_lens=(0, 90), dtype=BF16, layout="shuffled"),
            "slots of sequence 1 are not in order",
        ),
    ],
)
def test_what_must_go_elsewhere(call, reason):
    plan = call.plan("reference")
    assert reason in flashinfer_backend.refusal(plan)
    with pytest.raises(ValueError, match=reason):
        flashinfer_backend.plan(plan)


def test_too_many_pieces(monkeypatch):
    monkeypatch.setattr(flashinfer_backend, "MOST_PIECES", 2)
    plan = Call(q_lens=(1, 1, 1), kv_lens=(3, 3, 3), dtype=BF16).plan("reference")
    assert flashinfer_backend.refusal(plan) == "the plan makes 3 calls of at most 2"


def test_a_wrapper_serves_one_live_plan_at_a_time(played):
    call = Call(q_lens=(3,), kv_lens=(20,), dtype=BF16)
    checked = call.plan("reference")
    plans = [flashinfer_backend.plan(checked) for _ in range(2)]
    assert len(played.made) == 2
    plans.pop()
    gc.collect()
    plans.append(flashinfer_backend.plan(checked))
    assert len(played.made) == 2 and len(played.made[1].planned) == 2


@pytest.mark.parametrize("dtype", flashinfer_backend.DTYPES, ids=str)
@pytest.mark.parametrize("shape", [{}, {"window": 4}, {"soft_cap": 30.0}, {"group": 1}], ids=str)
def test_a_trial_runs_a_prompt_and_a_decode_step_and_passes(played, dtype, shape):
    like = Call(q_lens=(5,), kv_lens=(9,), dtype=dtype, **shape).plan("reference")
    assert trial.failure(like, flashinfer_backend.plan) == ""
    kinds = [type(wrapper) for wrapper in played.made]
    assert kinds == [PlayedPrefill, PlayedDecode] and all(one.ran for one in played.made)


@pytest.mark.parametrize("where", ["_plan", "run"])
@pytest.mark.parametrize("kind", [PlayedPrefill, PlayedDecode])
def test_a_trial_says_why_the_package_fails(played, monkeypatch, kind, where):
    def fails(*_, **__):
        raise FileNotFoundError("[Errno 2] No such file:\n  'nvcc'")

    monkeypatch.setattr(kind, where, fails)
    like = Call(q_lens=(5,), kv_lens=(9,), dtype=BF16).plan("reference")
    reason = trial.failure(like, flashinfer_backend.plan)
    assert reason == "FileNotFoundError: [Errno 2] No such file: 'nvcc'"


@pytest.mark.parametrize("part", [0, 1], ids=["out", "lse"])
def test_a_trial_finds_wrong_numbers(played, monkeypatch, part):
    right = PlayedDecode.run

    def wrong(wrapper, *args, **options):
        found = right(wrapper, *args, **options)
        found[part].view(-1)[0] += 1
        return found

    monkeypatch.setattr(PlayedDecode, "run", wrong)
    like = Call(q_lens=(5,), kv_lens=(9,), dtype=BF16).plan("reference")
    assert "its results are off by" in trial.failure(like, flashinfer_backend.plan)


def test_a_trial_takes_nothing_that_was_not_written(played, monkeypatch):
    monkeypatch.setattr(flashinfer_backend.FlashInferPlan, "run", lambda *_, **__: None)
    like = Call(q_lens=(5,), kv_lens=(9,), dtype=BF16).plan("reference")
    assert trial.failure(like, flashinfer_backend.plan) == "its results are off by inf"


def test_a_wrapper_keeps_its_plan_until_the_device_has_copied_it(played, monkeypatch):
    checked = Call(q_lens=(3,), kv_lens=(20,), dtype=BF16).plan("reference")
    monkeypatch.setattr(PlayedEvent, "behind", True)
    for number in range(1, 4):
        plan = flashinfer_backend.plan(checked)
        assert len(played.made) == number
        del plan
        gc.collect()
    monkeypatch.setattr(PlayedEvent, "behind", False)
    for _ in range(3):
        plan = flashinfer_backend.plan(checked)
        del plan
        gc.collect()
    assert [len(wrapper.planned) for wrapper in played.made] == [2, 2, 2]


@pytest.mark.parametrize(
    ("q_lens", "capability", "wanted"),
    [
        ((1, 1), (9, 0), True),
        ((32,), (9, 0), False),
        ((256,), (9, 0), False),
        ((512,), (9, 0), True),
        ((32,) * 16, (9, 0), True),
        ((32,), (8, 0), True),
        ((32,), (10, 0), True),
    ],
)
def test_few_rows_do_not_fill_a_hopper_device(monkeypatch, q_lens, capability, wanted):
    monkeypatch.setattr(flashinfer_backend, "capability_of", lambda device: capability)
    monkeypatch.setattr(flashinfer_backend, "multiprocessors_of", lambda device: 132)
    call = Call(q_lens=q_lens, kv_lens=(600,) * len(q_lens), group=4, kv_heads=8, dtype=BF16)
    assert flashinfer_backend.fills(call.plan("reference")) == wanted


def test_why_it_is_not_available(monkeypatch):
    unavailable = flashinfer_backend.unavailable.__wrapped__  # clears the results
    assert "needs a CUDA device, not cpu" in unavailable(torch.device("cpu"))
    finder = flashinfer_backend.importlib.util
    monkeypatch.setattr(finder, "find_spec", lambda name: None)
    assert "not installed" in unavailable(CUDA)
    monkeypatch.setattr(finder, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no CUDA device" in unavailable(CUDA)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "compute capability 8.0, cuda has (7, 5)" in unavailable(CUDA)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def broken():
        raise ImportError("no libcudart")

    monkeypatch.setattr(flashinfer_backend, "flashinfer", broken)
    assert "can't be imported: no libcudart" in unavailable(CUDA)
    monkeypatch.setattr(flashinfer_backend, "flashinfer", lambda: None)
    assert unavailable(CUDA) == ""


@pytest.mark.parametrize("rows", [1, 4])
def test_the_package_takes_the_arguments_it_is_given(played, rows):
    package = pytest.importorskip("flashinfer", reason="flashinfer-python isn't installed")
    name = f"Batch{'Decode' if rows == 1 else 'Prefill'}WithPagedKVCacheWrapper"
    real = getattr(package, name)
    run(Call(q_lens=(rows,), kv_lens=(9,), dtype=BF16, window=4, soft_cap=30.0))
    wrapper = played.made[0]
    inspect.signature(real).bind(None, kv_layout="HND", **wrapper.options)
    (args, options), (run_args, run_options) = wrapper.planned[0], wrapper.ran[0]
    inspect.signature(real.plan).bind(None, *args, **options)
    inspect.signature(real.run).bind(None, *run_args, **run_options)
    documented = inspect.getdoc(real.plan)
    assert all(f"{option} :" in documented for option in options)


@contextmanager
def skipped_without_module():
    """Skips a test where FlashInfer may not compile a module that it has no prebuilt one of."""
    try:
        yield
    except Exception as error:
        if not flashinfer_backend.is_not_prebuilt(error):
            raise
        pytest.skip("FLASHINFER_DISABLE_JIT is set, and the module is not prebuilt")


@pytest.mark.gpu
@pytest.mark.skipif(bool(GPU_REASON), reason=GPU_REASON)
@pytest.mark.parametrize("dtype", flashinfer_backend.DTYPES, ids=str)
@pytest.mark.parametrize("group", [1, 3, 4])
@pytest.mark.parametrize(
    "call",
    [
        Call(q_lens=(1, 1, 1), kv_lens=(700, 3, 0)),
        Call(q_lens=(1, 300, 9), kv_lens=(70, 300, 900)),
        Call(q_lens=(1, 300, 9), kv_lens=(70, 300, 900), window=100, soft_cap=20.0),
        Call(q_lens=(1, 1), kv_lens=(70, 900), window=100, soft_cap=20.0),
        Call(q_lens=(30, 200), kv_lens=(70, 400), causal=False, head_dim=128),
        Call(q_lens=(40, 1, 20), kv_lens=(500, 5, 0), layout="zigzag"),
        ring_call(1, 1),
        ring_call(0, 2),
    ],
    ids=["decode", "prefill", "window", "decode window", "all see all", "zigzag", "own", "later"],
)
def test_the_kernels_match_the_reference(call, group, dtype):
    call = replace(call, dtype=dtype, group=group, head_dim=128)
    q_nhd, kv_layer = call.data()
    expected, expected_lse = attend(call.plan("reference"), q_nhd, kv_layer)
    checked = call.plan("reference")
    with skipped_without_module():
        plan = flashinfer_backend.plan(replace(checked, device=torch.device("cuda")))
    for out_dtype in (dtype, torch.float32):
        out = torch.empty(q_nhd.shape, dtype=out_dtype, device="cuda")
        lse = torch.empty(q_nhd.shape[:2], device="cuda")
        scale = call.head_dim**-0.5
        plan.run(q_nhd.cuda(), kv_layer.cuda(), scale=scale, out_nhd=out, lse_nh=lse)
        torch.testing.assert_close(out.float().cpu(), expected, rtol=0, atol=2e-2)
        torch.testing.assert_close(lse.cpu(), expected_lse, rtol=1e-5, atol=1e-2)
