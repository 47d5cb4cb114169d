"""An item's id names its response."""

from __future__ import annotations

import pytest

from millrace.proxy.request.item_ids import (
    input_item_id,
    new_response_id,
    output_item_id,
    response_of,
)


def test_an_id_names_its_response():
    response_id = new_response_id()
    assert response_of(input_item_id("message", response_id, 0)) == response_id
    assert response_of(output_item_id("custom_tool_call", response_id, 12)) == response_id
    assert response_id != new_response_id()


def test_places_have_different_ids():
    response_id = new_response_id()
    ids = [
        make("message", response_id, i) for make in (input_item_id, output_item_id) for i in (1, 11)
    ]
    assert len(set(ids)) == 4


@pytest.mark.parametrize(
    "item_id",
    [
        "",
        "msg_",
        "msg_a54b9239-b820-50c2-898c-628ea0ad9a84",
        f"msg_{'0' * 32}",
        f"msg_{'0' * 32}o1\n",
    ],
)
def test_other_ids_name_none(item_id):
    assert response_of(item_id) is None
