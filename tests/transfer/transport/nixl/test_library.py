"""The choice of NIXL's build for a torch, and the registration of memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from millrace.core.errors import TransferError
from millrace.transfer.transport.device_memory import check_registers
from millrace.transfer.transport.nixl.library import BUILDS, build, choose
from millrace.transfer.transport.regions import Memory

BOTH = list(BUILDS.values())


@pytest.mark.parametrize(
    ("cuda", "installed", "module", "fits"),
    [
        ("12.8", BOTH, "nixl_cu12", True),
        ("13.0", BOTH, "nixl_cu13", True),
        ("", BOTH, "nixl_cu13", True),
        ("", ["nixl_cu12"], "nixl_cu12", True),
        ("13.0", ["nixl_cu12"], "nixl_cu12", False),
        ("12.8", ["nixl_cu13"], "nixl_cu13", False),
        ("14.1", BOTH, "nixl_cu13", False),
    ],
)
def test_the_build_is_the_one_for_torchs_cuda(cuda, installed, module, fits) -> None:
    chosen = choose(cuda, installed)
    assert (chosen.module, chosen.fits) == (module, fits)


def test_what_is_said_of_it() -> None:
    assert str(choose("12.8", BOTH)) == "nixl_cu12 (torch is built for CUDA 12.8)"
    assert str(choose("", BOTH)) == "nixl_cu13 (torch is built without CUDA)"
    assert str(choose("13.0", ["nixl_cu12"])) == (
        "nixl_cu12 (torch is built for CUDA 13.0, for which nixl_cu13 is needed and not installed)"
    )
    with pytest.raises(TransferError, match="not installed: one of nixl_cu13, nixl_cu12 is needed"):
        choose("13.0", [])


def test_torchs_cuda_is_known_without_its_import() -> None:
    assert build().torch_cuda == (torch.version.cuda or "")
    script = (
        "import sys; from millrace.transfer.transport.nixl.library import build; build(); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_memory_of_the_host_is_taken_and_memory_that_is_no_devices_is_refused() -> None:
    buffer = np.zeros(4096, dtype=np.uint8)
    assert check_registers("host", Memory.of_array(buffer)) == (
        f"NIXL is {build()}; KV is in host memory"
    )
    # UCX sees that this is the host's: as on a machine where UCX has no CUDA.
    wrong = Memory(buffer.ctypes.data, buffer.nbytes, device=0)
    with pytest.raises(TransferError, match=r"memory of cuda:0 can't be .*; NIXL is nixl_cu1\d"):
        check_registers("device", wrong)


@pytest.mark.gpu
def test_a_devices_memory_is_taken() -> None:
    tensor = torch.zeros(4096, dtype=torch.uint8, device="cuda")
    assert "memory of cuda:0 can be registered" in check_registers(
        "device", Memory.of_tensor(tensor)
    )
