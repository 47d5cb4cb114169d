"""Keys over HTTP: what needs one, and what OpenAI's client makes of a refusal."""

from __future__ import annotations

import openai
import pytest

from support.gateway import MODEL, Stack, gateway
from support.metrics import total
from support.tenants import bearer, config_with, tenant_toml

MESSAGES = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": MESSAGES}
CLASSES = "[slo_classes.chat]\nttft_s = 5\n[slo_classes.batch]\nttft_s = 600\n"
TABLES = (
    CLASSES
    + tenant_toml("acme", "sk-acme")
    + tenant_toml("narrow", "sk-narrow", models=["another"])
    + tenant_toml("slow", "sk-slow", slo_classes=["batch"])
)


@pytest.fixture
async def stack(tmp_path):
    config = config_with(tmp_path / "settings", TABLES, "auth.require_key=on")
    async with gateway(tmp_path / "model", config=config) as running:
        yield running


def client_of(stack: Stack, key: str) -> openai.AsyncOpenAI:
    return stack.client.with_options(api_key=key)


async def test_a_known_key_is_served(stack):
    answer = await client_of(stack, "sk-acme").chat.completions.create(
        model=MODEL, messages=MESSAGES
    )
    assert answer.choices[0].message.content == "Hello there"
    assert stack.fleet.specs[0].tenant == "acme"


async def test_an_unknown_key_is_an_authentication_error(stack):
    with pytest.raises(openai.AuthenticationError) as caught:
        await client_of(stack, "sk-guess").chat.completions.create(model=MODEL, messages=MESSAGES)
    assert caught.value.status_code == 401
    assert (caught.value.code, caught.value.type) == ("invalid_api_key", "invalid_request_error")
    assert "sk-guess" not in str(caught.value)
    assert caught.value.response.headers["www-authenticate"] == "Bearer"
    assert caught.value.request_id.startswith("req_")
    assert stack.fleet.specs == []


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/responses"),
        ("GET", "/v1/responses/resp_1"),
        ("POST", "/v1/messages"),
        ("POST", "/v1/messages/count_tokens"),
        ("GET", "/v1/models"),
        ("GET", f"/v1/models/{MODEL}"),
        ("POST", "/tokenize"),
        ("GET", "/unknown"),
        ("OPTIONS", "/v1/models"),
    ],
)
async def test_every_route_of_the_api_needs_a_key(stack, method, path):
    sent = await stack.http.request(method, path, json=BODY)
    assert sent.status_code == 401
    assert "didn't provide an API key" in sent.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/openapi.json", "/docs"])
async def test_probes_metrics_and_the_apis_description_need_none(stack, path):
    sent = await stack.http.get(path)
    assert sent.status_code == 200


async def test_admin_has_its_own_guard(stack):
    sent = await stack.http.get("/admin/scheduler", headers={"x-forwarded-for": "10.0.0.1"})
    assert (sent.status_code, sent.json()["error"]["code"]) == (403, "not_local")


async def test_a_model_that_is_not_allowed_is_a_permission_error(stack):
    client = client_of(stack, "sk-narrow")
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert (caught.value.code, caught.value.param) == ("model_not_allowed", "model")
    assert (await client.models.list()).data == []
    with pytest.raises(openai.PermissionDeniedError):
        await client.models.retrieve(MODEL)
    assert [model.id for model in (await client_of(stack, "sk-acme").models.list()).data] == [MODEL]


async def test_the_first_allowed_class_is_forced_and_another_is_refused(stack):
    client = client_of(stack, "sk-slow")
    await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert stack.fleet.specs[0].slo.class_name == "batch"
    with pytest.raises(openai.PermissionDeniedError) as caught:
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_headers={"x-millrace-class": "chat"}
        )
    assert (caught.value.code, caught.value.param) == ("class_not_allowed", "x-millrace-class")
    with pytest.raises(openai.BadRequestError):
        await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, extra_headers={"x-millrace-class": "chats"}
        )


async def test_metrics_name_tenants_and_never_keys(stack):
    await client_of(stack, "sk-acme").chat.completions.create(model=MODEL, messages=MESSAGES)
    for key in ("sk-guess", "sk-narrow"):
        await stack.http.post("/v1/chat/completions", json=BODY, headers=bearer(key))
    await stack.http.post("/v1/chat/completions", json=BODY)
    text = (await stack.http.get("/metrics")).text
    assert "sk-" not in text
    prefix = "millrace_proxy_tenant_"
    assert total(text, f"{prefix}requests_total", tenant="acme") == 1
    assert total(text, f"{prefix}prompt_tokens_total", tenant="acme") > 0
    generated = total(text, f"{prefix}generated_tokens_total", tenant="acme")
    assert generated == total(text, "millrace_proxy_generated_tokens_total") > 0
    refused = f"{prefix}refused_requests_total"
    assert total(text, refused, tenant="default", reason="unknown_key") == 1
    assert total(text, refused, tenant="default", reason="no_key") == 1
    assert total(text, refused, tenant="narrow", reason="model_not_allowed") == 1


async def test_the_class_of_batches_is_allowed_by_name_without_a_table(tmp_path):
    tables = "[slo_classes.chat]\nttft_s = 5\n" + tenant_toml(
        "acme", "sk-acme", slo_classes=["chat", "batch"]
    )
    config = config_with(tmp_path / "settings", tables)
    async with gateway(tmp_path / "model", config=config) as stack:
        for asked, status in ((None, 200), ("batch", 200), ("default", 403)):
            headers = bearer("sk-acme") | ({"x-millrace-class": asked} if asked else {})
            sent = await stack.http.post("/v1/chat/completions", json=BODY, headers=headers)
            assert sent.status_code == status, sent.text
        assert [spec.slo.class_name for spec in stack.fleet.specs] == ["chat", "batch"]
