"""OpenAI's own client at every endpoint. Each part ends with an assertion."""

import io
import json
import threading
import time
from typing import Any, Literal

import httpx
import openai
from pydantic import BaseModel
from report import MESSAGES, MODEL, TOOL, URL, finish

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)
USER: Any = [{"role": "user", "content": "Where is the mill?"}]
FORCED: Any = {"type": "function", "function": {"name": "weather"}}
DONE = ("completed", "failed", "cancelled", "expired", "incomplete")


class Mill(BaseModel):
    """What `parse` makes of an answer."""

    river: Literal["Thames", "Tiber"]
    wheels: Literal[1, 2, 3]


def models() -> None:
    listed = client.models.list()
    assert [model.id for model in listed] == [MODEL], listed
    assert client.models.retrieve(MODEL).id == MODEL


def chat() -> None:
    seeded: Any = {"model": MODEL, "messages": MESSAGES, "max_tokens": 12, "seed": 3}
    whole = client.chat.completions.create(**seeded, n=2, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert len(whole.choices[0].logprobs.content[0].top_logprobs) == 2
    options = {"include_usage": True}
    with client.chat.completions.stream(**seeded, stream_options=options) as stream:
        events = list(stream)
        answer = stream.get_final_completion()
    assert "content.done" in {event.type for event in events}
    assert answer.choices[0].message.content == whole.choices[0].message.content
    assert answer.usage.completion_tokens <= 12


def tools() -> None:
    forced: Any = {"model": MODEL, "messages": USER, "tools": [TOOL], "tool_choice": FORCED}
    whole = client.chat.completions.create(**forced)
    [call] = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["place"] in ("Oslo", "Rome"), call
    with client.chat.completions.stream(**forced) as stream:
        deltas = [e for e in stream if e.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert deltas
    assert json.loads(streamed[0].function.arguments)["place"] in ("Oslo", "Rome")
    history = [*USER, whole.choices[0].message.model_dump(exclude_none=True)]
    history.append({"role": "tool", "tool_call_id": call.id, "content": "Rain."})
    after = client.chat.completions.create(
        model=MODEL, messages=history, tools=[TOOL], tool_choice="none", max_tokens=8
    )
    assert after.choices[0].message.content
    assert after.choices[0].message.tool_calls is None


def parsed() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=USER, response_format=Mill)
    assert isinstance(answer.choices[0].message.parsed, Mill), answer
    response = client.responses.parse(model=MODEL, input="Where?", text_format=Mill)
    assert isinstance(response.output_parsed, Mill), response


def completions() -> None:
    fields: Any = {"model": MODEL, "prompt": ["The mill", "The river"], "max_tokens": 6, "seed": 2}
    whole = client.completions.create(**fields, echo=True, logprobs=1)
    assert [choice.text[:4] for choice in whole.choices] == ["The ", "The "]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert all(texts.values())


def responses() -> None:
    first = client.responses.create(model=MODEL, input="Who are you?", max_output_tokens=16)
    assert first.status in DONE
    assert client.responses.retrieve(first.id).output_text == first.output_text
    [item] = client.responses.input_items.list(first.id).data
    assert item.content[0].text == "Who are you?"
    following = client.responses.create(
        model=MODEL, input="And now?", previous_response_id=first.id, max_output_tokens=16
    )
    assert following.previous_response_id == first.id
    assert following.usage.input_tokens > first.usage.input_tokens
    with client.responses.stream(model=MODEL, input="Sing.", max_output_tokens=16) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "response.output_text.delta" in kinds
    function = {"type": "function", **TOOL["function"]}
    called = client.responses.create(
        model=MODEL,
        input="Where?",
        tools=[function],
        tool_choice={"type": "function", "name": "weather"},
    )
    [call] = [one for one in called.output if one.type == "function_call"]
    told = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    answer = client.responses.create(
        model=MODEL,
        previous_response_id=called.id,
        input=[told],
        tools=[function],
        tool_choice="none",
        max_output_tokens=8,
    )
    assert answer.status in DONE
    client.responses.delete(first.id)
    assert isinstance(error_of(lambda: client.responses.retrieve(first.id)), openai.NotFoundError)


def background() -> None:
    fields: Any = {"model": MODEL, "input": "Count.", "background": True}
    started = client.responses.create(**fields, max_output_tokens=16)
    assert started.status in ("queued", "in_progress")
    while (found := client.responses.retrieve(started.id)).status not in DONE:
        time.sleep(0.05)
    assert found.output_text
    endless = client.responses.create(
        **fields, max_output_tokens=3000, extra_body={"temperature": 1.5, "seed": 1}
    )
    assert client.responses.cancel(endless.id).status == "cancelled"
    again = list(client.responses.create(**fields, stream=True, max_output_tokens=16))
    resumed = list(client.responses.retrieve(again[0].response.id, stream=True, starting_after=1))
    assert [event.sequence_number for event in resumed] == [e.sequence_number for e in again[2:]]


def batches() -> None:
    body = {"model": MODEL, "messages": USER, "max_tokens": 4}
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for i in range(3)
    ]
    text = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", io.BytesIO(text)), purpose="batch")
    assert client.files.retrieve(file.id).bytes == len(text)
    assert file.id in [one.id for one in client.files.list()]
    assert client.files.content(file.id).read() == text
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    assert batch.id in [one.id for one in client.batches.list()]
    while (batch := client.batches.retrieve(batch.id)).status not in DONE:
        time.sleep(0.1)
    assert (batch.status, batch.request_counts.completed) == ("completed", 3), batch
    rows = client.files.content(batch.output_file_id).read().splitlines()
    assert {json.loads(row)["custom_id"] for row in rows} == {"r0", "r1", "r2"}
    refused = error_of(lambda: client.batches.cancel(batch.id))
    assert isinstance(refused, openai.BadRequestError)
    assert client.files.delete(file.id).deleted


