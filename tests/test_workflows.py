"""The GitHub workflows: what they name exists, and they name no registry."""

import os
import re
import subprocess
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
    read = set(re.findall(r"needs\.(\w+)\.outputs\.(\w+)", str(job)))
    assert {one for one, _ in read} <= ({needs} if isinstance(needs, str) else set(needs))
    assert all(output in known[one]["outputs"] for one, output in read)


def first_step(tag: str, *, folder: Path, **settings: str) -> tuple[int, dict[str, str], str]:
    """Runs the release's first step on a tag; returns its status, its outputs, and what it said."""
    (step,) = [s for s in WORKFLOWS["release"]["jobs"]["test"]["steps"] if s.get("id") == "version"]
    outputs = folder / "outputs"
    outputs.touch()
    given = {"GITHUB_REF_NAME": tag, "GITHUB_OUTPUT": str(outputs), "REGISTRY": "", **settings}
    ran = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        cwd=ROOT,
        env={**os.environ, **given},
        capture_output=True,
        text=True,
    )
    lines = outputs.read_text().splitlines()
    return ran.returncode, dict(line.split("=", 1) for line in lines), ran.stdout


def test_a_release_names_its_images_in_lower_case(tmp_path: Path) -> None:
    version = PYPROJECT["project"]["version"]
    owner = {"REGISTRY": "registry.test", "GITHUB_REPOSITORY_OWNER": "Some-Owner"}
    status, outputs, _ = first_step(f"v{version}", folder=tmp_path, **owner)
    assert (status, outputs) == (0, {"version": version, "images": "registry.test/some-owner"})
    assert outputs.keys() == WORKFLOWS["release"]["jobs"]["test"]["outputs"].keys()


@pytest.mark.parametrize(
    ("tag", "registry", "said"),
    [("v0.0.0", "registry.test", "the tag is v0.0.0"), ("", "", "set the repository variable")],
)
def test_a_wrong_tag_or_no_registry_ends_a_release(tmp_path, tag, registry, said) -> None:
    tag = tag or f"v{PYPROJECT['project']['version']}"
    owner = {"REGISTRY": registry, "GITHUB_REPOSITORY_OWNER": "owner"}
    status, outputs, stdout = first_step(tag, folder=tmp_path, **owner)
    assert (status, outputs) == (1, {}) and said in stdout


def test_all_artifacts_can_be_downloaded() -> None:
    """Records of builds are artifacts, too, which actions/download-artifact can't unpack."""
    release = WORKFLOWS["release"]["jobs"]
    steps = {
        name: [str(s.get("uses")).split("@")[0] for s in j["steps"]] for name, j in release.items()
    }
    assert "actions/download-artifact" in steps["release"]
    builds = [name for name, uses in steps.items() if "docker/build-push-action" in uses]
    assert builds == ["images"]
    assert release["images"]["env"]["DOCKER_BUILD_RECORD_UPLOAD"] is False


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


def test_weak_packages_end_a_release() -> None:
    """Of wheels before anything is built, of images before the chart and the release."""
    jobs_of = WORKFLOWS["release"]["jobs"]
    assert "make audit" in [step.get("run") for step in jobs_of["test"]["steps"]]
    steps = [str(step.get("uses")).split("@")[0] for step in jobs_of["images"]["steps"]]
    scan = steps.index("anchore/scan-action")
    assert scan > steps.index("docker/build-push-action")
    asked = jobs_of["images"]["steps"][scan]["with"]
    assert asked["fail-build"] is True and asked["severity-cutoff"] == "critical"
    assert asked["image"].endswith("@${{ steps.build.outputs.digest }}")
    assert "images" in jobs_of["chart"]["needs"] and "images" in jobs_of["release"]["needs"]


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
