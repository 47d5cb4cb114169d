"""Batch packing and adaptive chunks: Medha section 4.3 and appendix A, Algorithms 1 and 2."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.operators import BatchShape
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import Packer, PackingConfig
from support.packing import Prompt, Quadratic, rho_of, shape

TARGET = PackingConfig(t_target_s=0.020)


def pack(
    *prefills: tuple[Prompt, int],
    model: Quadratic | None = None,
    config: PackingConfig = TARGET,
    decodes: int = 0,
    context: int = 0,
) -> dict[str, int]:
    packer = Packer(model or Quadratic(), config)
    packed = packer.pack(decodes, context, prefills, rho_of)
    chunks = {prompt.name: tokens for prompt, tokens in packed}
    assert len(chunks) == len(packed)  # no request twice
    return chunks


def test_the_largest_chunk_within_the_target() -> None:
    """10 us per token: 2,000 tokens fill 20 ms; 1,984 is the last multiple of 32 below."""
    assert pack((Prompt("a", 10_000), 0), model=Quadratic(pair_s=0.0)) == {"a": 1984}


def test_decodes_come_first() -> None:
    """64 decodes and their 10 M context tokens take 0.64 + 10 ms, which leaves 936 tokens."""
    model = Quadratic()
    model_chunk = pack((Prompt("a", 10_000), 0), model=model, decodes=64, context=10_000_000)
    assert model.asked[0].prefills == ()
    # 0.64 ms + 10 ms + 10 us n + 0.5 ns n^2 <= 20 ms: n <= 895.8
    assert model_chunk == {"a": 864}


def test_decodes_that_fill_the_target_leave_no_room() -> None:
    assert pack((Prompt("a", 10_000), 0), decodes=1, context=20_000_000) == {}


def test_prefills_in_order_until_the_budget_is_spent() -> None:
    """500 and 700 tokens take 12 ms, 25 granules take the next 8 ms; d finds no room."""
    model = Quadratic(pair_s=0.0)
    prompts = [Prompt(n, size) for n, size in (("a", 500), ("b", 700), ("c", 4000), ("d", 100))]
    chunks = pack(*((p, 0) for p in prompts), model=model)
    assert chunks == {"a": 500, "b": 700, "c": 800}
    assert list(chunks) == ["a", "b", "c"]


def test_one_that_does_not_fit_is_passed_over() -> None:
    """32 tokens on top of 250,000 take 8.3 ms; after a, 4 ms are left, enough for c."""
    model = Quadratic()
    chunks = pack((Prompt("a", 1500), 0), (Prompt("b", 300_000), 250_000), (Prompt("c", 100), 0))
    assert chunks == {"a": 1500, "c": 100}
    assert model.pass_s(shape([(Prompt("b", 0), 32)], {"b": 250_000})) > 0.0089


def test_the_batch_counts_as_full_after_max_skipped_misses() -> None:
    stuck = [(Prompt(f"s{i}", 260_000), 250_000) for i in range(3)]
    prefills = [(Prompt("a", 1500), 0), *stuck, (Prompt("c", 100), 0)]
    assert "c" in pack(*prefills, config=replace(TARGET, max_skipped=3))
    assert "c" not in pack(*prefills, config=replace(TARGET, max_skipped=2))


def test_chunks_shrink_as_history_grows_and_iterations_stay_level() -> None:
    """Mnemosyne section 4.2: large chunks first, progressively smaller ones."""
    model, done, sizes = Quadratic(), 0, []
    prompt = Prompt("a", 200_000)
    while done < prompt.prompt_tokens:
        (tokens,) = pack((prompt, done), model=model).values()
        sizes.append(tokens)
        seconds = model.pass_s(shape([(prompt, tokens)], {"a": done}))
        granule_s = 32 * (1e-5 + 1e-9 * (done + tokens + 32))
        assert 0.020 - granule_s < seconds <= 0.020 or done + tokens == 200_000
        done += tokens
    assert sum(sizes) == 200_000
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 15 * sizes[-2]


def test_the_last_chunk_is_what_is_left() -> None:
    assert pack((Prompt("a", 1007), 1000)) == {"a": 7}


def test_the_largest_chunk_is_capped() -> None:
    config = replace(TARGET, max_chunk_tokens=256)
    assert pack((Prompt("a", 10_000), 0), config=config) == {"a": 256}


def test_max_batch_counts_decodes_and_chunks() -> None:
    prefills = [(Prompt(f"p{i}", 10), 0) for i in range(9)]
    config = replace(TARGET, max_batch=6)
    assert list(pack(*prefills, config=config, decodes=2)) == ["p0", "p1", "p2", "p3"]
    assert pack(*prefills, config=config, decodes=6) == {}


def test_a_target_below_the_smallest_chunk_still_makes_progress() -> None:
    """The head gets its smallest chunk however long it takes, unless decodes fill the target."""
    config = PackingConfig(t_target_s=1e-4)
    assert pack((Prompt("a", 5000), 0), (Prompt("b", 5), 0), config=config) == {"a": 32}
    assert pack((Prompt("b", 5), 0), config=config) == {"b": 5}
    assert pack((Prompt("a", 5000), 0), config=config, decodes=1) == {}


def test_a_history_too_long_for_the_target_advances_beside_others() -> None:
    """32 tokens after 1 M take 32 ms.

    At the head they run, late; after other requests they wait.
    """
    late, small = (Prompt("late", 2_000_000), 1_000_000), (Prompt("small", 100), 0)
    assert pack(late, small, decodes=8, context=8000) == {"late": 32}
    assert pack(small, late, decodes=8, context=8000) == {"small": 100}
    assert pack(late, decodes=1, context=20_000_000) == {}


def test_it_still_yields_its_slack_when_somebody_takes_it() -> None:
    eager, small = Prompt("eager", 2_000_000, rho=0.1), (Prompt("small", 100), 0)
    assert pack((eager, 1_000_000), small, decodes=8, context=8000) == {"small": 100}
    stuck = Prompt("stuck", 700_000), 250_000
    config = replace(TARGET, t_target_s=0.005, long_kv_tokens=500_000)
    assert pack((eager, 1_000_000), stuck, config=config) == {"eager": 32}


def test_nothing_to_prefill() -> None:
    model = Quadratic()
    assert pack(model=model, decodes=3, context=3000) == {}
    assert model.asked == []


def test_one_prefill_at_a_time() -> None:
    """LARS without multi-prefill batching (section 6.4)."""
    prefills = (Prompt("a", 500), 0), (Prompt("b", 500), 0)
    assert pack(*prefills, config=replace(TARGET, multi_prefill=False)) == {"a": 500}


def test_static_chunks() -> None:
    """Sarathi: so many tokens per iteration, a decode counting as one; nothing is predicted."""
    model = Quadratic()
    static = replace(TARGET, adaptive=False, fixed_chunk_tokens=512, multi_prefill=False)
    prefills = (Prompt("a", 700), 300), (Prompt("b", 5000), 0)
    assert pack(*prefills, model=model, config=static, decodes=12, context=10**9) == {"a": 400}
    assert pack(*prefills[1:], model=model, config=static, decodes=12) == {"b": 500}
    several = replace(static, multi_prefill=True)
    assert pack(*prefills, model=model, config=several, decodes=12) == {"a": 400, "b": 100}
    assert pack(*prefills, model=model, config=several, decodes=512) == {}
    assert model.asked == []


def test_the_search_asks_little() -> None:
    """A bracket of 256 sizes needs 9 predictions by halves; asked along the line, 3.4."""
    asked = []
    for history in range(0, 250_000, 1000):
        model = Quadratic()
        pack((Prompt("a", 1_000_000), history), model=model)
        asked.append(len(model.asked))
    assert max(asked) <= 7
    assert sum(asked) / len(asked) < 3.6


class Steps(Quadratic):
    """Predicts 1 ms up to 128 tokens, 4 ms up to `edge`, `beyond_s` from there on."""

    def __init__(self, edge: int, beyond_s: float) -> None:
        super().__init__()
        self.edge, self.beyond_s = edge, beyond_s

    def pass_s(self, batch: BatchShape) -> float:
        self.asked.append(batch)
        tokens = sum(n for n, _ in batch.prefills)
        return 0.001 if tokens <= 128 else 0.004 if tokens <= self.edge else self.beyond_s


@pytest.mark.parametrize("edge", [160, 3072, 6400])
@pytest.mark.parametrize("beyond_s", [0.021, 0.2, 2.0])
def test_a_predictor_with_steps_is_searched_right(edge: int, beyond_s: float) -> None:
    """GEMM tiles make latency jump. The search still finds the last size before the limit, and
    does not creep along a line that says nothing (by creeping: up to 135 predictions)."""
    model = Steps(edge, beyond_s)
    assert pack((Prompt("a", 10_000), 0), model=model) == {"a": edge}
    assert len(model.asked) <= 25


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("t_target_s", 0.0),
        ("t_target_s", float("inf")),
        ("rho_max", 1.0),
        ("rho_max", -0.1),
        ("granularity", 0),
        ("min_chunk_tokens", 0),
        ("min_chunk_tokens", 33),
        ("max_chunk_tokens", 31),
        ("max_chunk_tokens", 100),
        ("long_kv_tokens", 0),
        ("max_batch", 0),
        ("max_skipped", -1),
        ("fixed_chunk_tokens", 0),
    ],
)
def test_a_setting_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"packing\.{field} is {value}"):
        PackingConfig(**{"t_target_s": 0.02, field: value})


configs = st.builds(
    PackingConfig,
    t_target_s=st.floats(1e-3, 0.1),
    rho_max=st.floats(0.0, 0.9),
    min_chunk_tokens=st.sampled_from([16, 32, 64]),
    max_chunk_tokens=st.sampled_from([64, 512, 4096]),
    granularity=st.sampled_from([1, 16]),
    long_kv_tokens=st.just(50_000),
    max_batch=st.integers(1, 12),
    max_skipped=st.integers(0, 3),
    multi_prefill=st.booleans(),
)
sizes = st.tuples(st.integers(1, 5000), st.sampled_from([0, 0, 1000, 40_000, 60_000, 200_000]))
models = st.builds(
    Quadratic,
    floor_s=st.sampled_from([0.0, 1e-3, 5e-3]),
    token_s=st.sampled_from([1e-6, 1e-5, 1e-4]),
    pair_s=st.sampled_from([0.0, 1e-10, 1e-9]),
)


@given(
    configs,
    models,
    st.lists(st.tuples(sizes, st.floats(-1.0, 2.0)), max_size=8),
    st.integers(0, 8),
    st.integers(0, 10**7),
)
def test_properties_of_any_batch(
    config: PackingConfig,
    model: Quadratic,
    rows: list[tuple[tuple[int, int], float]],
    decodes: int,
    context: int,
) -> None:
    prefills = [
        (Prompt(f"p{i}", done + left, rho), done) for i, ((left, done), rho) in enumerate(rows)
    ]
    done = {prompt.name: tokens for prompt, tokens in prefills}
    context = context if decodes else 0
    packed = Packer(model, config).pack(decodes, context, prefills, rho_of)

    order = [int(prompt.name[1:]) for prompt, _ in packed]
    assert order == sorted(set(order))
    if packed:
        assert decodes + len(packed) <= config.max_batch
    assert sum(done[p.name] >= config.long_kv_tokens for p, _ in packed) <= 1
    if not config.multi_prefill:
        assert order in ([], [0])
    for prompt, tokens in packed:
        left = prompt.prompt_tokens - done[prompt.name]
        assert min(config.min_chunk_tokens, left) <= tokens <= min(config.max_chunk_tokens, left)
        assert tokens == left or tokens % config.granularity == 0

    seconds = model.pass_s(shape(packed, done, decodes, context))
    smallest = [(p, min(config.min_chunk_tokens, p.prompt_tokens - d)) for p, d in prefills[:1]]
    if packed and packed != smallest:
        assert seconds <= config.t_target_s
    decodes_s = model.pass_s(shape([], {}, decodes, context)) if decodes else 0.0
    if prefills and decodes < config.max_batch and decodes_s < config.t_target_s:
        assert packed  # progress


@given(configs, models, sizes, st.integers(0, 8), st.integers(0, 10**7))
def test_one_chunk_is_what_trying_every_size_finds(
    config: PackingConfig, model: Quadratic, size: tuple[int, int], decodes: int, context: int
) -> None:
    left, done = size
    prompt = Prompt("a", done + left)
    packed = Packer(model, config).pack(decodes, context, [(prompt, done)], rho_of)
    least, most = min(config.min_chunk_tokens, left), min(config.max_chunk_tokens, left)
    candidates = [*range(least, most, config.granularity), most]
    fitting = [
        n
        for n in candidates
        if model.pass_s(shape([(prompt, n)], {"a": done}, decodes, context)) <= config.t_target_s
    ]
    alone_s = model.pass_s(shape([], {}, decodes, context)) if decodes else 0.0
    if decodes >= config.max_batch or (decodes and alone_s >= config.t_target_s):
        assert packed == []
    elif fitting:
        assert packed == [(prompt, max(fitting))]
    else:
        assert packed == [(prompt, least)]
