"""/v1/embeddings, /v1/score and /v1/rerank."""

from __future__ import annotations

import asyncio
import base64
import json

import numpy as np
import openai
import pytest

from millrace.bench.gateway.stub_model import HIDDEN_SIZE, write_stub_model
from millrace.core.errors import ModelError
from millrace.proxy.http.endpoints import pooled
from millrace.proxy.model_card import read_model_card
from support.gateway import CONTEXT_TOKENS, MODEL, Script, gateway
from support.live_stack import eventually

#: Of the texts of a request, in order.
VECTORS = [
    [3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0, 12.0],
    [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 5.0],
    [-3.0, -4.0, 0.0, 0.0, 0.0, 0.0, 0.0, -12.0],
]
UNIT = [(np.array(v) / np.linalg.norm(v)).tolist() for v in VECTORS]


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        running.fleet.script = Script(vectors=VECTORS)
        yield running


async def test_the_openai_client_gets_unit_vectors(stack):
    answer = await stack.client.embeddings.create(model=MODEL, input="hi")  # asks for base64
    [found] = answer.data
    assert found.embedding == pytest.approx(UNIT[0], abs=1e-7)
    assert (answer.object, answer.model, found.object, found.index) == (
        *("list", MODEL),
        *("embedding", 0),
    )
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (3, 3)  # <|bos|> h i
    [spec] = stack.fleet.specs
    assert (spec.pooling, spec.sampling.max_tokens, spec.prompt_tokens) == ("last", 0, 3)
    assert spec.sampling.prompt_logprobs == -1


@pytest.mark.parametrize(
    "texts", [["a", "b", "c"], [[7], [8, 9], [10]], [7, 8, 9], "one", ["only"]]
)
async def test_every_form_of_input(stack, texts):
    answer = await stack.client.embeddings.create(
        model=MODEL, input=texts, encoding_format="float", user="me"
    )
    count = 3 if isinstance(texts[0], str) and len(texts) == 3 and texts != "one" else 1
    count = len(texts) if isinstance(texts, list) and not isinstance(texts[0], int) else count
    assert [one.index for one in answer.data] == list(range(count))
    for one, expected in zip(answer.data, UNIT, strict=False):
        assert one.embedding == pytest.approx(expected, abs=1e-7)
    assert answer.usage.prompt_tokens == sum(s.prompt_tokens for s in stack.fleet.specs)
    assert len({spec.request_id for spec in stack.fleet.specs}) == count


async def test_both_encodings_hold_the_same_floats(stack):
    body = {"model": MODEL, "input": "hi"}
    as_floats = (await stack.http.post("/v1/embeddings", json=body)).json()
    body["encoding_format"] = "base64"
    as_text = (await stack.http.post("/v1/embeddings", json=body)).json()
    numbers = np.frombuffer(base64.b64decode(as_text["data"][0]["embedding"]), dtype="<f4")
    # The second request has the script's second vector.
    assert numbers.tolist() == UNIT[1]
    told = np.array(as_floats["data"][0]["embedding"], dtype="<f4")
    assert told.tolist() == np.array(UNIT[0], dtype="<f4").tolist()


async def test_dimensions_cut_and_scale(stack):
    answer = await stack.client.embeddings.create(model=MODEL, input=["hi", "ho"], dimensions=2)
    assert [one.embedding for one in answer.data] == [pytest.approx([0.6, 0.8]), [1.0, 0.0]]


async def test_without_normalisation(stack):
    answer = await stack.client.embeddings.create(
        model=MODEL, input="hi", extra_body={"normalize": False}
    )
    assert answer.data[0].embedding == VECTORS[0]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("input", "", "input"),
        ("input", [], "input"),
        ("input", ["a", ""], "input[1]"),
        ("input", [[1], [1 << 20]], "input[1][0]"),
        ("input", ["a"] * 2049, "input"),
        ("input", None, "input"),
        ("input", 7, "input"),
        ("dimensions", 0, "dimensions"),
        ("dimensions", HIDDEN_SIZE + 1, "dimensions"),
        ("encoding_format", "hex", "encoding_format"),
        ("truncate_prompt_tokens", 0, "truncate_prompt_tokens"),
        ("temperature", 1, "temperature"),
    ],
)
async def test_errors_name_the_field(stack, field, value, param):
    body = {"model": MODEL, "input": "hi", field: value}
    response = await stack.http.post("/v1/embeddings", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert not stack.fleet.specs


async def test_an_unknown_model(stack):
    with pytest.raises(openai.NotFoundError):
        await stack.client.embeddings.create(model="other", input="hi")


async def test_a_text_may_fill_the_context_and_no_more(stack):
    full = [7] * CONTEXT_TOKENS
    assert (await stack.client.embeddings.create(model=MODEL, input=full)).data
    response = await stack.http.post(
        "/v1/embeddings", json={"model": MODEL, "input": [[7], [*full, 7]]}
    )
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("input[1]", "context_length_exceeded")


async def test_a_failed_text_fails_the_whole_answer(stack):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.refuse(spec, "overloaded", "full", 2.0)
    )
    response = await stack.http.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]})
    assert (response.status_code, response.headers["retry-after"]) == (429, "2")


