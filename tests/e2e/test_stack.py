"""What a user of the whole stack relies on, against real processes."""

import asyncio
import json
import math
from collections.abc import AsyncIterator

import httpx
import openai
import pytest
import pytest_asyncio

from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from millrace.wire.channel import open_channel
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc
from support.deadlines import HANG_S
from support.live_stack import complete, eventually, greedy_ids, keys_of_requests, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "llama"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[Stack]:
    settings = ["engine.dtype=float32", "store.finished_ttl_s=0", "engine.max_chunk_tokens=512"]
    async with live_stack(served_folder(MODEL), settings=settings) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as opened:
        yield opened


async def status(stack: Stack) -> scheduler_pb2.StatusReply:
    async with open_channel(f"127.0.0.1:{stack.services['scheduler'].port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        return await stub.GetStatus(scheduler_pb2.StatusRequest(), timeout=HANG_S)


async def is_idle(stack: Stack) -> bool:
    """No request anywhere, every page free, as the instances themselves report."""
    reply = await status(stack)
    held = [i for i in reply.instances if i.free_pages != i.total_pages or i.running or i.waiting]
    return not (reply.queued or reply.prefilling or reply.decoding or held)


async def test_vectors_and_scores_come_from_prefill_alone(stack: Stack) -> None:
    """The last token's hidden state, as transformers has it; nothing is generated or left held."""
    texts = [prompt(length, seed=length) for length in (1, 40, 1200)]
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", timeout=HANG_S
    ) as client:
        answer = await client.embeddings.create(model="tiny", input=texts)
        scored = await client.completions.create(
            model="tiny", prompt=texts[1], max_tokens=0, extra_body={"prompt_logprobs": 1}
        )
    for ids, one in zip(texts, answer.data, strict=True):
        expected = oracle(MODEL).hidden(ids)[-1]
        expected = expected / expected.norm()
        assert one.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    assert answer.usage.prompt_tokens == sum(map(len, texts))
    found = scored.choices[0].prompt_logprobs
    wanted = oracle(MODEL).logits(texts[1]).log_softmax(-1)
    assert found[0] is None and scored.usage.completion_tokens == 0
    for position, token_id in enumerate(texts[1][1:], 1):
        told = found[position][str(token_id)]["logprob"]
        assert told == pytest.approx(wanted[position - 1, token_id].item(), abs=1e-3)
    await eventually(lambda: is_idle(stack))


async def test_the_openai_client_works_sync_async_and_streaming(stack: Stack) -> None:
    messages = [{"role": "user", "content": "hello"}]

    def ask() -> str:
        with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=HANG_S) as sync:
            answer = sync.chat.completions.create(
                model="tiny", messages=messages, max_tokens=8, temperature=0
            )
        return answer.choices[0].message.content

    whole = await asyncio.to_thread(ask)
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", timeout=HANG_S
    ) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=messages,
            max_tokens=8,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]

    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole
    assert chunks[-1].usage.completion_tokens == 8


async def test_log_probabilities_are_the_models(client: httpx.AsyncClient) -> None:
    ids = prompt(40)
    answer = await complete(
        client, prompt=ids, max_tokens=5, temperature=0, ignore_eos=True, logprobs=3, echo=True,
        return_token_ids=True,
    )  # fmt: skip
    choice = answer["choices"][0]
    everything = [*ids, *choice["token_ids"][-5:]]
    rows = oracle(MODEL).logits(everything).log_softmax(-1)

    found = choice["logprobs"]["token_logprobs"]
    assert found[0] is None
    assert len(found) == len(everything)
    for position, logprob in enumerate(found[1:], 1):
        expected = float(rows[position - 1, everything[position]])
        assert math.isclose(logprob, expected, abs_tol=1e-4)


