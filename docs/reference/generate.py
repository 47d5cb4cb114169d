"""Writes the generated pages of docs/reference: `python docs/reference/generate.py`.

The command line, the settings, the chart's values, the custom resources and the metrics. From the
table of metrics it also writes the chart's dashboards and alerts. Each file has a test in
tests/docs that compares it with the code; `make docs` writes all files.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from docs.reference.metrics_in_code import ROLES, Metric, metrics
from docs.reference.monitoring import alerts, dashboards
from docs.reference.parameters import parameters_page
from typer.main import get_command

from millrace.cli import main as command_line
from millrace.cli.commands.config import as_markdown
from millrace.shipped import SHIPPED_MODEL
from millrace.telemetry.vllm_names import ALIASES
from millrace_operator.schema import API_VERSION
from millrace_operator.schema.crds import definitions

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
CHART = ROOT / "charts/millrace"

Schema = Mapping[str, Any]
WRITTEN = "`make docs` writes this page from {source}."


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
    for name, file in MONITORING.items():
        (CHART / name).write_text(file(metrics(ROOT)), encoding="utf-8")


def _table(head: str, rows: Iterable[tuple[str, ...]]) -> list[str]:
    columns = head.split(" | ")
    lines = [" | ".join(_cell(cell) for cell in row) for row in rows]
    return [f"| {head} |", f"|{'---|' * len(columns)}", *(f"| {line} |" for line in lines), ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _code(value: object) -> str:
    return f"`{value}`" if value != "" else ""


# ---- Command line --------------------------------------------------------------------------------

CLI_HEAD = """# Command line

{written}
`millrace COMMAND --help` prints the same. In names of options, `-s` are seconds and `-ms`
milliseconds; sizes are in bytes or tokens as the name says. Settings that `--config` and `--set`
take are in [configuration.md](configuration.md).
"""


def command_tree() -> Any:  # noqa: ANN401 - click's
    """Returns the command `millrace` with all that are below it."""
    command_line._add_benchmarks("")
    if not command_line.sim.registered_commands:
        importlib.import_module("millrace.cli.sim.command").register(command_line.sim)
    return get_command(command_line.app)


def cli() -> str:
    """docs/reference/cli.md."""
    root = command_tree()
    context = root.context_class(root, info_name="millrace")
    lines = [CLI_HEAD.format(written=WRITTEN.format(source="the commands' own options"))]
    return "\n".join([*lines, *_commands(root, context, "millrace")])


def _commands(group: Any, context: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - click's
    for name, command in sorted(group.commands.items()):
        if command.hidden:
            continue
        inner = command.context_class(command, info_name=name, parent=context)
        yield from (f"## {path} {name}", "", " ".join((command.help or "").split()), "")
        if hasattr(command, "commands"):
            yield from _commands(command, inner, f"{path} {name}")
            continue
        usage = " ".join(command.collect_usage_pieces(inner))
        yield from ("```", f"{path} {name} {usage}", "```", "")
        records = [parameter.get_help_record(inner) for parameter in command.params]
        rows = [(_code(first), _anywhere(said)) for first, said in filter(None, records)]
        yield from _table("option | meaning", rows)


def _anywhere(said: str) -> str:
    """The help of an option without the place where this machine has the shipped model."""
    return said.replace(f"[default: {SHIPPED_MODEL}]", "")


# ---- Chart values and custom resources -----------------------------------------------------------

VALUES_HEAD = """# Chart values

{written}
`helm show values charts/millrace` prints the file with its comments. An empty default means that
the default of the custom resource applies ([crds.md](crds.md)).
[kubernetes.md](../guides/kubernetes.md) says how the values work together.
"""

CRDS_HEAD = """# Custom resources

