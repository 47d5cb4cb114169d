"""Profiles from tables of prefill times that were measured elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.cost.latency import Latency
from millrace.core.cost.operators import BatchShape
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.profiles import load_profile
from millrace.profiles.own_table import fitted, read_table

LIKE = load_profile("llama3-8b-a100-tp1")
#: Two degrees; c is not 2 d.
LAWS = {
    1: Latency(a=0.02, b=1e-4, c=7e-9, d=3e-9),
    4: Latency(a=0.05, b=3e-5, c=2e-9, d=8e-10),
}
LENGTHS = (512, 2048, 8192, 32768)
HISTORIES = (4096, 65536)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def table(path: Path) -> Path:
    lines = ["sp,history,tokens,seconds"]
    for sp, law in LAWS.items():
        for tokens in LENGTHS:
            lines += [
                f"{sp},{history},{tokens},{law.chunk_s(tokens, history)}"
                for history in (0, *HISTORIES)
            ]
    return write(path / "own.csv", "\n".join(lines) + "\n")


def test_the_fit_finds_the_law_of_every_degree(tmp_path: Path) -> None:
    found = fitted(read_table(table(tmp_path)), LIKE, "own")
    assert found.measured_sp == (4,)
    for sp, law in LAWS.items():
        one = found.prefill.by_sp[sp]
        assert (one.a, one.b) == pytest.approx((law.a, law.b), rel=1e-3)
        assert (one.c, one.d) == pytest.approx((law.c, law.d), rel=1e-3)
        assert found.errors[f"sp{sp}_history"] < 1e-4
        for tokens in LENGTHS:
            assert found.prefill.chunk_s(tokens, 0, sp) == pytest.approx(
                law.chunk_s(tokens), rel=1e-5
            )
    assert Profile.from_json(found.to_json()) == found


def test_degrees_that_are_not_in_the_table_follow_from_one_instance(tmp_path: Path) -> None:
    found = fitted(read_table(table(tmp_path)), LIKE, "own").prefill
    long = 32768
    assert found.degrees == LIKE.prefill.degrees
    assert found.chunk_s(long, 0, 2) == pytest.approx(found.chunk_s(long) / 2, rel=0.1)


def test_a_table_without_histories_takes_c_from_flop_counting(tmp_path: Path) -> None:
    lines = (f"{tokens},{LAWS[1].chunk_s(tokens)}" for tokens in LENGTHS)
    path = write(tmp_path / "own.csv", "\n".join(["tokens,seconds", *lines]))
    one = fitted(read_table(path), LIKE, "own").prefill.by_sp[1]
    assert one.c == pytest.approx(2 * one.d)


def test_operators_become_slower_with_the_device(tmp_path: Path) -> None:
    """Passes, batches and decode steps are as much slower as the whole prompts."""
    shapes = [BatchShape(prefills=((tokens, 0),)) for tokens in LENGTHS]
    slow = [f"{s.prefills[0][0]},{2 * LIKE.operators.pass_s(s)}" for s in shapes]
    path = write(tmp_path / "own.csv", "\n".join(["tokens,seconds", *slow]))
    found = fitted(read_table(path), LIKE, "own").operators
    for shape in (*shapes, BatchShape(prefills=((700, 9000),), decodes=5)):
        assert found.pass_s(shape) == pytest.approx(2 * LIKE.operators.pass_s(shape), rel=1e-3)
    assert found.decode_step_s(8, 9000) == pytest.approx(
        2 * LIKE.operators.decode_step_s(8, 9000), rel=1e-3
    )


def test_of_equal_cases_the_median_counts(tmp_path: Path) -> None:
    path = write(tmp_path / "own.csv", "tokens,seconds\n100,1\n100,9\n100,2\n200,3\n")
    assert read_table(path) == {1: {(100, 0): 2.0, (200, 0): 3.0}}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "line 1: the columns are none"),
        ("tokens,ms\n1,1\n", "line 1: the columns are tokens, ms; they must be tokens, seconds"),
        ("tokens,seconds\n5,soon\n", "line 2: seconds is 'soon'; it must be a number above 0"),
        ("tokens,seconds\n5,0\n", "line 2: seconds is '0'; it must be a number above 0"),
        ("tokens,seconds\n5,1\n6\n", "line 3: seconds is None; it must be a number above 0"),
        ("tokens,seconds\n0,1\n", "line 2: tokens is '0'; it must be a whole number from 1 on"),
        ("tokens,seconds,sp\n5,1,1.5\n", "line 2: sp is '1.5'; it must be a whole number from 1"),
        ("tokens,seconds,history\n5,1,-1\n", "line 2: history is '-1'; it must be a whole number"),
        ("tokens,seconds,sp\n5,1,2\n", "sp 1 has no row without history"),
        ("tokens,seconds,history,sp\n5,1,0,1\n5,1,7,2\n", "sp 2 has no row without history"),
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path / "own.csv", text)
    with pytest.raises(ConfigError, match=rf"table {path}(, |: ){said}"):
        read_table(path)


def test_a_missing_table_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: No such file"):
        read_table(tmp_path / "none.csv")
