"""Limits over HTTP: refusals, headers, what is given back; and two proxies on one Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import asynccontextmanager

import anyio
import openai
import pytest
from redis.asyncio import Redis

from millrace.event_lines import event_lines
from support.gateway import MODEL, Script, Stack, gateway
from support.limits import KEY, LEFT, left, limited, two_limited, until_left
from support.live_stack import eventually
from support.metrics import total
from support.stores import private_redis
from support.tenants import bearer, config_with, key_toml, tenant_toml

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}
PROMPT = {"model": MODEL, "prompt": [5] * 20, "max_tokens": 10}
LIMIT = "x-ratelimit-limit-"


@asynccontextmanager
async def two_proxies(folder, **limits: int):
    """Yields two proxies that share one Redis, and its URL."""
    async with private_redis() as url, two_limited(folder, url, **limits) as stacks:
        yield stacks, url


async def test_answers_tell_what_is_left(tmp_path):
    async with limited(tmp_path, requests_per_minute=60, tokens_per_minute=6000) as stack:
        sent = await stack.http.post(CHAT, json=BODY, headers=KEY)
        assert sent.status_code == 200
        assert (sent.headers[LIMIT + "requests"], sent.headers[LEFT + "requests"]) == ("60", "59")
        assert sent.headers["x-ratelimit-reset-requests"] == "1s"
        assert sent.headers[LIMIT + "tokens"] == "6000"
        assert 5900 < int(sent.headers[LEFT + "tokens"]) < 6000
        async with stack.http.stream("POST", CHAT, json=BODY | {"stream": True}, headers=KEY) as s:
            assert int(s.headers[LEFT + "requests"]) in (58, 59)
            await s.aread()
        sent = await stack.http.post(CHAT, json=BODY, headers=bearer("sk-free"))
        assert sent.status_code == 200 and LIMIT + "requests" not in sent.headers


async def test_a_wrong_request_is_told_what_is_left_and_costs_nothing(tmp_path):
    async with limited(tmp_path, requests_per_minute=3) as stack:
        assert [await left(stack, "requests") for _ in range(5)] == [3] * 5


async def test_beyond_the_limit_there_is_a_rate_limit_error(tmp_path):
    async with limited(tmp_path, requests_per_minute=2) as stack:
        client = stack.client.with_options(api_key="sk-acme")
        for _ in range(2):
            await client.chat.completions.create(**BODY)
        with pytest.raises(openai.RateLimitError) as caught:
            await client.chat.completions.create(**BODY)
        error, headers = caught.value, caught.value.response.headers
        assert (error.code, error.type) == ("rate_limit_exceeded", "requests")
        assert "tenant acme on requests per minute: limit 2, used 2, requested 1" in str(error)
        assert headers[LEFT + "requests"] == "0"
        assert 0 < int(headers["retry-after-ms"]) <= 30_000
        wait_s = int(headers["retry-after-ms"]) / 1000
        assert wait_s <= int(headers["retry-after"]) < wait_s + 1
        text = (await stack.http.get("/metrics")).text
        refused = "millrace_proxy_tenant_refused_requests_total"
        assert total(text, refused, tenant="acme", reason="requests_per_minute") == 1
        assert len(stack.fleet.specs) == 2


async def test_openais_client_waits_as_told_and_succeeds(tmp_path, monkeypatch):
    """The client's sleep is noted, and the bucket refilled in its place."""
    async with two_proxies(tmp_path, requests_per_minute=1) as ((stack, _), url):
        slept_s, sleep = [], anyio.sleep

        async def refill(delay_s: float) -> None:
            if delay_s < 5:
                await sleep(delay_s)
                return
            slept_s.append(delay_s)
            async with Redis.from_url(url) as redis:
                await redis.flushall()

        monkeypatch.setattr(anyio, "sleep", refill)
        client = stack.client.with_options(api_key="sk-acme", max_retries=1)
        await client.chat.completions.create(**BODY)
        await client.chat.completions.create(**BODY)
        assert len(slept_s) == 1 and 5 < slept_s[0] <= 60
        text = (await stack.http.get("/metrics")).text
        answered = "millrace_proxy_http_requests_total"
        assert total(text, answered, route=CHAT, code="429") == 1
        assert total(text, answered, route=CHAT, code="200") == 2


async def test_a_request_that_never_fits_is_not_tried_again(tmp_path):
    async with limited(tmp_path, tokens_per_minute=15, tokens_per_day=1000) as stack:
        sent = await stack.http.post("/v1/completions", json=PROMPT, headers=KEY)
        assert (sent.status_code, sent.headers["x-should-retry"]) == (429, "false")
        assert "retry-after" not in sent.headers
        assert "limit 15, requested 20" in sent.json()["error"]["message"]
        client = stack.client.with_options(api_key="sk-acme", max_retries=3)
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(**PROMPT)
        text = (await stack.http.get("/metrics")).text
        assert total(text, "millrace_proxy_http_requests_total", code="429") == 2


