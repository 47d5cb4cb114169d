"""The images: what each kind of process imports, the Dockerfile, what light stages run."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from support.deadlines import HANG_S

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

#: Runs in a process of its own: the modules of argv[1] can't be had, those of argv[2] are imported.
IMPORT_WITHOUT = """
import importlib, sys

class Absent:
    def __init__(self, names):
        self.names = names

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names or name in self.names:
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
        (
            (),
            "millrace.cli.main,millrace.proxy.main,millrace.proxy.workers,"
            "millrace.telemetry.tracing.tracer,millrace.scheduler.main,"
            "millrace.cli.commands.policy,millrace.cli.commands.config,"
            "millrace.wire.clients.scheduler_client,millrace.core.autoscale.rules,"
            "millrace.core.autoscale.load",
        ),
        (("engine",), "millrace.cli.main,millrace.prefill.main,millrace.decode.main"),
        (
            ("local",),
            "millrace.cli.main,millrace.local.up,"
            "millrace.cli.commands.chat,millrace.cli.commands.demo",
        ),
    ],
    ids=["proxy, scheduler, operator's client", "engine", "local"],
)
def test_a_process_imports_only_what_its_image_has(extras: tuple[str, ...], modules: str) -> None:
    absent = absent_modules(*extras)
    assert "engine" in extras or {"torch", "nixl_cu13", "safetensors"} <= absent
    subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, ",".join(absent), modules],
        check=True,
        timeout=HANG_S,
    )


# ---- the Dockerfile ----------------------------------------------------------------------------


class Stage(NamedTuple):
    """One FROM and what follows it."""

    base: str
    lines: list[tuple[str, str]]  # instruction, arguments

    def last(self, instruction: str) -> str | None:
        found = [arguments for name, arguments in self.lines if name == instruction]
        return found[-1] if found else None


def read_dockerfile() -> tuple[dict[str, str], dict[str, Stage]]:
    """Global ARGs, and stages by name, in order."""
    text = (ROOT / "services/Dockerfile").read_text()
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    arguments: dict[str, str] = {}
    stages: dict[str, Stage] = {}
    for line in re.sub(r"\\\n", " ", "\n".join(kept)).splitlines():
        instruction, _, rest = line.strip().partition(" ")
        if instruction == "FROM":
            base, _, name = rest.partition(" AS ")
            stages[name.strip()] = Stage(base.strip(), [])
        elif instruction == "ARG" and not stages:
            name, _, value = rest.partition("=")
            arguments[name] = value
        elif instruction:
            next(reversed(stages.values())).lines.append((instruction, rest.strip()))
    return arguments, stages


ARGUMENTS, STAGES = read_dockerfile()
ROLES = ("proxy", "scheduler", "operator", "prefill", "decode", "kvp")


def inherited(role: str, instruction: str) -> str | None:
    """What holds in an image: the last in its chain of stages."""
    stage = STAGES[role]
    while (found := stage.last(instruction)) is None and stage.base in STAGES:
        stage = STAGES[stage.base]
    return found


def test_every_role_has_a_target() -> None:
    assert set(ROLES) <= set(STAGES)


def test_bases_are_pinned_and_named_without_a_registry() -> None:
    assert re.fullmatch(r"python:3\.11\.\d+-slim-bookworm", ARGUMENTS["PYTHON_IMAGE"])
    bases = {stage.base for stage in STAGES.values()} - set(STAGES)
    assert bases == {"${PYTHON_IMAGE}"}


@pytest.mark.parametrize("role", ROLES)
def test_images_run_without_root_and_say_how_they_are(role: str) -> None:
    assert inherited(role, "USER") == "65532:65532"
    entry = "millrace-operator" if role == "operator" else "millrace"
    assert inherited(role, "ENTRYPOINT") == f'["{entry}"]'
    health = inherited(role, "HEALTHCHECK") or ""
    command = json.loads(health[health.index("[") :])
    compile(command[2], "HEALTHCHECK", "exec")
    port = "8080" if role == "proxy" else "9090"
    assert command[:2] == ["python", "-c"] and f":{port}/health" in command[2]
    assert port in (inherited(role, "EXPOSE") or "").split()


