"""Chooses the build of NIXL that a process uses.

NIXL publishes one wheel per major version of CUDA, each with a module name of its own. To move
device memory, a process needs the wheel of torch's CUDA version. For host memory any wheel works.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from functools import cache
from types import ModuleType

from millrace.core.errors import TransferError

#: The modules by CUDA's major version; the first is taken where no version is known.
BUILDS = {13: "nixl_cu13", 12: "nixl_cu12"}


@dataclass(frozen=True, slots=True)
class Build:
    """A build of NIXL and torch's version of CUDA. `torch_cuda` is empty for a torch without
    CUDA.
    """

    module: str
    torch_cuda: str

    @property
    def wanted(self) -> str:
        """The module for torch's version of CUDA; empty where any module works."""
        major = int(self.torch_cuda.partition(".")[0] or 0)
        return BUILDS.get(major, f"nixl_cu{major}") if major else ""

    @property
    def fits(self) -> bool:
        """Returns whether this build can move device memory that torch allocates."""
        return self.wanted in ("", self.module)

    def __str__(self) -> str:
        cuda = f"for CUDA {self.torch_cuda}" if self.torch_cuda else "without CUDA"
        missing = "" if self.fits else f", for which {self.wanted} is needed and not installed"
        return f"{self.module} (torch is built {cuda}{missing})"


def choose(torch_cuda: str, installed: list[str]) -> Build:
    """Chooses the build for torch's version of CUDA, else any `installed` build. Raises
    TransferError.
    """
    if not installed:
        raise TransferError(f"NIXL is not installed: one of {', '.join(BUILDS.values())} is needed")
    fitting = Build(installed[0], torch_cuda).wanted
    return Build(fitting if fitting in installed else installed[0], torch_cuda)


@cache
def build() -> Build:
    """Returns the build of this process. Imports neither NIXL nor torch. Raises TransferError."""
    return choose(
        torch_cuda(), [name for name in BUILDS.values() if importlib.util.find_spec(name)]
    )


def nixl_api() -> ModuleType:
    """Returns NIXL's Python interface. Loads the library, which reads its environment."""
    return importlib.import_module(f"{build().module}._api")


def nixl_bindings() -> ModuleType:
    """Returns the bindings below NIXL's interface, with its errors."""
    return importlib.import_module(f"{build().module}._bindings")


def load_ucx() -> None:
    """Loads UCX into this process without opening anything: no context, no thread, no device."""
    api = nixl_api()
    api.nixl_agent("loads-ucx", api.nixl_agent_config(backends=[])).get_plugin_params("UCX")


def torch_cuda() -> str:
    """Returns torch's version of CUDA; empty without CUDA, or without torch.

    It is read from torch's version file: importing torch takes a second or more.
    """
    torch = importlib.util.find_spec("torch")
    places = (torch.submodule_search_locations if torch else None) or []
    for place in places:
        spec = importlib.util.spec_from_file_location("_torch_version", f"{place}/version.py")
        assert spec is not None and spec.loader is not None  # it has a path that ends in .py
        version = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(version)
        except OSError:
            continue
        return str(getattr(version, "cuda", None) or "")
    return ""
