"""Messages between proxies and the scheduler: every field survives protobuf."""

from __future__ import annotations

import typing
from dataclasses import replace

import pytest

from millrace.core.incarnation import Incarnation
from millrace.core.request import RequestState, Slo
from millrace.core.request_spec import Constraint, ReasoningBudget, RequestSpec, SamplingParams
from millrace.core.scheduler import effects, events
from millrace.core.scheduler.commands import KeepTraces, Member
from millrace.core.scheduler.fleet.prompt_progress import PromptProgress
from millrace.wire import fleet_messages as messages
from millrace.wire.codec import proxy as codec
from millrace.wire.codec.request_spec import decode_spec, encode_spec, spec_message, spec_of
from millrace.wire.pb import common_pb2, scheduler_pb2

DECODE = Member(incarnation=Incarnation("decode-0", 1 << 63), address="h:1")
OTHER = Member(incarnation=Incarnation("decode-1", 2), address="h:2")

SPEC = RequestSpec(
    request_id="r",
    proxy=Incarnation("proxy-0", (1 << 64) - 1),
    prompt_tokens=9,
    sampling=SamplingParams(
        max_tokens=1,
        min_tokens=2,
        temperature=0.5,
        top_p=0.25,
        top_k=3,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=-0.5,
        frequency_penalty=0.75,
        logit_bias={4: -1.0, 5: 2.5},
        seed=(1 << 64) - 1,
        stop_token_ids=(6, 7),
        n=8,
        first_choice=17,
        logprobs=9,
        prompt_logprobs=10,
        constraint=Constraint(kind="regex", text="a+"),
        allowed_token_ids=(11, 12),
        bad_words=((13,), (14, 15)),
        reasoning=ReasoningBudget(max_tokens=16, form="harmony", opened=True, calls=True),
    ),
    slo=Slo(ttft_s=0.5, tbt_s=0.1, e2e_s=2.5, class_name="chat"),
    arrival_unix_s=1e9 + 0.25,
    traceparent="00-1-2-01",
    resumed_tokens=11,
    prefix_hashes=((1 << 64) - 1, 12),
    prefix_block_tokens=13,
    prefix_root=14,
    pooling="mean",
    priority=-3,
    deaths=(Incarnation("d", 17),),
)

UPDATES = {
    "placed": messages.Placed(request_id="r", decode=DECODE, predicted_ttft_s=0.25),
    "queued": messages.Queued(request_id="r"),
    "refused": effects.Refuse(
        request_id="r", proxy_id="x", code="overloaded", message="full", retry_after_s=1.5
    ),
    "failed": effects.Fail(
        request_id="r",
        proxy_id="x",
        message="lost",
        resumable=True,
        prompt_unread=True,
        quarantined=True,
    ),
    "suspect": effects.Suspect(request_id="r", proxy_id="x", deaths=(Incarnation("d", 2),)),
    "fleet": messages.Fleet(
        decode=(DECODE, OTHER), ready=True, prefill=(OTHER,), lease="scheduler:a"
    ),
    "progress": messages.Progress(
        request_id="r",
        prompt=PromptProgress(
            state=RequestState.PREFILLING, computed_tokens=4, left_s=0.5, queue_place=2
        ),
    ),
}


def all_set(message) -> bool:
    """Whether no field of a message is empty."""
    return {field.name for field, _ in message.ListFields()} == {
        field.name for field in message.DESCRIPTOR.fields
    }


def test_every_field_of_a_spec_arrives():
    message = common_pb2.RequestSpec.FromString(encode_spec(SPEC))
    assert spec_of(message) == decode_spec(encode_spec(SPEC)) == SPEC
    assert all_set(message) and all_set(message.sampling) and all_set(message.slo)


def test_an_objective_that_is_not_given_stays_so():
    bare = RequestSpec(
        request_id="r",
        proxy=Incarnation("x", 1),
        prompt_tokens=1,
        sampling=SamplingParams(max_tokens=1),
    )
    found = spec_of(spec_message(bare))
    assert found.slo == Slo(ttft_s=None, tbt_s=None, class_name="default")
    assert found == bare


@pytest.mark.parametrize("kind", UPDATES)
def test_every_field_of_an_update_arrives(kind):
    update = UPDATES[kind]
    sent = codec.update_message(update).SerializeToString()
    message = scheduler_pb2.ProxyUpdate.FromString(sent)
    assert message.WhichOneof("kind") == codec.update_kind(update) == kind
    assert all_set(getattr(message, kind))
    assert codec.update_of(message, proxy_id="x") == update


def test_every_kind_of_update_has_its_codec():
    kinds = {f.name for f in scheduler_pb2.ProxyUpdate.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds == set(UPDATES)
    assert {type(update) for update in UPDATES.values()} == set(
        typing.get_args(messages.ProxyUpdate)
    )
    assert codec.update_of(scheduler_pb2.ProxyUpdate(), proxy_id="x") is None


@pytest.mark.parametrize("left_s", [None, 0.0])
def test_no_prediction_differs_from_no_time(left_s):
    for state in (RequestState.QUEUED, RequestState.TRANSFERRING):
        prompt = PromptProgress(state=state, computed_tokens=0, left_s=left_s)
        update = messages.Progress(request_id="r", prompt=prompt)
        assert codec.update_of(codec.update_message(update), proxy_id="x") == update


def test_a_state_that_this_release_lacks_reads_as_queued():
    message = scheduler_pb2.ProxyUpdate(
        progress=scheduler_pb2.Progress(request_id="r", prompt={"state": 99})
    )
    found = codec.update_of(message, proxy_id="x")
    assert found.prompt.state is RequestState.QUEUED


def test_a_proxy_s_items_arrive_in_order():
    first, second = (
        messages.Submit(spec=encode_spec(replace(SPEC, request_id=name))) for name in "rs"
    )
    items = [
        first,
        second,
        events.CancelRequested(request_id="r", reason="stop"),
        first,
        messages.ProxyLoad(parked_requests=2),
        messages.AskProgress(request_ids=("r", "s")),
        KeepTraces(trace_ids=("4bf92f3577b34da6a3ce929d0e0e4736",)),
    ]
    sent = codec.proxy_messages(items)
    kinds = [message.WhichOneof("kind") for message in sent]
    assert kinds == ["submit", "cancel", "submit", "load", "ask", "keep_traces"]
    assert [item for message in sent for item in codec.items_of(message)] == items
    assert codec.items_of(codec.hello(SPEC.proxy, 0)) == []
    assert all(all_set(getattr(message, message.WhichOneof("kind"))) for message in sent)


def test_many_submissions_go_in_several_batches():
    submit = messages.Submit(spec=encode_spec(SPEC))
    sent = codec.proxy_messages([submit] * (2 * codec.MAX_BATCH + 1))
    sizes = [len(message.submit.requests) for message in sent]
    assert sizes == [codec.MAX_BATCH, codec.MAX_BATCH, 1]