async def test_a_client_that_leaves_ends_its_requests(stack):
    stack.fleet.script = Script(on_submit=stack.fleet.place)
    asked = asyncio.create_task(
        stack.http.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"]})
    )
    await eventually(lambda: len(stack.fleet.specs) == 2)
    asked.cancel()
    wanted = [(spec.request_id, "disconnected") for spec in stack.fleet.specs]

    def of_the_client() -> list[tuple[str, str]]:
        """Without those of placements that come after it."""
        told = [(one.request_id, one.reason) for one in stack.fleet.cancels]
        return [one for one in told if one[1] != "its answer has ended"]

    await eventually(lambda: sorted(of_the_client()) == sorted(wanted))


async def test_a_lost_instance_is_asked_again(stack):
    """The result of the first attempt is lost with its instance: the text is prefilled again."""
    stack.fleet.script = Script(
        vectors=VECTORS,
        on_submit=lambda spec: (
            stack.fleet.fail(spec, "prefill died", resumable=True)
            if len(stack.fleet.specs) == 1
            else (stack.fleet.place(spec), stack.fleet.play_later(spec))
        ),
    )
    answer = await stack.client.embeddings.create(model=MODEL, input="hi")
    assert answer.data[0].embedding == UNIT[1]
    first, second = stack.fleet.specs
    assert (second.prompt_tokens, second.pooling) == (first.prompt_tokens, first.pooling)


async def test_the_cache_is_shared_by_salt_for_the_last_token(tmp_path):
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(vectors=VECTORS)
        text = "a long text " * 20
        for extra in ({}, {"cache_salt": "x"}, {"cache_prompt": False}):
            await stack.client.embeddings.create(model=MODEL, input=text, extra_body=extra)
        plain, salted, alone = stack.fleet.specs
        assert plain.prefix_hashes and salted.prefix_hashes
        assert plain.prefix_hashes != salted.prefix_hashes and not alone.prefix_hashes


async def test_the_mean_by_setting_reads_no_cache(tmp_path):
    async with gateway(tmp_path, "proxy.pooling=mean") as stack:
        stack.fleet.script = Script(vectors=VECTORS)
        await stack.client.embeddings.create(model=MODEL, input="a long text " * 20)
        [spec] = stack.fleet.specs
        assert (spec.pooling, spec.prefix_hashes) == ("mean", ())


# -- scores


def score(one: int, other: int) -> float:
    return float(np.dot(UNIT[one], UNIT[other]))


async def test_scores_of_one_to_many(stack):
    body = {"model": MODEL, "text_1": "q", "text_2": ["a", "b", "c"]}
    response = await stack.http.post("/v1/score", json=body)
    document = response.json()
    assert response.status_code == 200, document
    found = [one["score"] for one in document["data"]]
    assert found == pytest.approx([score(0, 1), score(0, 2), score(0, 3)])
    assert found[2] == -1.0
    assert [one["index"] for one in document["data"]] == [0, 1, 2]
    assert document["object"] == "list" and document["model"] == MODEL
    tokens = sum(spec.prompt_tokens for spec in stack.fleet.specs)
    assert (document["usage"]["total_tokens"], len(stack.fleet.specs)) == (tokens, 4)


async def test_scores_of_pairs(stack):
    body = {"model": MODEL, "text_1": ["q", "r"], "text_2": ["a", "b"]}
    document = (await stack.http.post("/v1/score", json=body)).json()
    found = [one["score"] for one in document["data"]]
    assert found == pytest.approx([score(0, 2), score(1, 3)])


async def test_scores_of_unequal_numbers_are_refused(stack):
    body = {"model": MODEL, "text_1": ["q", "r"], "text_2": ["a", "b", "c"]}
    response = await stack.http.post("/v1/score", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "text_1")


async def test_a_ranking_is_by_similarity(stack):
    body = {"model": MODEL, "query": "q", "documents": ["far", {"text": "near"}, "opposite"]}
    document = (await stack.http.post("/v1/rerank", json=body)).json()
    results = document["results"]
    assert [(r["index"], r["document"]["text"]) for r in results] == [
        *((1, "near"), (0, "far"), (2, "opposite")),
    ]
    assert results[0]["relevance_score"] == pytest.approx(score(0, 2))
    assert document["usage"]["total_tokens"] == sum(s.prompt_tokens for s in stack.fleet.specs)