async def test_unused_tokens_come_back_when_the_answer_ends(tmp_path):
    async with limited(tmp_path, tokens_per_day=1000) as stack:
        stack.fleet.script = Script(hold=asyncio.Event(), token_ids=[5] * 4, finish="length")
        sent = asyncio.create_task(
            stack.http.post("/v1/completions", json=PROMPT | {"max_tokens": 500}, headers=KEY)
        )
        await stack.begun()
        assert await left(stack, "tokens") == 1000 - 20 - 500
        stack.fleet.script.hold.set()
        answer = await sent
        assert answer.headers[LEFT + "tokens"] == str(1000 - 20 - 500)
        used = answer.json()["usage"]
        assert used["total_tokens"] == 24
        await until_left(stack, "tokens", 1000 - 24)


async def test_a_client_that_leaves_pays_its_prompt_and_what_was_generated(tmp_path):
    async with limited(tmp_path, tokens_per_day=1000, concurrency=1) as stack:
        stack.fleet.script = Script(hold=asyncio.Event(), hold_after=3, token_ids=[5] * 9)
        body = PROMPT | {"max_tokens": 500, "stream": True}
        async with stack.http.stream("POST", "/v1/completions", json=body, headers=KEY) as sent:
            lines = event_lines(sent)  # a stream whose iterator is gone is closed
            await anext(lines)
            await eventually(lambda: stack.proxy.gateway.requests[0].completion_tokens == 3)
            refused = await stack.http.post("/v1/completions", json=PROMPT, headers=KEY)
            assert refused.status_code == 429
            assert "concurrency: limit 1" in refused.json()["error"]["message"]
            assert refused.headers["retry-after"] == "1"
        await until_left(stack, "tokens", 1000 - 23)
        stack.fleet.script = Script()
        again = await stack.http.post("/v1/completions", json=PROMPT, headers=KEY)
        assert again.status_code == 200


async def test_what_the_server_refuses_costs_no_tokens(tmp_path):
    async with limited(tmp_path, tokens_per_day=1000) as stack:
        stack.fleet.script = Script(
            on_submit=lambda spec: stack.fleet.refuse(spec, "overloaded", "too much")
        )
        sent = await stack.http.post("/v1/completions", json=PROMPT, headers=KEY)
        assert (sent.status_code, sent.json()["error"]["code"]) == (429, "overloaded")
        await until_left(stack, "tokens", 1000)


async def test_every_choice_and_every_prompt_is_reserved(tmp_path):
    async with limited(tmp_path, generated_tokens_per_minute=100) as stack:
        body = PROMPT | {"prompt": [[5, 6], [7, 8]], "n": 3, "max_tokens": 11}
        sent = await stack.http.post("/v1/completions", json=body, headers=KEY)
        assert sent.headers[LEFT + "tokens"] == str(100 - 2 * 3 * 11)


async def test_a_background_response_is_refused_when_it_is_created(tmp_path):
    async with limited(tmp_path, requests_per_minute=1) as stack:
        body = {"model": MODEL, "input": "hi", "background": True}
        sent = await stack.http.post("/v1/responses", json=body, headers=KEY)
        assert (sent.status_code, sent.headers[LEFT + "requests"]) == (200, "0")
        sent = await stack.http.post("/v1/responses", json=body, headers=KEY)
        assert (sent.status_code, sent.json()["error"]["code"]) == (429, "rate_limit_exceeded")


async def test_embeddings_cost_their_texts_and_are_refused_alike(tmp_path):
    async with limited(tmp_path, tokens_per_day=1000, requests_per_minute=1) as stack:
        stack.fleet.script = Script(vectors=[[1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]] * 2)
        body = {"model": MODEL, "input": [[5] * 20, [6] * 30]}
        sent = await stack.http.post("/v1/embeddings", json=body, headers=KEY)
        assert (sent.status_code, sent.headers[LEFT + "tokens"]) == (200, "950")
        await until_left(stack, "tokens", 950)
        refused = await stack.http.post("/v1/embeddings", json=body, headers=KEY)
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"


async def test_a_key_has_limits_of_its_own_beside_its_tenants(tmp_path):
    tables = tenant_toml("acme", "sk-acme", requests_per_minute=5)
    tables += key_toml("acme", "sk-ci", name="ci", requests_per_minute=1)
    config = config_with(tmp_path / "settings", tables)
    async with gateway(tmp_path / "model", config=config) as stack:
        assert (await stack.http.post(CHAT, json=BODY, headers=bearer("sk-ci"))).status_code == 200
        refused = await stack.http.post(CHAT, json=BODY, headers=bearer("sk-ci"))
        assert "key ci of tenant acme" in refused.json()["error"]["message"]
        sent = [await stack.http.post(CHAT, json=BODY, headers=KEY) for _ in range(5)]
        assert [one.status_code for one in sent] == [200, 200, 200, 200, 429]


