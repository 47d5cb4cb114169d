"""The tests mirror the code: a package's tests lie in the folder of its name."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
SERVICES = ROOT / "services" / "millrace"
OPERATOR = ROOT / "operator" / "millrace_operator"

#: Folders for what no single package has.
OTHERS = {
    "board": "the scheduler's page in a browser, from the machine's events to its pixels",
    "chart": "charts/",
    "clients": "other people's clients against a whole stack",
    "contract": "one contract for the real external system and the one in memory",
    "docs": "docs/",
    "e2e": "whole stacks",
    "faults": "whole stacks, every service of which is harmed",
    "envtest": "the operator on a Kubernetes cluster",
    "images": "the container images",
    "kernels": "kernels/",
    "models": "models/",
    "papers": "the papers' sentences, and their figures by `millrace.experiments`",
    "parity": "the simulator against live services",
}
#: Packages whose tests lie elsewhere.
ELSEWHERE = {"experiments": "papers"}


def package_of(folder: Path) -> Path:
    """Returns the code's folder that a folder of tests mirrors."""
    top, *below = folder.relative_to(TESTS).parts
    return OPERATOR.joinpath(*below) if top == "operator" else SERVICES.joinpath(top, *below)


def test_folders_have_the_names_of_packages() -> None:
    folders = {file.parent for file in TESTS.glob("*/**/test_*.py")}
    mirrors = {one for one in folders if one.relative_to(TESTS).parts[0] not in OTHERS}
    assert len(mirrors) > 60
    missing = {one for one in mirrors if not (package_of(one) / "__init__.py").is_file()}
    assert not missing, "these folders of tests have no package of their name"


@pytest.mark.parametrize(
    "package", sorted(file.parent.name for file in SERVICES.glob("*/__init__.py"))
)
def test_every_package_has_its_folder(package: str) -> None:
    assert list((TESTS / ELSEWHERE.get(package, package)).rglob("test_*.py"))


@pytest.mark.parametrize("folder", OTHERS)
def test_other_folders_are_there(folder: str) -> None:
    assert list((TESTS / folder).rglob("test_*.py"))
    assert not (SERVICES / folder / "__init__.py").exists()
