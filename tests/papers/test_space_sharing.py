"""Space sharing between long and short prefills, Medha sections 4.2, 4.3 and Algorithm 2."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.instance.packing import Packer, PackingConfig
from support.packing import Prompt, Quadratic, rho_of, shape

#: Ten tokens a millisecond and chunks to the token, so that a budget can be read off a chunk.
EVEN = Quadratic(floor_s=0.0, token_s=1e-4, pair_s=0.0)


def pack(
    *prefills: tuple[Prompt, int], rho_max: float = 0.4, decodes: int = 0, model: Quadratic = EVEN
) -> dict[str, int]:
    config = PackingConfig(
        t_target_s=0.020,
        rho_max=rho_max,
        min_chunk_tokens=1,
        granularity=1,
        long_kv_tokens=100_000,
    )
    packed = Packer(model, config).pack(decodes, 0, prefills, rho_of)
    return {prompt.name: tokens for prompt, tokens in packed}


def long(name: str = "long", rho: float = 0.2) -> tuple[Prompt, int]:
    return Prompt(name, 1_000_000, rho), 500_000


def short(name: str = "short", tokens: int = 5000) -> tuple[Prompt, int]:
    return Prompt(name, tokens), 0


def test_the_papers_example() -> None:
    """ "a long prefill with 20% relative slack: it yields 20% of the budget, using 16ms of the
    20ms allocation. The remaining 4ms allows the packer to insert short prefills" """
    assert pack(long(rho=0.2), short()) == pytest.approx({"long": 160, "short": 40}, abs=1)


@pytest.mark.parametrize(("rho", "tokens"), [(0.0, 200), (-3.0, 200), (0.4, 120), (7.5, 120)])
def test_rho_is_held_between_0_and_rho_max(rho: float, tokens: int) -> None:
    assert pack(long(rho=rho), short())["long"] == pytest.approx(tokens, abs=1)


def test_the_cap_is_a_setting() -> None:
    """0.4 in the paper, 0.5 in its authors' code."""
    assert pack(long(rho=1.0), short(), rho_max=0.5)["long"] == pytest.approx(100, abs=1)
    assert pack(long(rho=1.0), short(), rho_max=0.0)["long"] == pytest.approx(200, abs=1)


def test_the_effective_budget_covers_what_is_in_the_batch_already() -> None:
    """t_budget = t_effective - t_current: 16 ms less 2 ms of decodes and 4 ms of a short chunk."""
    chunks = pack(short("first", 40), long(rho=0.2), short("last"), decodes=20)
    assert chunks == pytest.approx({"first": 40, "long": 100, "last": 40}, abs=1)


def test_a_long_prefill_gives_way_when_its_share_is_used_up() -> None:
    """Shorts ahead of it took 17 of its 16 ms: none is left, though the batch has 3 ms."""
    assert list(pack(short("first", 170), long(rho=0.2), short("last"))) == ["first", "last"]


def test_short_prefills_do_not_yield() -> None:
    eager = Prompt("eager", 5000, rho=1.0), 0
    assert pack(eager, short())["eager"] == pytest.approx(200, abs=1)


def test_a_long_prefill_with_nobody_behind_it_takes_the_whole_budget() -> None:
    assert pack(long(rho=1.0))["long"] == pytest.approx(200, abs=1)
    assert pack(long(rho=1.0), long("other"))["long"] == pytest.approx(200, abs=1)


def test_at_most_one_long_prefill_a_batch() -> None:
    chunks = pack(long("first"), long("second"), short(tokens=10))
    assert list(chunks) == ["first", "short"]


def test_long_is_a_matter_of_history() -> None:
    """A long prompt at its start consists of linear layers, like a short prompt."""
    fresh = Prompt("fresh", 1_000_000, rho=1.0), 99_999
    assert pack(fresh, short())["fresh"] == pytest.approx(200, abs=1)
    grown = Prompt("grown", 1_000_000, rho=1.0), 100_000
    assert pack(grown, short())["grown"] == pytest.approx(120, abs=1)


def test_complementary_chunks_share_an_iteration_nearly_for_free() -> None:
    """Section 4.2. Linear layers take 10 ms for up to 1,000 tokens, whose weights they read; a
    long prefill fills 20 ms by the attention of 99 tokens, and 800 tokens of a short one that is
    at its start join it for 0.1 ms."""
    model = Quadratic(floor_s=0.010, token_s=1e-5, pair_s=2e-10)
    alone = pack(long(), model=model)
    both = pack(long(rho=0.0), short(tokens=800), model=model)
    assert alone == {"long": 99}
    assert both == {"long": 99, "short": 800}
    done = {"long": 500_000, "short": 0}
    times = [
        model.pass_s(shape([(long(name)[0], n) for name, n in chunks.items()], done))
        for chunks in (alone, both)
    ]
    assert times[1] - times[0] < 1e-4


@given(
    st.floats(-1.0, 2.0),
    st.floats(0.0, 0.9),
    st.integers(0, 99),
    st.lists(st.integers(1, 300), min_size=1, max_size=4),
)
def test_the_stated_share_is_left_to_those_behind(
    rho: float, rho_max: float, decodes: int, tokens: list[int]
) -> None:
    """The long prefill and those before it end by (1 - rho) t_target."""
    shorts = [short(f"s{i}", n) for i, n in enumerate(tokens)]
    chunks = pack(long(rho=rho), *shorts, rho_max=rho_max, decodes=decodes)
    limit_s = 0.020 * (1.0 - min(rho_max, max(0.0, rho)))
    if "long" in chunks:
        only = shape([(long()[0], chunks["long"])], {"long": 500_000}, decodes)
        assert EVEN.pass_s(only) <= limit_s
        more = shape([(long()[0], chunks["long"] + 1)], {"long": 500_000}, decodes)
        assert EVEN.pass_s(more) > limit_s
    else:
        assert EVEN.pass_s(shape([(long()[0], 1)], {"long": 500_000}, decodes)) > limit_s
