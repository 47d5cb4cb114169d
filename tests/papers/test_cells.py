"""The kept parts of an experiment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.experiments.joined import cells, policies
from millrace.experiments.joined import common as joined
from millrace.experiments.joined.cells import Cells, Job


def noted(folder: str, value: int) -> list[int]:
    """Runs in another process."""
    (Path(folder) / f"ran-{value}").touch()
    return [value]


def jobs(folder: Path, digest: str = "one") -> dict[str, Job]:
    return {f"part {value}": Job(digest, noted, (str(folder), value)) for value in (1, 2)}


def ran(folder: Path) -> list[str]:
    names = sorted(file.name for file in folder.glob("ran-*"))
    for name in names:
        (folder / name).unlink()
    return names


def test_what_the_file_has_is_not_computed_again(tmp_path: Path) -> None:
    kept, texts = tmp_path / "kept.json", []
    first = {"part 1": jobs(tmp_path)["part 1"]}
    assert Cells(kept).fill(first, texts.append) == {"part 1": [1]}
    assert Cells(kept).fill(jobs(tmp_path), texts.append) == {"part 1": [1], "part 2": [2]}
    assert ran(tmp_path) == ["ran-1", "ran-2"]
    assert texts == ["1 of 1: part 1", "2 of 2: part 2"]
    assert Cells(kept).fill(jobs(tmp_path), texts.append) == {"part 1": [1], "part 2": [2]}
    assert not ran(tmp_path)
    assert Cells(kept).fill(jobs(tmp_path, "other"), texts.append)["part 2"] == [2]
    assert ran(tmp_path) == ["ran-1", "ran-2"]
    assert list(json.loads(kept.read_text())["parts"]) == ["part 1", "part 2"]


@pytest.mark.parametrize("text", ["", "[]", '{"parts": 1}', '{"parts": {"part 1": {"result": 1}}}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "kept.json").write_text(text)
    with pytest.raises(ConfigError, match=r"--resume .*kept\.json"):
        Cells(tmp_path / "kept.json")


def test_a_path_without_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--resume .*none"):
        Cells(tmp_path / "none" / "kept.json")
    assert not ran(tmp_path)


def test_a_digest_knows_the_code_and_the_traffic() -> None:
    case = joined.further_cases(quick=True)["agents"]
    digests = {
        policies.digest_of(one, policy)
        for policy in ("millrace", "s_edf")
        for one in (case, policies.drawn_by(case, 1))
    }
    assert len(digests) == 4
    whole = cells.code(("core/priority",))
    assert whole != cells.code(("core/priority",), "core/priority/millrace")
    assert whole == cells.code(("core/priority",), "core/other")
