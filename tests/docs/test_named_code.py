"""A link to code whose text is a name leads to a file that defines the name."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md"))
#: [`RunQueue.orders`](../run_queue.py): the dotted name and the file.
NAMED = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\(([^)#\s]+\.py)\)")
WALK = ROOT / "docs/concepts/scheduler.md"


@cache
def _defined(path: Path) -> frozenset[str]:
    """Returns all functions, classes and variables that the file defines, without their scopes."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


@pytest.mark.parametrize("name", PAGES)
def test_the_file_defines_the_name(name: str) -> None:
    page = ROOT / name
    for names, link in NAMED.findall(page.read_text(encoding="utf-8")):
        if names == Path(link).name:
            continue  # the text is the file's name
        missing = set(names.split(".")) - _defined((page.parent / link).resolve())
        assert not missing, f"{name}: {link} does not define {', '.join(sorted(missing))}"


def test_the_scheduler_has_every_function_of_its_walk() -> None:
    core = ROOT / "services/millrace/core"
    files = [core / "request.py", core / "live_request.py", *core.glob("scheduler/**/*.py")]
    defined = frozenset().union(*(_defined(path) for path in files))
    told = set(re.findall(r"`(?:\w+\.)?(_\w+)`", WALK.read_text(encoding="utf-8")))
    assert told, "the walk names no function"
    assert told <= defined
