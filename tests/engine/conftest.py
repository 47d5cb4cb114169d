"""Staged models, and groups of ranks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from millrace.bench.common.random_model import write_random_llama
from millrace.engine.forward.recorded_step import RecordedStep
from millrace.engine.parallel.rank_group import RankGroup
from support.deadlines import HANG_S
from support.staged import FIVE_LAYERS, Staged


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a model whose layers can be split over two ranks."""
    folder = tmp_path_factory.mktemp("five-layers")
    write_random_llama(folder, FIVE_LAYERS)
    return folder


@pytest.fixture(scope="module")
def pairs() -> Iterator[Callable[[int], list[RankGroup]]]:
    """Returns so many groups of two ranks, the same groups for every test."""
    started: list[RankGroup] = []

    def first(count: int) -> list[RankGroup]:
        started.extend(RankGroup(2, timeout_s=2 * HANG_S) for _ in range(count - len(started)))
        return started[:count]

    yield first
    for group in started:
        group.close()
    assert not any(psutil.pid_exists(pid) for group in started for pid in group.pids)


@pytest.fixture
def staged(pairs: Callable[[int], list[RankGroup]]) -> Iterator[Callable[..., Staged]]:
    """Makes `Staged`s, with `ranks` of 2 in each stage where they are to be split."""
    made: list[Staged] = []
    split = 0

    def make(folder: Path, count: int, ranks: int = 1, **sizes: Any) -> Staged:
        nonlocal split
        groups: list[RankGroup] = []
        if ranks > 1:
            groups = pairs(split + count)[split:]
            split += count
        made.append(Staged(folder, count, groups=groups, **sizes))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Returns a list that grows with every decode step that runs from its recording."""
    steps: list[None] = []
    run = RecordedStep.run

    def counted(self: RecordedStep, *arguments: Any) -> Any:
        steps.append(None)
        return run(self, *arguments)

    monkeypatch.setattr(RecordedStep, "run", counted)
    return steps
