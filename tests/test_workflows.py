"""The GitHub workflows: what they name exists, and they name no registry."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = {
    path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()
}
ROLES = ["proxy", "scheduler", "operator", "prefill", "decode", "kvp"]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def jobs() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, workflow in WORKFLOWS.items():
        for job, content in workflow["jobs"].items():
            yield f"{name}.{job}", content


def commands() -> list[str]:
    """Every line that a step runs."""
    return [
        line.strip()
        for _, job in jobs()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text()
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))


def test_the_workflows_are_ci_and_release() -> None:
    assert WORKFLOWS.keys() == {"ci", "release"}
    # YAML 1.1 reads `on` as true.
    assert WORKFLOWS["release"][True]["push"] == {"tags": ["v*"]}


def test_every_make_target_that_a_workflow_runs_exists() -> None:
    run = {t for line in commands() for t in re.findall(r"\bmake (?:-s )?([a-z][a-z-]*)", line)}
    assert run and run <= make_targets()


def test_every_path_that_a_workflow_names_exists() -> None:
    programs = {line.split()[0] for line in commands() if line.startswith(".")}
    files = {step.get("with", {}).get("file") for _, job in jobs() for step in job["steps"]}
    named = programs | files - {None}
    assert named == {".ci/run", "services/Dockerfile"}
    assert all((ROOT / path).is_file() for path in named)


@pytest.mark.parametrize(("name", "job"), list(jobs()), ids=[name for name, _ in jobs()])
def test_a_job_has_a_limit_known_needs_and_pinned_actions(name: str, job: dict[str, Any]) -> None:
    assert job["timeout-minutes"] <= 180
    needs = job.get("needs", [])
    known = WORKFLOWS[name.partition(".")[0]]["jobs"]
    assert {needs} <= known.keys() if isinstance(needs, str) else set(needs) <= known.keys()
    for step in job["steps"]:
        assert ("uses" in step) != ("run" in step)
        assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+", step.get("uses", "a/b@v1"))
    texts = [*re.findall(r"needs\.(\w+)\.", str(job))]
    assert set(texts) <= ({needs} if isinstance(needs, str) else set(needs))


def test_images_are_those_of_the_dockerfile_with_its_arguments() -> None:
    job = WORKFLOWS["release"]["jobs"]["images"]
    assert job["strategy"]["matrix"]["role"] == ROLES
    dockerfile = (ROOT / "services/Dockerfile").read_text()
    assert all(re.search(rf"^FROM \w+ AS {role}$", dockerfile, re.MULTILINE) for role in ROLES)
    (build,) = [s["with"] for s in job["steps"] if s.get("id") == "build"]
    arguments = dict(line.split("=", 1) for line in build["build-args"].split("\n") if line)
    declared = set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    assert arguments.keys() == declared - {"PYTHON_IMAGE"}
    extras = set(re.findall(r"'([a-z,]+)'", arguments["ENGINE_EXTRAS"])) - {"cpu"}
    assert {e for extra in extras for e in extra.split(",")} <= PYPROJECT["project"][
        "optional-dependencies"
    ].keys()
    assert build["sbom"] is True and build["provenance"] == "mode=max"
    assert build["platforms"] == "linux/amd64,linux/arm64"


def test_wheels_are_made_for_every_python_that_is_supported() -> None:
    required = PYPROJECT["project"]["requires-python"]
    lowest, end = (int(minor) for minor in re.fullmatch(r">=3\.(\d+),<3\.(\d+)", required).groups())
    settings = PYPROJECT["tool"]["cibuildwheel"]
    assert settings["build"] == [f"cp3{minor}-*" for minor in range(lowest, end)]
    assert settings["environment"]["MILLRACE_REQUIRE_CPP"] == "1"
    runners = WORKFLOWS["release"]["jobs"]["wheels"]["strategy"]["matrix"]["runner"]
    assert len({runner.endswith("-arm") for runner in runners}) == 2


def test_no_workflow_and_no_makefile_names_a_registry() -> None:
    files = [
        *(ROOT / ".github/workflows").iterdir(),
        ROOT / "Makefile",
        ROOT / "services/images.sh",
    ]
    for path in files:
        text = path.read_text()
        assert not re.search(r"\b[\w-]+(\.[\w-]+)*\.(io|com|org|dev|ai)\b", text), path
