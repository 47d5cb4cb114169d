"""Tests use what a class shows: none reads or replaces a private attribute of the tested code.

A private name begins with one underscore. A test file may use the private names that it defines.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent

#: Public by their documentation: the methods of named tuples, and a caller's frame.
PUBLIC = frozenset({"_replace", "_asdict", "_fields", "_make", "_getframe"})

#: Private names by file, with the reason.
ALLOWED = {
    # `check_integrity` is for damage that no public call can do.
    "engine/kv/test_pool.py": {"_references"},
    "transfer/push/test_handshake.py": {"_free"},
    # The module in C++ itself: its checks of arguments that `Cdsp` never gets wrong.
    "core/scheduler/planning/test_planners.py": {"_cdsp"},
    # Torch's only way to see all operations, and the name of one of them.
    "engine/kv/test_page_table.py": {"_python_dispatch", "_to_copy"},
    # The same, and torch's way to a tensor that stands for another.
    "support/fake_cuda.py": {
        *("_python_dispatch", "_pytree", "_schema", "_can_decompose"),
        *("_local_scalar_dense", "_unique2", "_to_copy"),
    },
    "support/fake_graphs.py": {"_pytree"},
    "support/fake_tensors.py": {"_pytree", "_make_wrapper_subclass"},
    # kopf and kmock show neither their handlers nor a hook before each request.
    "operator/run/test_handlers.py": {
        *("_watching", "_changing", "_spawning", "_indexing", "_webhooks", "_activities"),
    },
    "support/kube_emulator.py": {"_handle"},
    # asyncio's own way for those who write an event loop.
    "support/fleet_sim/processes.py": {"_set_running_loop"},
}

ACCESSORS = frozenset({"getattr", "setattr", "delattr", "hasattr", "object"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(tree: ast.AST) -> set[str]:
    """Returns the names that a file defines: functions, classes, variables, attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_self(node):
            found.add(node.attr)
    return found


def is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def used_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yields (line, name) of each attribute, of each name in an import, and of each attribute that
    is named by a string.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and not is_self(node):
            yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom):
            for name in (*(node.module or "").split("."), *(alias.name for alias in node.names)):
                yield node.lineno, name
        elif isinstance(node, ast.Import):
            for alias in node.names:
                yield from ((node.lineno, name) for name in alias.name.split("."))
        elif isinstance(node, ast.Call):
            function = node.func
            called = function.attr if isinstance(function, ast.Attribute) else ""
            called = function.id if isinstance(function, ast.Name) else called
            for argument in node.args[:2] if called in ACCESSORS else ():
                text = argument.values[-1] if isinstance(argument, ast.JoinedStr) else argument
                if isinstance(text, ast.Constant) and isinstance(text.value, str):
                    yield text.lineno, text.value.rpartition(".")[2]


def private_uses(path: Path) -> Iterator[str]:
    """Yields the places where a file uses a private name that is not its own."""
    tree = ast.parse(path.read_text())
    where = path.relative_to(TESTS).as_posix()
    allowed = PUBLIC | own_names(tree) | ALLOWED.get(where, set())
    for line, name in used_names(tree):
        if is_private(name) and name not in allowed:
            yield f"{where}:{line}: {name}"


def test_no_test_uses_a_private_name() -> None:
    found = [use for path in sorted(TESTS.rglob("*.py")) for use in private_uses(path)]
    assert not found, "\n".join(found)


def test_every_allowed_name_is_used() -> None:
    for where, names in ALLOWED.items():
        used = {name for _, name in used_names(ast.parse((TESTS / where).read_text()))}
        assert names <= used, f"{where} no longer uses {sorted(names - used)}"
