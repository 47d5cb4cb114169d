"""The page of parameters is complete: it has all fields of OpenAI's API, Anthropic's and vLLM."""

from __future__ import annotations

import pytest
from docs.reference.other_apis import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    MESSAGES,
    RESPONSES,
    client_fields,
    vllm_fields,
)
from docs.reference.parameters import schemas, standing

PATHS = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS)
SCHEMAS = schemas()


@pytest.mark.parametrize("path", PATHS)
def test_no_field_of_another_api_is_unknown(path):
    known = SCHEMAS[path]["properties"].keys()
    assert client_fields()[path] <= known
    assert vllm_fields()[path] <= known


@pytest.mark.parametrize("path", PATHS)
def test_every_field_has_a_meaning_or_a_reason(path):
    for name, field in SCHEMAS[path]["properties"].items():
        described = field.get("description", "")
        assert described and described != "Not supported.", name


def test_the_clients_types_are_read():
    assert {"messages", "temperature", "stream", "tools"} <= client_fields()[CHAT]
    assert {"input", "previous_response_id"} <= client_fields()[RESPONSES]
    assert {"system", "thinking", "stop_sequences"} <= client_fields()[MESSAGES]


def test_fields_stand_as_their_models_say():
    found = {name: standing(name, f) for name, f in SCHEMAS[CHAT]["properties"].items()}
    for name, wanted in (
        ("temperature", "served"),
        ("bad_words", "served"),
        ("thinking_token_budget", "served"),
        ("user", "ignored"),
        ("kv_transfer_params", "refused"),
        ("modalities", "refused"),
    ):
        assert found[name] == wanted
