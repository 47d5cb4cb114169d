"""Which model a body names, found without reading the body by any model's types."""

from __future__ import annotations

import pytest

from millrace.proxy.models.asked_model import asked_model


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('{"model": "a"}', "a"),
        ('{"messages": [], "model"\t:\n "Qwen/é", "n": 1}', "Qwen/é"),
        ('{"messages": [{"content": "\\"model\\": \\"b\\""}], "model": "a"}', "a"),
        ('{"metadata": {"model": "b"}, "model": "a"}', "a"),
        ('{"metadata": {"model": "b"}}', None),
        (' {\n "model" : "a", "metadata": {"model": "b"}}', "a"),
        ('{"model": "a", "tools": [{"properties": {"model": {"type": "string"}}}]}', "a"),
        ('{"tool_choice": "model", "model": "a"}', "a"),
        ('{"m\\u006fdel": "a"}', "a"),
        ('{"model": "a\\"b"}', 'a"b'),
        ("{}", None),
        ('{"model": 5}', None),
        ('{"model": null}', None),
        ('{"model"', None),
        ('[{"model": 1, "model": 2}]', None),
    ],
)
def test_the_name_is_the_bodys_own(body: str, name: str | None) -> None:
    assert asked_model(body.encode()) == name


def test_bytes_that_are_no_text_name_nothing() -> None:
    assert asked_model(b'{"model": "\xff"}') is None
    assert asked_model(b'{"model": "\xff", "x": {"model": 1}}') is None
