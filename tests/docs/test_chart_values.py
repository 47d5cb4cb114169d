"""The chart, an API server and the operator take the values that the documentation prints."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest
import yaml

from millrace_operator.spec import parse_service
from support.cel_rules import refusals
from support.chart import CHART, ROOT, objects, values_of
from support.custom_objects import merged
from support.custom_resources import SCHEMAS, defaulted, model_service

VALUES = set(yaml.safe_load((CHART / "values.yaml").read_text()))


def blocks() -> list[tuple[str, dict[str, Any]]]:
    """Returns the YAML blocks that are values or specs, with their pages."""
    found = []
    for path in [*sorted((ROOT / "docs").rglob("*.md")), CHART / "README.md"]:
        for block in re.findall(r"^```yaml\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL):
            document = yaml.safe_load(block)
            if isinstance(document, dict) and "apiVersion" not in document:
                found.append((str(path.relative_to(ROOT)), document))
    return found


BLOCKS = blocks()


def test_there_are_some() -> None:
    assert len(BLOCKS) > 6
    assert {"docs/guides/rdma.md", "docs/guides/redis.md"} <= {page for page, _ in BLOCKS}


@pytest.mark.parametrize(("page", "given"), BLOCKS, ids=[page for page, _ in BLOCKS])
def test_they_are_taken(page: str, given: dict[str, Any]) -> None:
    if set(given) == {"spec"}:
        obj = merged(model_service(), given)
    else:
        assert set(given) <= VALUES
        made = objects(merged(values_of("minimal"), given))
        (obj,) = [o for o in made if o["kind"] == "ModelService"]
    obj = defaulted(SCHEMAS["ModelService"], obj)
    jsonschema.validate(obj, SCHEMAS["ModelService"])
    assert refusals(SCHEMAS["ModelService"], obj) == []
    assert parse_service(obj).spec.model.uri