@pytest.mark.parametrize("role", ROLES)
def test_only_workers_get_the_engine(role: str) -> None:
    chain = [STAGES[role]]
    while chain[-1].base in STAGES:
        chain.append(STAGES[chain[-1].base])
    copied = {
        arguments.split()[0].removeprefix("--from=")
        for stage in chain
        for instruction, arguments in stage.lines
        if instruction == "COPY" and arguments.startswith("--from=")
    }
    worker = role in ("prefill", "decode", "kvp")
    expected = "engine" if worker else "operator" if role == "operator" else "light"
    assert copied == {f"{expected}-packages"}
    runs = [text for name, text in STAGES[f"{expected}-packages"].lines if name == "RUN"]
    extras = {"light": "${PROXY_EXTRAS}", "engine": "${ENGINE_EXTRAS}", "operator": "operator"}
    assert f"millrace[{extras[expected]}] @" in " ".join(runs)


def test_only_workers_install_extras_by_default() -> None:
    assert ("ARG", "PROXY_EXTRAS=") in STAGES["light-packages"].lines
    assert ("ARG", "ENGINE_EXTRAS=engine") in STAGES["engine-packages"].lines


def test_what_is_copied_is_in_the_context() -> None:
    """.dockerignore keeps all else out; what it lets in exists."""
    let_in = {
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for stage in STAGES.values()
        for instruction, arguments in stage.lines
        if instruction == "COPY" and not arguments.startswith("--from=")
        for source in arguments.split()[:-1]
    }
    assert copied == let_in
    assert all((ROOT / source).exists() for source in copied)


def test_the_operator_imports_nothing_that_its_image_uninstalls() -> None:
    runs = [text for name, text in STAGES["operator-packages"].lines if name == "RUN"]
    (removed,) = [text for text in runs if "uninstall" in text]
    names = removed.partition("--yes")[2].partition("&&")[0].split()
    assert set(map(canonicalize_name, names)) <= brought_by()  # else there is nothing to remove
    gone = {
        module
        for module, of in metadata.packages_distributions().items()
        if {canonicalize_name(name) for name in of} & set(map(canonicalize_name, names))
    }
    folders = removed.partition("rm -rf")[2].split()
    gone |= {folder.replace("/", ".") for folder in folders}
    assert {"numpy", "tokenizers", "huggingface_hub", "hf_xet", "kubernetes.aio.client.api"} <= gone
    modules = "millrace_operator.main,millrace_operator.environment,millrace_operator.run.operator"
    absent = ",".join(absent_modules("operator") | gone)
    subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT, absent, modules], check=True, timeout=HANG_S
    )


# ---- what the stages of the small images do ----------------------------------------------------


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs that the stage light-packages installs, with the operator's."""
    folder = tmp_path_factory.mktemp("light")
    pip = [sys.executable, "-m", "pip"]
    build = ["-C", f"build-dir={folder}/build"]
    command = [*pip, "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), *build, str(ROOT)]
    subprocess.run(command, check=True, timeout=900)
    (wheel,) = folder.glob("*.whl")
    programs = folder / "venv/bin"
    venv = [sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")]
    subprocess.run(venv, check=True, timeout=120)
    wanted = f"millrace[operator] @ file://{wheel}"
    install = [*pip, "--python", str(programs / "python"), "install", "-q", wanted]
    subprocess.run(install, check=True, timeout=900)
    return programs


@contextlib.contextmanager
def serving(program: Path, *arguments: str) -> Iterator[int]:
    """A service of the fresh environment; gives its port. It must end well when it is told to."""
    read_fd, write_fd = os.pipe()
    command = [str(program), *arguments, "--ready-fd", str(write_fd)]
    with subprocess.Popen(command, pass_fds=[write_fd], cwd="/") as process:
        os.close(write_fd)
        try:
            with os.fdopen(read_fd, "rb") as ready:
                yield json.loads(ready.readline())["port"]
        finally:
            process.terminate()
            assert process.wait(HANG_S) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_small_images_serve_without_torch(light: Path) -> None:
    absent = "import importlib.util as u; raise SystemExit(u.find_spec('torch') is not None)"
    subprocess.run([str(light / "python"), "-c", absent], check=True)
    millrace = light / "millrace"
    with serving(millrace, "scheduler", "--port", "0") as scheduler:
        model = ["--model", str(ROOT / "models/millrace-tiny")]
        at = ["--scheduler", f"127.0.0.1:{scheduler}", "--port", "0"]
        with serving(millrace, "proxy", *model, *at) as port:
            answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=HANG_S)
            assert [card["id"] for card in answer.json()["data"]] == ["millrace-tiny"]
    operator = [str(light / "millrace-operator"), "--help"]
    assert b"--" in subprocess.run(operator, check=True, capture_output=True).stdout
