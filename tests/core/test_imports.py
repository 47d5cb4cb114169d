"""core needs no library; import-linter says which parts of Millrace it may import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import millrace.core

FOLDER = Path(millrace.core.__file__).parent


def imported(path: Path) -> Iterator[str]:
    """Yields the packages that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def test_core_needs_no_library() -> None:
    others = {
        f"{path.relative_to(FOLDER)}: {name}"
        for path in FOLDER.rglob("*.py")
        for name in imported(path)
        if name != "millrace" and name not in sys.stdlib_module_names
    }
    assert len(list(FOLDER.rglob("*.py"))) > 50
    assert not others


def test_a_library_is_found(tmp_path) -> None:
    module = tmp_path / "module.py"
    module.write_text("def f():\n    import numpy.linalg\n    from json import dumps\n")
    assert list(imported(module)) == ["numpy", "json"]
