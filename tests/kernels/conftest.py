"""Fixtures of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millrace_kernels import cpu_backend, determinism
from millrace_kernels.determinism import Alike


@pytest.fixture(params=cpu_backend.instruction_sets())
def variant(request) -> Iterator[str]:
    """Uses each instruction set of the C++ kernels in turn."""
    with cpu_backend.instruction_set(request.param):
        yield request.param


@pytest.fixture
def threads() -> Iterator[None]:
    """Lets a test set torch's thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Gives a row the same bits in any pass."""
    with determinism.switched(Alike.PASSES):
        yield
