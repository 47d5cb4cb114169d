"""The chart as Helm's own engine renders it, read back as objects.

`python tests/support/chart.py` writes the golden snapshot, the README's table and the users of
Redis again.
"""

import functools
import json
import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

from millrace.core.config import StoreConfig
from millrace.state.redis.access import RIGHTS, acl_file

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/millrace"
GOLDEN = ROOT / "tests/chart/golden/minimal.yaml"
PROFILES = tuple(
    sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
)
README = CHART / "README.md"
VALUES_INTRO = """\
`values.yaml` explains each value further. A default that is empty here is the CRDs' own:
`kubectl explain modelservice.spec --recursive` shows it. `python tests/support/chart.py`
makes this table of `values.schema.json`.
"""

#: The users of the chart's Redis; in the place of each digest is its service's name.
USERS = CHART / "files/redis-users.acl"

#: The API server that objects are checked for.
NEWEST = "1.36"

Object = dict[str, Any]


def values_of(profile: str) -> Object:
    """The values of a profile under ci/."""
    return yaml.safe_load((CHART / f"ci/{profile}-values.yaml").read_text())


def render(values: Mapping[str, Any], **options: Any) -> dict[str, str]:
    """Text by the template's file name. Raises helm's errors for values that it refuses."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(dict(values), **{"name": "millrace", "namespace": "llm", **options})
    return {name.removeprefix("millrace/templates/"): text for name, text in files.items()}


def objects(values: Mapping[str, Any], **options: Any) -> list[Object]:
    """All objects of a release, hooks included."""
    return [
        document
        for name, text in sorted(render(values, **options).items())
        if name.endswith(".yaml")
        for document in yaml.load_all(text, Loader=yaml.CSafeLoader)
        if document
    ]


@functools.cache
def profile(name: str) -> list[Object]:
    """All objects of a profile. Leave them as they are."""
    return objects(values_of(name))


def find(found: list[Object], kind: str, name: str) -> Object:
    """The one object of that kind and name."""
    (match,) = [o for o in found if o["kind"] == kind and o["metadata"]["name"] == name]
    return match


def snapshot() -> str:
    """The minimal profile as it is rendered, with what is drawn at random left out."""
    files = render(values_of("minimal"))
    text = "".join(f"# {name}\n{files[name].strip()}\n" for name in sorted(files))
    password = re.search(r'password: "(\w{32})"', text)
    assert password
    text = re.sub(r"^(  (?:ca|tls)[.](?:crt|key): )\S+$", r"\1RANDOM", text, flags=re.M)
    return text.replace(password[1], "PASSWORD")


def _rows(schema: Object, defaults: Any, path: str = "") -> list[tuple[str, str, str]]:
    """(value, default, description) of every value, two levels deep."""
    rows = []
    for name, field in sorted(schema.get("properties", {}).items()):
        default = defaults.get(name, "") if isinstance(defaults, dict) else ""
        has_parts = bool(field.get("properties")) and not path
        if not path or not has_parts:
            shown = "" if has_parts or default == "" else f"`{json.dumps(default)}`"
            text = " ".join(field.get("description", "").split()).replace("|", "\\|")
            rows.append((f"`{path}{name}`", shown, text))
        if has_parts:
            rows += _rows(field, default, f"{path}{name}.")
    return rows


def values_table() -> str:
    """The table of values in the chart's README, in Markdown."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    del schema["properties"]["global"]  # Helm's own
    rows = _rows(schema, yaml.safe_load((CHART / "values.yaml").read_text()))
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *lines]) + "\n"


def readme_with(table: str) -> str:
    """The chart's README with the table below its heading `Values`."""
    text, heading, _ = README.read_text().partition("\n## Values\n\n")
    return f"{text}{heading}{VALUES_INTRO}\n{table}"


def users() -> str:
    """The file of Redis' users, with the services' names where digests come."""
    text = acl_file({service: service for service in RIGHTS}, StoreConfig.key_prefix)
    for service in RIGHTS:
        text = text.replace(sha256(service.encode()).hexdigest(), f"SHA256-{service}")
    return text


def main() -> None:
    USERS.write_text(users())
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(snapshot())
    README.write_text(readme_with(values_table()))


if __name__ == "__main__":
    main()
