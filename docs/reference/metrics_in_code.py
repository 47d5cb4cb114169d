"""Finds every metric that the code registers, by reading its syntax.

A registration is a call of `Registry.counter`, `counter_function`, `gauge`, `gauge_function`,
`gauges_by` or `histogram` (`millrace.telemetry.metrics`). No service is started. A name or a help
text that is built in a way that `_text` does not know raises ValueError.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SOURCES = ("services/millrace", "operator/millrace_operator")
#: Names of `Role.name`, which stands in the names of two gauges.
ROLES = ("prefill", "decode", "mixed", "kvp")
KINDS = {
    "counter": "counter",
    "counter_function": "counter",
    "gauge": "gauge",
    "gauge_function": "gauge",
    "gauges_by": "gauge",
    "histogram": "histogram",
}

#: Values of the names that a piece of code can read.
Names = Mapping[str, ast.expr]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric as the code registers it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str


@cache
def metrics(root: Path) -> tuple[Metric, ...]:
    """All metrics, in the order of the files' paths and of the lines within a file.

    Reads the files at the first call only.
    """
    return tuple(
        metric
        for source in SOURCES
        for path in sorted((root / source).rglob("*.py"))
        if path.name != "metrics.py" or path.parent.name != "telemetry"
        for metric in _of_module(ast.parse(path.read_text(encoding="utf-8")))
    )


def _of_module(module: ast.Module) -> Iterator[Metric]:
    names: dict[str, ast.expr] = {}
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                names[name] = value
    yield from _of_block(module, names)


def _of_block(node: ast.AST, names: Names) -> Iterator[Metric]:
    """Walks in the order of the source; a loop over literals is walked once for each element."""
    if isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple | ast.Call):
        rounds = _elements(node.iter)
        if rounds and _registers(node):
            for element in rounds:
                bound = {**names, **_bind(node.target, element)}
                for statement in node.body:
                    yield from _of_block(statement, bound)
            return
    if isinstance(node, ast.Call) and _is_registration(node):
        yield from _registered(node, names)
    for child in ast.iter_child_nodes(node):
        yield from _of_block(child, names)


def _registers(node: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) and _is_registration(one) for one in ast.walk(node))


def _is_registration(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(attr=method, value=ast.Name(id=owner) | ast.Attribute(attr=owner)):
            return method in KINDS and owner.lstrip("_") == "registry"
    return False


def _registered(call: ast.Call, names: Names) -> Iterator[Metric]:
    assert isinstance(call.func, ast.Attribute)
    kind = KINDS[call.func.attr]
    if call.func.attr == "gauges_by":
        label, documented = call.args[:2]
        if not isinstance(documented, ast.DictComp):
            raise ValueError(f"line {call.lineno}: gauges_by takes a dict comprehension here")
        (loop,) = documented.generators
        for element in _elements(_resolved(loop.iter, names)):
            bound = {**names, **_bind(loop.target, element)}
            name, said = _text(documented.key, bound), _text(documented.value, bound)
            yield Metric(name, kind, (_text(label, names),), said)
        return
    labels = call.args[2] if len(call.args) > 2 else ast.Tuple([])
    if call.func.attr in ("counter_function", "gauge_function"):
        labels = ast.Tuple([])
    yield Metric(
        _text(call.args[0], names),
        kind,
        tuple(_text(label, names) for label in _elements(labels)),
        _text(call.args[1], names),
    )


def _elements(node: ast.expr) -> list[ast.expr]:
    """Elements of a literal tuple or list, or of `enumerate` over one; else none."""
    match node:
        case ast.Tuple(elts=elements) | ast.List(elts=elements):
            return elements
        case ast.Call(func=ast.Name(id="enumerate"), args=[inner]):
            numbered = enumerate(_elements(inner))
            return [ast.Tuple([ast.Constant(i), element]) for i, element in numbered]
    return []


def _bind(target: ast.expr, value: ast.expr) -> dict[str, ast.expr]:
    if isinstance(target, ast.Name):
        return {target.id: value}
    bound: dict[str, ast.expr] = {}
    for part, element in zip(_elements(target), _elements(value), strict=True):
        bound |= _bind(part, element)
    return bound


def _resolved(node: ast.expr, names: Names) -> ast.expr:
    while isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    return node


def _text(node: ast.expr, names: Names) -> str:
    """The text of a literal, of a name that stands for one, or of an f-string of such parts."""
    match _resolved(node, names):
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_text(part, names) for part in parts)
        case ast.FormattedValue(value=ast.Attribute(value=ast.Name(id="role"), attr="name")):
            return "ROLE"
        case ast.FormattedValue(value=value):
            return _text(value, names)
    raise ValueError(f"line {node.lineno}: no text that can be read: {ast.unparse(node)}")