async def test_a_ranking_shows_what_was_asked_for(stack):
    body = {"model": MODEL, "query": "q", "documents": ["far", "near", "opposite"]}
    body |= {"top_n": 1, "return_documents": False}
    [result] = (await stack.http.post("/v1/rerank", json=body)).json()["results"]
    assert result.keys() == {"index", "relevance_score"} and result["index"] == 1


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("documents", [], "documents"),
        ("documents", ["a", {"title": "b"}], "documents[1].title"),
        ("documents", ["a", 7], "documents[1]"),
        ("query", "", "query"),
        ("top_n", -1, "top_n"),
    ],
)
async def test_errors_of_a_ranking_name_the_field(stack, field, value, param):
    body = {"model": MODEL, "query": "q", "documents": ["a"], field: value}
    response = await stack.http.post("/v1/rerank", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# -- the model's files


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "hidden_size": 4}))
    return tmp_path


def pooled_by(folder, **config) -> str:
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_P", "type": "sentence_transformers.models.Pooling"},
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_P").mkdir(exist_ok=True)
    (folder / "1_P" / "config.json").write_text(json.dumps(config))
    return read_model_card(folder).embedding.pooling


def test_pooling_is_found_in_the_models_files(folder):
    facts = read_model_card(folder).embedding
    assert (facts.pooling, facts.hidden_size) == ("last", 4)
    mean, last = "pooling_mode_mean_tokens", "pooling_mode_lasttoken"
    assert pooled_by(folder, **{mean: True, last: False, "include_prompt": True}) == "mean"
    assert pooled_by(folder, **{mean: False, last: True}) == "last"
    assert pooled_by(folder, pooling_mode="lasttoken") == "last"
    assert pooled_by(folder, pooling_mode_cls_token=True) == "cls_token"
    (folder / "modules.json").write_text("{")
    with pytest.raises(ModelError, match=r"modules\.json"):
        read_model_card(folder)


async def test_a_pooling_that_no_instance_computes_is_refused(tmp_path):
    write_stub_model(tmp_path)
    pooled_by(tmp_path, pooling_mode_cls_token=True)
    async with gateway(tmp_path) as stack:
        response = await stack.http.post("/v1/embeddings", json={"model": MODEL, "input": "hi"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "model")
    assert "cls_token" in response.json()["error"]["message"]
    async with gateway(tmp_path, "proxy.pooling=last") as stack:
        stack.fleet.script = Script(vectors=VECTORS)
        assert (await stack.client.embeddings.create(model=MODEL, input="hi")).data


async def test_a_body_of_many_texts_sends_a_few_at_a_time(stack, monkeypatch):
    monkeypatch.setattr(pooled, "MOST_OPEN", 4)
    fleet, waiting, most = stack.fleet, [], 0

    def keep(spec):
        fleet.place(spec)
        waiting.append(spec)

    fleet.script = Script(vectors=VECTORS, on_submit=keep)
    texts = [f"text {i}" for i in range(11)]
    asked = asyncio.create_task(stack.client.embeddings.create(model=MODEL, input=texts))
    for answered in range(len(texts)):
        await eventually(lambda: len(waiting) == min(4, len(texts) - answered))  # noqa: B023
        await stack.http.get("/health")  # more would be there by now
        most = max(most, len(waiting))
        spec = waiting.pop()  # in another order than they came
        fleet.emit(spec.proxy.id, fleet.result(spec, fleet.script))
    found = await asked
    assert most == 4
    assert [one.index for one in found.data] == list(range(len(texts)))
    assert len(fleet.specs) == len(texts)


@pytest.mark.parametrize("leaves", [True, False])
async def test_the_texts_of_an_answer_that_has_ended_are_not_sent(stack, monkeypatch, leaves):
    monkeypatch.setattr(pooled, "MOST_OPEN", 4)
    fleet = stack.fleet
    fleet.script = Script(on_submit=fleet.place)
    asked = asyncio.create_task(stack.client.embeddings.create(model=MODEL, input=["a"] * 9))
    await eventually(lambda: len(fleet.specs) == 4)
    if leaves:
        asked.cancel()
        await fleet.cancelled.wait()
    else:
        fleet.end(fleet.specs[0], "error", "broken")
        with pytest.raises(openai.InternalServerError):
            await asked
    await stack.idle()
    assert len(fleet.specs) == 4
