"""The images: what each kind of process imports, the Dockerfile, what light stages run."""

import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Runs in a process of its own: the modules of argv[1] can't be had, those of argv[2] are imported.
IMPORT_WITHOUT = """
import importlib, sys

class Absent:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"{name} is not in this image", name=name)

sys.meta_path.insert(0, Absent(set(sys.argv[1].split(","))))
for module in sys.argv[2].split(","):
    importlib.import_module(module)
"""


def brought_by(*extras: str) -> set[str]:
    """Distributions that `pip install millrace[extras]` brings, as installed here."""
    wanted = [*PROJECT["dependencies"]]
    wanted += [line for extra in extras for line in PROJECT["optional-dependencies"][extra]]
    found: set[str] = set()
    queue = [(Requirement(line), "") for line in wanted]
    while queue:
        requirement, extra = queue.pop()
        name = canonicalize_name(requirement.name)
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        new = name not in found or requirement.extras
        found.add(name)
        if not new:
            continue
        try:
            needs = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # of a platform or an accelerator that is not here
            continue
        asked = requirement.extras or {""}
        queue += [(Requirement(line), one) for line in needs for one in asked]
    return found


def absent_modules(*extras: str) -> set[str]:
    """Top-level modules installed here that an image with those extras lacks."""
    present = brought_by(*extras) | {"millrace"}
    return {
        module
        for module, names in metadata.packages_distributions().items()
        if not {canonicalize_name(name) for name in names} & present
    }


@pytest.mark.parametrize(
    ("extras", "modules"),
    [
        ((), "millrace.cli,millrace.proxy.main,millrace.proxy.workers,millrace.telemetry.otlp"),
        ((), "millrace.cli,millrace.scheduler.main,millrace.policy,millrace.settings_page"),
        ((), "millrace.wire.scheduler_client,millrace.core.autoscale,millrace.core.load"),
        (("engine",), "millrace.cli,millrace.prefill.main,millrace.decode.main"),
        (("local",), "millrace.cli,millrace.up,millrace.chat,millrace.demo"),
    ],
    ids=["proxy", "scheduler", "operator's client", "engine", "local"],
)
def test_a_process_imports_only_what_its_image_has(extras: tuple[str, ...], modules: str) -> None:
    absent = absent_modules(*extras)
    assert "engine" in extras or {"torch", "nixl_cu12", "safetensors"} <= absent
    subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, ",".join(absent), modules], check=True, timeout=60
    )
