"""Two models of other sizes and vocabularies behind one proxy, each with real instances."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from millrace.core.config import load_config
from millrace.core.config.models import models_file, read_models_file
from millrace.event_lines import event_lines
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.shipped import SHIPPED_MODEL
from support.deadlines import HANG_S
from support.live_stack import POOL_BYTES, eventually, print_logs
from support.served_model import served_folder
from support.tiny_models import VOCAB

pytestmark = pytest.mark.asyncio(loop_scope="module")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SHIPPED, RANDOM = "shipped", "random"
HI = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    options = StackOptions(
        model=str(SHIPPED_MODEL),
        model_name=SHIPPED,
        more=[(str(served_folder("qwen3")), RANDOM)],
        prefill=1,
        decode=1,
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[f"engine.kv_bytes={POOL_BYTES}"],
    )
    async with Stack(options) as running:
        try:
            async with httpx.AsyncClient(
                base_url=running.url, timeout=HANG_S, trust_env=False
            ) as client:

                async def ready() -> bool:
                    found = [await client.post(CHAT, json=body(name)) for name in (SHIPPED, RANDOM)]
                    return all(one.status_code == 200 for one in found)

                await eventually(ready)
            yield running
        except BaseException:
            print_logs(running)
            raise


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=HANG_S, trust_env=False) as found:
        yield found


def body(model: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": HI, "max_tokens": 4, **fields}


async def posted(client: httpx.AsyncClient, path: str, /, **fields: Any) -> dict[str, Any]:
    answer = await client.post(path, json=fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_each_name_reaches_its_own_weights(client: httpx.AsyncClient) -> None:
    listed = (await client.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == [SHIPPED, RANDOM]
    lengths, ids = {}, {}
    for name in (SHIPPED, RANDOM):
        fields = {"temperature": 0, "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
        answer = await posted(client, COMPLETIONS, model=name, prompt="The mill", **fields)
        assert answer["model"] == name
        ids[name] = answer["choices"][0]["token_ids"]
        vectors = await posted(client, "/v1/embeddings", model=name, input="The mill")
        lengths[name] = len(vectors["data"][0]["embedding"])
        response = await posted(client, "/v1/responses", model=name, input="hi")
        assert response["model"] == name
        assert response["output"]
    assert lengths[RANDOM] == 48
    assert lengths[SHIPPED] != 48
    assert max(ids[RANDOM]) < VOCAB
    assert ids[RANDOM] != ids[SHIPPED]


async def test_a_model_leaves_and_returns_while_it_streams(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    text = stack.models_file.read_text()
    first, second = read_models_file(text, load_config())
    fields = body(RANDOM, stream=True, max_tokens=400, ignore_eos=True)
    async with client.stream("POST", CHAT, json=fields) as response:
        lines = event_lines(response)
        await anext(lines)
        stack.models_file.write_text(models_file([first]))

        async def gone() -> bool:
            return (await client.post(CHAT, json=body(RANDOM))).status_code == 404

        await eventually(gone)
        assert (await posted(client, CHAT, **body(SHIPPED)))["model"] == SHIPPED
        rest = [line async for line in lines if line.startswith("data: ")]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in rest[-2]
    stack.models_file.write_text(models_file([first, second]))

    async def back() -> bool:
        return (await client.post(CHAT, json=body(RANDOM))).status_code == 200

    await eventually(back)
