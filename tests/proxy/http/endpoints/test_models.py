"""/v1/models with the unmodified anthropic client; OpenAI's form is tested beside the models."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import anthropic
import httpx2
import pytest
import pytest_asyncio

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.proxy.model_card import read_model_card
from millrace.proxy.models.served_model import tokenizer_info
from support.deadlines import HANG_S
from support.gateway import CONTEXT_TOKENS, MODEL, gateway
from support.tenants import config_with, tenant_toml
from support.two_models import two_models

NAMES = ["small", "my-small", "large", "my-large"]
VERSION = {"anthropic-version": "2023-06-01"}


def client_of(url: str, key: str = "none") -> anthropic.AsyncAnthropic:
    transport = httpx2.AsyncClient(trust_env=False, verify=False)
    return anthropic.AsyncAnthropic(
        base_url=url, api_key=key, max_retries=0, timeout=HANG_S, http_client=transport
    )


@pytest_asyncio.fixture
async def two(tmp_path):
    async with two_models(tmp_path) as found:
        yield found


async def test_the_client_lists_and_shows_models(two):
    async with client_of(str(two.http.base_url)) as client:
        listed = await client.models.list()
        assert [one.id for one in listed.data] == NAMES
        assert not listed.has_more
        assert (listed.first_id, listed.last_id) == (NAMES[0], NAMES[-1])
        for one in listed.data:
            assert (one.type, one.display_name, one.lifecycle) == ("model", one.id, "active")
            assert one.max_input_tokens in (512, 2048)
            assert datetime(2020, 1, 1, tzinfo=UTC) < one.created_at
            assert await client.models.retrieve(one.id) == one


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
async def test_pages_hold_every_model_once(two, limit):
    async with client_of(str(two.http.base_url)) as client:
        assert [one.id async for one in await client.models.list(limit=limit)] == NAMES
        page = await client.models.list(limit=limit, before_id=NAMES[3])
        assert [one.id for one in page.data] == NAMES[max(0, 3 - limit) : 3]
        assert page.has_more == (limit < 3)


async def test_errors_have_the_form_of_the_request(two):
    async with client_of(str(two.http.base_url)) as client:
        with pytest.raises(anthropic.NotFoundError, match="'huge' does not exist") as missing:
            await client.models.retrieve("huge")
        assert missing.value.body["error"]["type"] == "not_found_error"
        assert missing.value.request_id
        for wrong, said in (
            ({"limit": 0}, "Invalid 'limit': must be an integer from 1 to 1000"),
            (
                {"after_id": "huge"},
                "Invalid 'after_id': must be the id of a model of the list, got 'huge'",
            ),
            ({"before_id": "huge"}, "Invalid 'before_id': must be the id of a model"),
            (
                {"after_id": "small", "before_id": "large"},
                "Invalid 'before_id': can't be given beside",
            ),
        ):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await client.models.list(**wrong)
            assert said in refused.value.body["error"]["message"]
    plain = await two.http.get("/v1/models/huge")
    assert plain.json()["error"]["code"] == "model_not_found"
    assert "request-id" not in plain.headers


async def test_a_key_sees_its_models(tmp_path):
    tables = tenant_toml("acme", "sk-1", models=["small"])
    config = config_with(tmp_path, tables, "auth.require_key=on")
    async with two_models(tmp_path, config=config) as two:
        async with client_of(str(two.http.base_url), "sk-1") as client:
            assert [one.id for one in (await client.models.list()).data] == NAMES[:2]
        async with client_of(str(two.http.base_url), "sk-2") as client:
            with pytest.raises(anthropic.AuthenticationError):
                await client.models.list()


async def test_requests_are_counted_by_route(tmp_path):
    async with gateway(tmp_path) as stack:
        shown = await stack.http.get(f"/v1/models/{MODEL}", headers=VERSION)
        assert shown.json()["max_input_tokens"] == CONTEXT_TOKENS
        text = (await stack.http.get("/metrics")).text
        assert 'route="/v1/models/{model:path}"' not in text
        assert 'route="/v1/models/{model}"' in text


async def test_tokenizer_info_is_the_tokenizers_file_and_the_template(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    async with gateway(tmp_path) as stack:
        written = json.loads((tmp_path / "tokenizer_config.json").read_text())
        found = (await stack.http.get("/tokenizer_info")).json()
        assert found == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **written,
            "chat_template": "{{ messages }}",
        }
        assert (await stack.http.get("/tokenizer_info?model=x")).status_code == 404


async def test_tokenizer_info_may_hold_large_numbers_and_tokens_as_objects(tmp_path):
    """As files of Hugging Face's library do: no limit is a number above 64 bits."""
    settings = {"model_max_length": 10**30, "eos_token": {"content": "<e>", "lstrip": False}}
    folder = write_stub_model(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    card = read_model_card(folder)
    assert card.tokenizer_config == settings
    assert json.loads(tokenizer_info(card)) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 10**30,
        "eos_token": "<e>",
        "chat_template": None,
    }


async def test_tokenizer_info_is_that_of_the_model_that_is_asked_for(two):
    first = (await two.http.get("/tokenizer_info")).json()
    assert (await two.http.get("/tokenizer_info?model=my-small")).json() == first
    assert (await two.http.get("/tokenizer_info?model=large")).status_code == 200
