"""Files and names of the code that pages mention exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]
PAGES = sorted(str(page.relative_to(ROOT)) for page in WRITTEN)
#: [`RunQueue.orders`](../run_queue.py): the dotted name and the file.
NAMED = re.compile(r"\[`([A-Za-z_][\w.]*)`\]\(([^)#\s]+\.py)\)")
FENCE = re.compile(r"(?ms)^ *```.*?^ *```$")
#: `core/priority/edf.py`, below the repository or the package; with * for several files.
FILE = re.compile(r"`(([a-z]\w*)/[\w./*-]*(?:/|\.[a-z]+))`")
#: The example of CONTRIBUTING, and folders that commands make.
MADE = re.compile(r"srpt\.py$|NAME|DEVICE|^build/")
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
def test_the_files_that_a_page_mentions_exist(name: str) -> None:
    text = FENCE.sub("", (ROOT / name).read_text(encoding="utf-8"))
    said = [one for one in FILE.findall(text) if not MADE.search(one[0])]
    bases = (ROOT, ROOT / "services/millrace")
    ours = [(base, path) for path, first in said for base in bases if (base / first).is_dir()]
    found = {path for base, path in ours if any(base.glob(path.rstrip("/")))}
    assert not {path for _, path in ours} - found


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