def embeddings() -> None:
    found = client.embeddings.create(model=MODEL, input=["a", "b"], dimensions=8)
    assert [len(one.embedding) for one in found.data] == [8, 8]
    plain = client.embeddings.create(model=MODEL, input="a", encoding_format="float")
    assert plain.usage.prompt_tokens > 0


def error_of(call: Any) -> openai.APIStatusError | None:
    try:
        call()
    except openai.APIStatusError as error:
        return error
    return None


def errors() -> None:
    create = client.chat.completions.create
    wrong = error_of(lambda: create(model=MODEL, messages=USER, temperature=9))
    assert isinstance(wrong, openai.BadRequestError)
    assert (wrong.param, wrong.status_code) == ("temperature", 400), wrong
    unknown = error_of(lambda: create(model="huge", messages=USER))
    assert isinstance(unknown, openai.NotFoundError)
    assert unknown.code == "model_not_found"
    assert unknown.request_id
    stranger = client.with_options(api_key="sk-unknown")
    # Unless keys are required, an unknown key is nobody's: it is served.
    assert stranger.models.list().data
    limited = client.with_options(api_key="sk-limited")
    forbidden = error_of(
        lambda: limited.with_options(
            default_headers={"x-millrace-class": "batch"}
        ).chat.completions.create(model=MODEL, messages=USER)
    )
    assert isinstance(forbidden, openai.PermissionDeniedError), forbidden


def retries() -> None:
    """A key with one request at a time: the client's second request is refused until the first
    ends, and the client tries it again by itself.
    """
    statuses: list[int] = []
    refused = threading.Event()

    def note(response: httpx.Response) -> None:
        statuses.append(response.status_code)
        if response.status_code == 429:
            refused.set()

    seen = httpx.Client(event_hooks={"response": [note]}, timeout=120, trust_env=False)
    one = openai.OpenAI(base_url=URL, api_key="sk-limited", max_retries=0)
    two = openai.OpenAI(base_url=URL, api_key="sk-limited", max_retries=9, http_client=seen)
    first = one.chat.completions.create(
        model=MODEL, messages=USER, stream=True, max_tokens=3000, extra_body={"ignore_eos": True}
    )
    next(first)
    found: list[Any] = []
    fields: Any = {"model": MODEL, "messages": USER, "max_tokens": 2}
    full = error_of(lambda: one.chat.completions.create(**fields))
    assert isinstance(full, openai.RateLimitError), full
    assert float(full.response.headers["retry-after"]) > 0
    asking = threading.Thread(target=lambda: found.append(two.chat.completions.create(**fields)))
    asking.start()
    assert refused.wait(120)
    first.close()
    asking.join(120)
    assert found
    assert found[0].choices[0].finish_reason
    assert statuses[0] == 429
    assert statuses[-1] == 200


PARTS = (
    *(models, chat, tools, parsed, completions, responses, background, batches, embeddings),
    *(errors, retries),
)
for part in PARTS:
    part()
finish(parts=[part.__name__ for part in PARTS])
