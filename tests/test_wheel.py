"""The wheel: what is in it, the version, and what it does without the C++ modules."""

import json
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from millrace.local.up import missing_cpp
from millrace.version import version

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = ("millrace", "millrace_kernels", "millrace_operator")
NATIVE = {"millrace/core/scheduler/planning/_cdsp", "millrace_kernels/_cpu"}


def build_without_compiler(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`pip wheel` with compilers that fail, by the build tools that are installed here."""
    pip = [sys.executable, "-m", "pip", "wheel", "-v", "--no-deps", "--no-build-isolation"]
    place = ["--wheel-dir", str(folder), "-C", f"build-dir={folder}/build"]
    return subprocess.run(
        [*pip, *place, str(ROOT)],
        env={"PATH": sysconfig.get_path("scripts") + ":/usr/bin:/bin", "HOME": str(folder)}
        | {"CC": "/bin/false", "CXX": "/bin/false", **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that a machine without a compiler makes."""
    folder = tmp_path_factory.mktemp("wheel")
    built = build_without_compiler(folder)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "Millrace was installed without its C++ modules" in built.stdout + built.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_has_the_model_types_and_profiles_and_no_sources_of_c(portable: Path) -> None:
    assert portable.name == f"millrace-{version()}-py3-none-any.whl"
    names = set(zipfile.ZipFile(portable).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    model = ROOT / "models/millrace-tiny"
    assert {f"millrace/models/millrace-tiny/{file.name}" for file in model.iterdir()} <= names
    assert "millrace/proxy/board/page.html" in names
    profiles = (ROOT / "services/millrace/profiles").glob("*.json")
    assert {f"millrace/profiles/{file.name}" for file in profiles} <= names
    assert {Path(name).suffix for name in names} <= {
        *("", ".py", ".pyi", ".json", ".md", ".typed", ".txt", ".safetensors", ".html")
    }


def test_every_python_file_of_the_packages_is_in_the_wheel(portable: Path) -> None:
    folders = [ROOT / "services/millrace", ROOT / "operator/millrace_operator"]
    folders.append(ROOT / "kernels/millrace_kernels")
    wanted = {str(file.relative_to(top.parent)) for top in folders for file in top.rglob("*.py")}
    assert wanted <= set(zipfile.ZipFile(portable).namelist())


def test_an_install_with_a_compiler_has_both_cpp_modules() -> None:
    """What CMake installed here, editable or not, by the record that pip keeps."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    files = {str(file) for file in metadata.files("millrace") or ()}
    assert {name + suffix for name in NATIVE} <= files
    assert not missing_cpp()


def test_a_compiler_can_be_required(tmp_path: Path) -> None:
    built = build_without_compiler(tmp_path, MILLRACE_REQUIRE_CPP="1")
    assert built.returncode != 0 and not list(tmp_path.glob("*.whl"))
    assert "CMake configuration failed" in built.stdout + built.stderr


#: Runs without the site module, so that the editable install of the tests stays out: the wheel's
#: packages in argv[1], dependencies in argv[2].
WITHOUT_CPP = """
import json, sys, warnings
from array import array

sys.path[:0] = sys.argv[1:]
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import millrace_kernels.api
    from millrace.core.config import SchedulerConfig
    from millrace.core.cost.latency import Latency, SpLatency
    from millrace.core.scheduler.planning import PLANNERS, PlannerInputs
    from millrace.core.scheduler.planning.cdsp_reference import CdspReference

    inputs = PlannerInputs(
        latency=SpLatency(by_sp={sp: Latency(a=1e-3 * sp, b=1e-4 / sp) for sp in (1, 2, 4)}),
        nodes=(0, 0, 0, 0),
        config=SchedulerConfig(improvement_rate=0.1),
    )
    names = ("cdsp", "single_chunk", "esp")
    queue_s = array("d", [0.0, 1.0, 2.0, 3.0])
    plans = {name: PLANNERS[name](inputs).plan(50_000, queue_s) for name in names}
from millrace.shipped import SHIPPED_MODEL
from millrace.local.up import missing_cpp
from millrace_kernels import cpu_backend
print(json.dumps({
    "file": millrace_kernels.__file__,
    "native": cpu_backend.AVAILABLE,
    "warnings": [str(w.message) for w in caught if w.category is RuntimeWarning],
    "same plan": plans["cdsp"] == CdspReference(inputs).plan(50_000, queue_s),
    "chunks": len(plans["cdsp"].chunks),
    "missing": missing_cpp(),
    "model": (SHIPPED_MODEL / "model.safetensors").is_file(),
}))
"""


def test_without_the_cpp_modules_torch_computes_and_python_plans(
    portable: Path, tmp_path: Path
) -> None:
    zipfile.ZipFile(portable).extractall(tmp_path)
    command = [sys.executable, "-I", "-S", "-c", WITHOUT_CPP]
    paths = [str(tmp_path), sysconfig.get_path("purelib")]
    ended = subprocess.run([*command, *paths], capture_output=True, text=True, timeout=250)
    assert ended.returncode == 0, ended.stderr
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["file"].startswith(str(tmp_path)) and seen["native"] is False
    kernels = [text for text in seen["warnings"] if "CPU kernels in C++ are missing" in text]
    planner = [text for text in seen["warnings"] if "CDSP plans in Python" in text]
    assert len(kernels) == 1 and planner
    assert all("install" in text.lower() for text in kernels + planner)
    assert {name.replace(".", "/") for name in seen["missing"]} == NATIVE
    assert seen["same plan"] and seen["chunks"] > 1 and seen["model"]


# ---- one version -------------------------------------------------------------------------------


def test_the_version_stands_in_pyproject_and_all_else_agrees() -> None:
    assert version() == PYPROJECT["project"]["version"]
    chart = yaml.safe_load((ROOT / "charts/millrace/Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (version(), version())
    for path in ("services/Dockerfile", "Makefile", "README.md", "docs/guides/images.md"):
        assert version() not in (ROOT / path).read_text(), path


@pytest.mark.parametrize(
    "command",
    [[str(Path(sysconfig.get_path("scripts")) / "millrace")], [sys.executable, "-m", "millrace"]],
    ids=["millrace", "python -m millrace"],
)
def test_the_command_says_its_version(command: list[str]) -> None:
    said = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True)
    assert said.stdout == f"millrace {version()}\n"


def test_tests_build_with_the_tools_that_installs_build_with() -> None:
    assert set(PYPROJECT["build-system"]["requires"]) <= set(
        PYPROJECT["project"]["optional-dependencies"]["dev"]
    )
