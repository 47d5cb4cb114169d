"""The chart as Helm's own engine renders it, read back as objects.

`python tests/support/chart.py` writes the golden snapshot anew.
"""

import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import helm_python as helm
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts/millrace"
GOLDEN = ROOT / "tests/chart/golden/minimal.yaml"
PROFILES = tuple(
    sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
)

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
    return text.replace(password[1], "PASSWORD")


def main() -> None:
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    GOLDEN.write_text(snapshot())


if __name__ == "__main__":
    main()