{written} All kinds are of group and version `{version}`.
`kubectl explain pg.spec.autoscaling` prints the same on a cluster.
[kubernetes.md](../guides/kubernetes.md#what-there-is) says which objects the chart makes, and which
the operator. `[]` after a name means each element of a list; `.*` means the value of each key.
"""


def values() -> str:
    """docs/reference/values.md."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    source = "`charts/millrace/values.schema.json` and `values.yaml`"
    lines = [VALUES_HEAD.format(written=WRITTEN.format(source=source))]
    for name, field in schema["properties"].items():
        if name != "global":  # Helm's own
            lines += [f"## {name}", "", field.get("description", ""), ""]
            default = defaults.get(name)
            rows = list(_fields(field, name, default)) or [_row(name, field, default)]
            lines += _table("value | type | default | meaning", rows)
    return "\n".join(lines)


def crds() -> str:
    """docs/reference/crds.md."""
    source = "`millrace_operator.schema`"
    written = WRITTEN.format(source=source)
    lines = [CRDS_HEAD.format(written=written, version=API_VERSION)]
    for crd in definitions():
        lines += _kind(crd["spec"])
    return "\n".join(lines)


def _kind(spec: Schema) -> Iterator[str]:
    names, version = spec["names"], spec["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    short = f"`{names['plural']}`, short `{names['shortNames'][0]}`"
    yield from (f"## {names['kind']}", "", f"{schema['description']} ({short})", "")
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    yield from (f"`kubectl get` shows: {', '.join(columns)}.", "")
    for part in ("spec", "status"):
        field = schema["properties"][part]
        yield from (f"### {names['kind']} {part}", "", field.get("description", ""), "")
        rows = _fields(field, "", field.get("default"))
        yield from _table("field | type | default | meaning", rows)
    rules = list(_rules(schema, names["kind"]))
    if rules:
        yield from (f"### Rules of a {names['kind']}", "")
        yield from ("The API server refuses an object that breaks a rule, with this message.", "")
        yield from (*(f"- {where}: {message}" for where, message in rules), "")


def _fields(schema: Schema, path: str, default: object) -> Iterator[tuple[str, ...]]:
    """(field, type, default, meaning) of every field below `schema`, in the schema's order."""
    for name, field in schema.get("properties", {}).items():
        inner = f"{path}.{name}" if path else name
        given = default.get(name) if isinstance(default, dict) else None
        yield _row(inner, field, field.get("default") if given is None else given)
        yield from _fields(field, inner, given)
    for key, mark in (("items", "[]"), ("additionalProperties", ".*")):
        if isinstance(part := schema.get(key), dict):
            yield from _fields(part, path + mark, None)


def _row(path: str, field: Schema, default: object) -> tuple[str, ...]:
    has_parts = bool(field.get("properties")) or default is None
    shown = "" if has_parts else _code(json.dumps(default, ensure_ascii=False))
    return _code(path), _type(field), shown, field.get("description", "")


def _type(field: Schema) -> str:
    if "enum" in field:
        return " or ".join(_code(choice) for choice in field["enum"])
    if field.get("x-kubernetes-int-or-string"):
        return "integer or string"
    named = field.get("type", "any")
    kind = " or ".join(named) if isinstance(named, list) else named
    if isinstance(items := field.get("items"), dict):
        kind = f"list of {_type(items)}"
    least, most = field.get("minimum"), field.get("maximum")
    if least is not None and most is not None:
        return f"{kind}, {least} to {most}"
    if least is not None:
        return f"{kind}, at least {least}"
    return kind if most is None else f"{kind}, at most {most}"


def _rules(schema: Schema, path: str) -> Iterator[tuple[str, str]]:
    """Where the API server refuses an object beyond types and ranges, and what it then says."""
    for one in schema.get("x-kubernetes-validations", ()):
        yield _code(path), one.get("message", one["rule"])
    for name, field in schema.get("properties", {}).items():
        yield from _rules(field, name if name == "spec" else f"{path}.{name}")
    if isinstance(items := schema.get("items"), dict):
        yield from _rules(items, f"{path}[]")


# ---- Metrics -------------------------------------------------------------------------------------

METRICS_HEAD = """# Metrics

{written}
[observability.md](../guides/observability.md#metrics) says where each process serves them, which
to look at, and how the ratios and the pools' signals are measured.

Names are `millrace_<area>_<what>_<unit>` in base units. A counter ends in `_total`. A histogram has
the series `_bucket`, `_sum` and `_count`. `ROLE` stands for {roles}.
"""

VLLM_HEAD = """## vLLM's names

With `telemetry.vllm_names=on` a process also exposes its metrics under these names of vLLM's, with
the labels `model_name` and `engine` (always 0). Histograms keep Millrace's buckets. The proxy has
all names but the last two, which decode and mixed instances have. A request counts as running once
it has a token, and as waiting before: Millrace places requests at once, so a wait before the
placement alone would say little.
"""

AREAS = {
    "proxy": "The proxy, on its HTTP port.",
    "scheduler": "The scheduler, on `telemetry.metrics_port`.",
    "prefill": "Prefill instances.",
    "decode": "Decode instances, and mixed instances.",
    "mixed": "Mixed instances, beside those of decode instances.",
    "kvp": "KVP workers, and instances that hold shards for others.",
    "kv": "The KV pool and the prefix cache of every instance.",
    "attention": "The attention of every instance.",
    "transfer": "The KV path of every instance.",
    "ROLE": "Every instance.",
    "trace": "The scheduler and every instance, when they trace.",
    "operator": "The operator.",
}


def metrics_page() -> str:
    """docs/reference/metrics.md."""
    roles = ", ".join(_code(role) for role in ROLES)
    source = "the registrations in the code"
    lines = [METRICS_HEAD.format(written=WRITTEN.format(source=source), roles=roles)]
    found = metrics(ROOT)
    by_area: dict[str, list[Metric]] = {area: [] for area in AREAS}
    for metric in found:
        by_area[metric.name.split("_")[1]].append(metric)
    for area, its in by_area.items():
        lines += [f"## millrace_{area}", "", AREAS[area], ""]
        rows = [(_code(m.name), m.kind, " ".join(map(_code, m.labels)), m.help) for m in its]
        lines += _table("metric | type | labels | meaning", rows)
    lines += [VLLM_HEAD]
    lines += _table("name | metric", ((_code(a.name), " ".join(map(_code, a.of))) for a in ALIASES))
    return "\n".join(lines)


PAGES: Mapping[str, Callable[[], str]] = {
    "cli.md": cli,
    "configuration.md": as_markdown,
    "values.md": values,
    "crds.md": crds,
    "metrics.md": metrics_page,
    "parameters.md": parameters_page,
}


def _every_metric(found: Sequence[Metric]) -> str:
    return dashboards.everything(found, AREAS)


#: Files of the chart that are made of the table of metrics.
MONITORING: Mapping[str, Callable[[Sequence[Metric]], str]] = {
    "dashboards/serving.json": dashboards.serving,
    "dashboards/operator.json": dashboards.operator,
    "dashboards/metrics.json": _every_metric,
    "templates/alerts.yaml": alerts.template,
}

if __name__ == "__main__":
    main()
