"""The documents of docs/papers are what their commands write: equal commands give equal bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from millrace.experiments import EXPERIMENTS, load_experiment

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs" / "papers"

#: Seconds each on one core.
QUICK = (
    *("tetris-table1", "tetris-examples", "flowprefill-fig3", "mnemosyne-kvp"),
    *("mnemosyne-spp", "mnemosyne-batching", "mnemosyne-tradeoff"),
)
#: Up to some minutes each.
SLOW = (
    *("medha-chunking", "tetris-fig14", "flowprefill-rounds", "flowprefill-fig10"),
    *(
        "flowprefill-fig9",
        "flowprefill-fig11",
        "flowprefill-fig12",
        "flowprefill-fig14",
        "flowprefill-fig16",
    ),
)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_a_document_is_what_its_command_writes(name: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    load_experiment(name).run(Console(quiet=True), found, None, False)
    assert found.read_bytes() == (DOCUMENTS / f"{name}.json").read_bytes()


def test_every_document_has_its_experiment() -> None:
    assert {path.stem for path in DOCUMENTS.glob("*.json")} <= EXPERIMENTS.keys()
    assert set(QUICK) | set(SLOW) <= EXPERIMENTS.keys()