async def test_requests_without_a_key_share_the_limits_of_the_default_tenant(tmp_path):
    config = config_with(tmp_path / "settings", tenant_toml("default", requests_per_minute=1))
    async with gateway(tmp_path / "model", config=config) as stack:
        sent = [
            await stack.http.post(CHAT, json=BODY, headers=headers)
            for headers in ({}, bearer("sk-made-up"), bearer("sk-another"))
        ]
        assert [one.status_code for one in sent] == [200, 429, 429]


async def test_without_its_store_a_limited_key_is_refused(tmp_path):
    async with limited(tmp_path, "store.url=redis://127.0.0.1:1", concurrency=5) as stack:
        sent = await stack.http.post(CHAT, json=BODY, headers=KEY)
        assert (sent.status_code, sent.headers["retry-after"]) == (503, "1")
        assert "store of limits" in sent.json()["error"]["message"]
        assert stack.fleet.specs == []
        sent = await stack.http.post(CHAT, json=BODY, headers=bearer("sk-free"))
        assert sent.status_code == 503
        assert "request store" in sent.json()["error"]["message"]


# -- fifty clients, two proxies, one Redis


async def test_fifty_clients_get_exactly_what_the_bucket_holds(tmp_path):
    async with two_proxies(tmp_path, requests_per_minute=120) as (stacks, _):
        began = time.monotonic()
        codes = await storm(stacks, clients=50, each=6)
        elapsed_s = time.monotonic() - began
        assert set(codes) == {200, 429} and sum(codes.values()) == 300
        # The bucket's own promise: what it held, and what flowed in meanwhile.
        assert 120 <= codes[200] <= 120 + int(elapsed_s * 120 / 60)
        assert codes[200] == sum(len(stack.fleet.specs) for stack in stacks)


async def test_fifty_clients_never_have_more_requests_open_than_allowed(tmp_path):
    async with two_proxies(tmp_path, concurrency=7) as (stacks, _):
        hold = asyncio.Event()
        for stack in stacks:
            stack.fleet.script = Script(hold=hold, hold_after=0)
        sending = asyncio.create_task(storm(stacks, clients=50, each=1))
        await eventually(
            lambda: sum(refusals(stack) for stack in stacks) == 43  # of 50: all but 7
        )
        assert sum(stack.proxy.gateway.inflight for stack in stacks) == 7
        hold.set()
        assert await sending == {200: 7, 429: 43}
        for _ in range(400):
            if await storm(stacks, clients=7, each=1) == {200: 7}:
                break
        else:
            raise AssertionError("places of requests that ended are not free")


async def test_fifty_clients_never_overdraw_a_day_and_use_it_to_the_last_token(tmp_path):
    """A request reserves 20 + 10 tokens and uses 20 + 5: 40 fit at once, and more after these."""
    async with two_proxies(tmp_path, tokens_per_day=1200) as (stacks, _):
        hold = asyncio.Event()
        for stack in stacks:
            stack.fleet.script = Script(hold=hold, hold_after=0, token_ids=[5] * 5, finish="length")
        sending = asyncio.create_task(storm(stacks, clients=50, each=1, path="/v1/completions"))
        await eventually(lambda: sum(refusals(stack) for stack in stacks) == 10)
        assert sum(stack.proxy.gateway.inflight for stack in stacks) == 40
        hold.set()
        assert await sending == {200: 40, 429: 10}
        await until_left(stacks[0], "tokens", 1200 - 40 * 25)
        served = 40
        while (await storm(stacks, clients=1, each=1, path="/v1/completions"))[200]:
            served += 1
            await until_left(stacks[0], "tokens", 1200 - served * 25)
        assert served == 47  # 25 tokens are left, and 30 would be reserved
        assert await left(stacks[1], "tokens") == 25


def refusals(stack: Stack) -> float:
    return total(
        stack.proxy.metrics.registry, "millrace_proxy_tenant_refused_requests_total", tenant="acme"
    )


async def storm(stacks, *, clients: int, each: int, path: str = CHAT) -> Counter[int]:
    """Sends requests of parallel clients to the proxies in turn; returns the statuses."""
    body = BODY if path == CHAT else PROMPT

    async def one(client: int) -> list[int]:
        stack = stacks[client % len(stacks)]
        return [
            (await stack.http.post(path, json=body, headers=KEY)).status_code for _ in range(each)
        ]

    found = await asyncio.gather(*map(one, range(clients)))
    return Counter(code for codes in found for code in codes)