async def test_a_prompt_is_scored_without_generating(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    """Old versions of lm-evaluation-harness ask for no token at all, new ones for one."""
    ids = prompt(700)  # two chunks
    body = {"prompt": ids, "temperature": 0, "logprobs": 3, "echo": True}
    scored = await complete(client, **body, max_tokens=0)
    longer = await complete(client, **body, max_tokens=1, ignore_eos=True)
    assert scored["usage"]["completion_tokens"] == 0
    [choice], [other] = scored["choices"], longer["choices"]
    assert choice["finish_reason"] == "length"
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        found = choice["logprobs"][name]
        assert len(found) == len(ids)
        if name in ("tokens", "text_offset"):
            assert found == other["logprobs"][name][:-1]
    pairs = zip(
        choice["logprobs"]["token_logprobs"][1:],
        other["logprobs"]["token_logprobs"][1:-1],
        strict=True,
    )
    assert all(math.isclose(one, two, abs_tol=1e-4) for one, two in pairs)
    many = [complete(client, **body, max_tokens=0, n=2) for _ in range(4)]
    assert all(len(answer["choices"]) == 2 for answer in await asyncio.gather(*many))
    await eventually(lambda: is_idle(stack))


async def test_a_seed_gives_the_same_tokens_whatever_the_batch(client: httpx.AsyncClient) -> None:
    body = {
        "prompt": prompt(30), "max_tokens": 24, "temperature": 1.0, "top_p": 0.95, "seed": 11,
        "ignore_eos": True, "return_token_ids": True, "repetition_penalty": 1.1,
    }  # fmt: skip
    alone = await complete(client, **body)
    crowd = [complete(client, **{**body, "seed": s, "prompt": prompt(9 + s)}) for s in range(6)]
    among, *_ = await asyncio.gather(complete(client, **body), *crowd)

    assert among["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]


async def test_choices_share_a_prompt_and_go_their_own_ways(client: httpx.AsyncClient) -> None:
    body = {
        "prompt": prompt(37), "max_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip
    several = await complete(client, **body, n=4)
    again = await complete(client, **body, n=4)
    one = await complete(client, **body)

    tokens = [tuple(c["token_ids"]) for c in sorted(several["choices"], key=lambda c: c["index"])]
    assert len(set(tokens)) == 4
    assert tokens == [
        tuple(c["token_ids"]) for c in sorted(again["choices"], key=lambda c: c["index"])
    ]
    assert tuple(one["choices"][0]["token_ids"]) == tokens[0]
    assert several["usage"]["completion_tokens"] == 80


async def test_greedy_choices_of_a_partly_filled_page_agree(client: httpx.AsyncClient) -> None:
    ids = prompt(21)
    answer = await complete(
        client, prompt=ids, max_tokens=40, temperature=0, n=3, ignore_eos=True,
        return_token_ids=True,
    )  # fmt: skip
    expected = oracle(MODEL).greedy(ids, 40)
    assert [c["token_ids"] for c in answer["choices"]] == [expected] * 3


async def test_min_tokens_and_stop_ids(client: httpx.AsyncClient) -> None:
    ids = prompt(12)
    greedy = oracle(MODEL).greedy(ids, 12)
    stopped = await complete(
        client, prompt=ids, max_tokens=12, temperature=0, stop_token_ids=[greedy[3]],
        ignore_eos=True,
    )  # fmt: skip
    held = await complete(
        client, prompt=ids, max_tokens=12, temperature=0, stop_token_ids=[greedy[3]],
        ignore_eos=True, min_tokens=12,
    )  # fmt: skip
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] <= 4
    assert held["usage"]["completion_tokens"] == 12


async def test_closing_the_connection_frees_everything(
    stack: Stack, client: httpx.AsyncClient
) -> None:
    body = {
        "model": "tiny", "prompt": prompt(3000), "max_tokens": 900, "ignore_eos": True,
        "stream": True,
    }  # fmt: skip
    for lines in (0, 1, 20):  # while it waits or prefills, at its first token, in mid-stream
        async with client.stream("POST", "/v1/completions", json=body) as response:
            found = event_lines(response)
            for _ in range(lines):
                await anext(found)
    await eventually(lambda: is_idle(stack))
    await eventually(lambda: _none_left(stack))


async def _none_left(stack: Stack) -> bool:
    return not await keys_of_requests(stack)


async def test_many_at_once_all_come_back_right(stack: Stack, client: httpx.AsyncClient) -> None:
    prompts = [prompt(5 + 13 * i % 200, i) for i in range(40)]
    answers = await asyncio.gather(*(greedy_ids(client, p, 16) for p in prompts))

    for ids, answer in list(zip(prompts, answers, strict=True))[::8]:
        assert answer == oracle(MODEL).greedy(ids, 16)
    await eventually(lambda: is_idle(stack))
    await eventually(lambda: _none_left(stack))


BAD_BODIES: list[tuple[bytes, str]] = [
    (b"{", "JSON"),
    (b"[" * 5000 + b"]" * 5000, ""),
    (b'{"model": "other", "prompt": "x"}', "other"),
    (b'{"model": "tiny", "prompt": ""}', "prompt"),
    (b'{"model": "tiny", "prompt": []}', "prompt"),
    (b'{"model": "tiny", "prompt": [99999]}', "prompt"),
    (b'{"model": "tiny", "prompt": 5}', "prompt"),
    (b'{"model": "tiny", "prompt": "\\ud800"}', ""),
    (b'{"model": "tiny", "prompt": "x", "max_tokens": 0}', "max_tokens"),
    (b'{"model": "tiny", "prompt": "x", "max_tokens": 99999999}', "max_tokens"),
    (b'{"model": "tiny", "prompt": "x", "temperature": -1}', "temperature"),
    (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', ""),
    (b'{"model": "tiny", "prompt": "x", "n": 1000}', "n"),
    (b'{"model": "tiny", "prompt": "x", "nonsense": 1}', "nonsense"),
    (b'{"model": "tiny", "prompt": "' + b"x" * 20000 + b'"}', "prompt"),
]


@pytest.mark.parametrize(("body", "named"), BAD_BODIES, ids=lambda v: repr(v)[:40])
async def test_bad_input_is_refused_by_name_and_leaves_nothing(
    stack: Stack, client: httpx.AsyncClient, body: bytes, named: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await client.post("/v1/completions", content=body, headers=headers)

    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert named in f"{error['message']} {error['param']}"
    await eventually(lambda: is_idle(stack))
    await eventually(lambda: _none_left(stack))


async def test_a_waterfall_explains_the_first_token(client: httpx.AsyncClient) -> None:
    response = await client.post(
        "/v1/completions",
        json={"model": "tiny", "prompt": prompt(1200), "max_tokens": 4, "ignore_eos": True},
        headers={"x-millrace-trace": "1"},
    )
    spans = {s["name"]: s for s in response.json()["millrace"]["spans"]}

    assert {"queued", "chunk 0", "chunk 2", "kv_transfer", "first_decode_step"} <= spans.keys()
    assert spans["chunk 0"]["end_s"] <= spans["chunk 1"]["start_s"] + 1e-3
    assert spans["kv_transfer"]["end_s"] <= spans["first_decode_step"]["end_s"]


async def test_a_batch_has_the_answers_of_single_requests(stack: Stack) -> None:
    prompts = {f"r{i}": prompt(5 + 29 * i, i) for i in range(6)}
    fixed = {"model": "tiny", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": ids, "return_token_ids": True, **fixed},
        }
        for name, ids in prompts.items()
    ]
    content = "\n".join(map(json.dumps, lines)).encode()
    async with openai.AsyncOpenAI(
        base_url=f"{stack.url}/v1", api_key="none", timeout=HANG_S
    ) as opened:
        file = await opened.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await opened.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="1h"
        )
        async with asyncio.timeout(HANG_S):
            while batch.status not in ("completed", "failed"):
                await asyncio.sleep(0.1)
                batch = await opened.batches.retrieve(batch.id)
        assert batch.status == "completed", batch.errors
        rows = (await opened.files.content(batch.output_file_id)).text.splitlines()
    answers = {row["custom_id"]: row["response"]["body"] for row in map(json.loads, rows)}
    assert answers.keys() == prompts.keys()
    for name, ids in prompts.items():
        found = answers[name]["choices"][0]["token_ids"]
        assert found == oracle(MODEL).greedy(ids, 8)
