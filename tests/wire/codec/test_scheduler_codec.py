"""Every message is decoded into its event, every effect encoded as its message."""

from __future__ import annotations

import math
import typing

import pytest

from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk
from millrace.core.scheduler import commands, effects, events
from millrace.core.weights import Weights
from millrace.wire import fleet_messages as messages
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec.derive import derive
from millrace.wire.codec.enums import MessageError
from millrace.wire.codec.incarnation import MEMBER
from millrace.wire.codec.request_spec import spec_of
from millrace.wire.pb import common_pb2, scheduler_pb2

LATENCY = Latency(a=1, b=2, c=3, d=4, points=((16, 0.5), (64, 0.5), (100, 2.0)))
LATENCIES = SpLatency(by_sp={1: Latency(a=1, b=2, c=3, d=4), 2: Latency(b=1), 8: LATENCY})
_LATENCIES = derive(SpLatency, scheduler_pb2.SpLatency)


def test_a_registration_carries_all_of_its_card():
    card = codec.joined(
        scheduler_pb2.Register(
            incarnation=common_pb2.Incarnation(id="d", generation=7),
            role=scheduler_pb2.ROLE_DECODE,
            address="h:1",
            model_hash="m",
            kv_pages=2,
            page_tokens=3,
            max_context_tokens=4,
            max_batch=5,
            latency=_LATENCIES.encode(LATENCIES),
            node="n",
            kv_layers=6,
            block_tokens=9,
            decode_step=scheduler_pb2.DecodeStepTime(
                base_s=0.5, per_sequence_s=0.25, per_context_token_s=0.125
            ),
        )
    )
    assert card == events.InstanceJoined(
        instance_id="d",
        generation=7,
        role="decode",
        kv_pages=2,
        page_tokens=3,
        max_context_tokens=4,
        max_batch=5,
        model_hash="m",
        latency=LATENCIES,
        node="n",
        kv_layers=6,
        decode_step=DecodeStepTime.of((0.5, 0.25, 0.125)),
        block_tokens=9,
    )


@pytest.mark.parametrize(
    "groups, message",
    [
        ({}, r"latency.by_sp has the degrees \(\); they must start with 1"),
        ({2: {"b": 1}}, r"latency.by_sp has the degrees \(2,\); they must start with 1"),
        ({0: {"b": 1}, 1: {}}, r"latency.by_sp has the degrees \(0, 1\); they must start with 1"),
        ({1: {}, 4: {"c": -1}}, r"latency.by_sp\[4\].c is -1.0; it must be finite and 0 or more"),
        ({1: {"d": math.nan}}, r"latency.by_sp\[1\].d is nan; it must be finite and 0 or more"),
    ],
)
def test_times_of_groups_that_make_no_sense_are_named(groups, message):
    register = scheduler_pb2.Register(
        incarnation=common_pb2.Incarnation(id="p", generation=7),
        role=scheduler_pb2.ROLE_PREFILL,
        address="h:1",
        model_hash="m",
        kv_pages=2,
        page_tokens=3,
        max_context_tokens=4,
        latency=scheduler_pb2.SpLatency(
            by_sp={sp: scheduler_pb2.Latency(**of) for sp, of in groups.items()}
        ),
    )
    with pytest.raises(MessageError, match=message):
        codec.joined(register)


@pytest.mark.parametrize(
    "wanted, message",
    [
        ({}, "neither rate nor rates is given"),
        ({"rate": -0.1}, "rate is -0.1; it must be between 0 and 1"),
        ({"rate": math.nan}, "rate is nan; it must be between 0 and 1"),
        ({"rates": "a"}, "rates is 'a': improvement_rates is 'a'; write it as"),
        ({"rates": "1:0.1,1:0.2"}, "they must ascend"),
    ],
)
def test_an_improvement_rate_that_makes_no_sense_is_named(wanted, message):
    with pytest.raises(MessageError, match=message):
        codec.improvement_rate_changed(scheduler_pb2.SetImprovementRateRequest(**wanted))


def test_an_improvement_rate_is_a_number_or_a_table():
    rate = scheduler_pb2.SetImprovementRateRequest(rate=0.0)
    assert codec.improvement_rate_changed(rate) == events.ImprovementRateChanged(rate=0.0)
    table = scheduler_pb2.SetImprovementRateRequest(rates="0.5:0.1,2:0.3")
    rows = ((0.5, 0.1), (2.0, 0.3))
    assert codec.improvement_rate_changed(table) == events.ImprovementRateChanged(rows=rows)


def test_measured_points_reach_the_scheduler():
    register = scheduler_pb2.Register(
        incarnation=common_pb2.Incarnation(id="p", generation=7),
        role=scheduler_pb2.ROLE_PREFILL,
        address="h:1",
        model_hash="m",
        kv_pages=2,
        page_tokens=3,
        max_context_tokens=4,
        latency=_LATENCIES.encode(SpLatency(by_sp={1: LATENCY})),
    )
    assert codec.joined(register).latency == SpLatency(by_sp={1: LATENCY})
    register.latency.by_sp[1].points[1].seconds = 0.25
    with pytest.raises(MessageError, match=r"latency.by_sp\[1\].points has \(64, 0.25\)"):
        codec.joined(register)


def test_a_spec_becomes_a_request_of_the_schedulers_time():
    spec = common_pb2.RequestSpec(
        request_id="r",
        prompt_tokens=10,
        sampling=common_pb2.SamplingParams(max_tokens=20, n=3),
        slo=common_pb2.Slo(ttft_s=0.5, class_name="chat"),
        arrival_unix_s=1e9,
        prefix_hashes=[(1 << 64) - 1, 7],
    )
    made = codec.request(spec, proxy_id="x#1", now_s=12.5)
    assert (made.id, made.proxy_id, made.arrival_s) == ("r", "x#1", 12.5)
    assert (made.prompt_tokens, made.max_new_tokens, made.choices) == (10, 20, 3)
    assert (made.slo.ttft_s, made.slo.tbt_s, made.slo.class_name) == (0.5, None, "chat")
    assert made.prefix_hashes == ((1 << 64) - 1, 7)


@pytest.mark.parametrize(
    ("pooling", "prompt_logprobs", "resumable"),
    [("last", -1, True), ("mean", -1, False), ("", 0, False)],
)
def test_a_spec_without_new_tokens_is_prefill_only(pooling, prompt_logprobs, resumable):
    """What needs hidden states of the whole prompt never begins after cached or kept tokens."""
    spec = common_pb2.RequestSpec(
        request_id="r",
        prompt_tokens=100,
        sampling=common_pb2.SamplingParams(max_tokens=0, n=1, prompt_logprobs=prompt_logprobs),
        pooling=f"POOLING_{pooling.upper()}" if pooling else 0,
    )
    found = codec.request(spec, proxy_id="x", now_s=0.0)
    assert found.prefill_only and found.resumable is resumable
    assert spec_of(spec).needs_whole_prompt is not resumable


@pytest.mark.parametrize(("pooling", "max_tokens"), [("POOLING_LAST", 1), (0, 0)])
def test_new_tokens_that_do_not_fit_the_result_are_named(pooling, max_tokens):
    spec = common_pb2.RequestSpec(
        request_id="r",
        prompt_tokens=100,
        sampling=common_pb2.SamplingParams(max_tokens=max_tokens, n=1, prompt_logprobs=-1),
        pooling=pooling,
    )
    with pytest.raises(MessageError, match=r"sampling\.max_tokens"):
        codec.request(spec, proxy_id="x", now_s=0.0)


@pytest.mark.parametrize("name", ["ttft_s", "tbt_s", "e2e_s"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_an_objective_that_is_no_time_is_named(name, value):
    spec = common_pb2.RequestSpec(
        request_id="r",
        prompt_tokens=10,
        sampling=common_pb2.SamplingParams(max_tokens=20, n=3),
        slo=common_pb2.Slo(**{name: value}),
    )
    with pytest.raises(MessageError, match=f"slo.{name} is {value}; it must be 0"):
        codec.request(spec, proxy_id="x#1", now_s=12.5)


def test_a_known_policy_becomes_an_event_and_an_unknown_one_names_those_there_are():
    wanted = scheduler_pb2.SetPolicyRequest(policy="lars")
    assert codec.policy_changed(wanted) == events.PolicyChanged(policy="lars")
    with pytest.raises(MessageError, match="policy is 'x'; it must be one of fcfs, edf, "):
        codec.policy_changed(scheduler_pb2.SetPolicyRequest(policy="x"))


def test_weights_become_an_event_of_their_own():
    known = Weights(classes={"chat": 1.0, "default": 1.0}, tenants={"default": 1.0})
    message = scheduler_pb2.Weights(classes={"chat": 2.0})
    only = scheduler_pb2.SetPolicyRequest(weights=message)
    assert codec.policy_changed(only) is None
    assert codec.weights_changed(only, known) == events.WeightsChanged(
        weights=Weights(classes={"chat": 2.0})
    )
    assert codec.weights_changed(scheduler_pb2.SetPolicyRequest(policy="edf"), known) is None
    for given, told in (
        ({"classes": {"x": 1.0}}, "weights.classes is 'x'; it must be one of chat, default"),
        ({"tenants": {"chat": 1.0}}, "weights.tenants is 'chat'; it must be one of default"),
        ({"classes": {"chat": 0.0}}, "weights.classes.chat is 0.0; it must be between 0.001 and"),
        ({"classes": {"chat": float("nan")}}, "weights.classes.chat is nan; it must be between"),
    ):
        wrong = scheduler_pb2.SetPolicyRequest(weights=scheduler_pb2.Weights(**given))
        with pytest.raises(MessageError, match=told):
            codec.weights_changed(wrong, known)


def test_a_request_without_a_tenant_is_the_default_tenants():
    for given, tenant in ({}, "default"), ({"tenant": "acme"}, "acme"):
        spec = common_pb2.RequestSpec(
            request_id="r",
            prompt_tokens=10,
            sampling=common_pb2.SamplingParams(max_tokens=20, n=3),
            **given,
        )
        assert codec.request(spec, proxy_id="x#1", now_s=12.5).tenant == tenant


def test_an_order_reaches_the_wire_entry_by_entry():
    a, b, c = (effects.ChunkRef(request_id=name, chunk_index=i) for i, name in enumerate("abc"))
    sent = codec.command_message(effects.Order(instance_id="p0", queue=((c,), (a, b)))).order
    assert [[(ref.request_id, ref.chunk_index) for ref in e.chunks] for e in sent.queue] == [
        [("c", 2)],
        [("a", 0), ("b", 1)],
    ]
    empty = codec.command_message(effects.Order(instance_id="p0", queue=()))
    assert empty.WhichOneof("kind") == "order" and not empty.order.queue


PREFILLED = Chunk(index=0, start_token=0, num_tokens=9, instance_ids=("p", "q"))
SPEC = common_pb2.RequestSpec(request_id="r", prompt_tokens=9)
MEMBERS = {
    name: commands.Member(incarnation=Incarnation(name, 1 << 63), address=f"h:{name}")
    for name in "dkpq"
}
SHARDS = (
    commands.KvShard(worker=MEMBERS["d"], start_token=0, end_token=32),
    commands.KvShard(worker=MEMBERS["k"], start_token=32, end_token=48),
)
COMMANDS = {
    "registered": commands.Registered(
        heartbeat_s=0.5, preemption="operator", policy="lars", lease="scheduler:a"
    ),
    "admit_decode": messages.SendAdmitDecode(
        request=SPEC.SerializeToString(),
        attempt=2,
        kept_tokens=3,
        shards=SHARDS,
        expected_tokens=81.5,
    ),
    "run_prefill": messages.SendRunPrefill(
        request=SPEC.SerializeToString(),
        chunks=(PREFILLED,),
        decode=MEMBERS["d"],
        attempt=2,
        group=(MEMBERS["p"], MEMBERS["q"]),
        shards=SHARDS,
    ),
    "order": effects.Order(
        instance_id="p", queue=((effects.ChunkRef(request_id="r", chunk_index=1),),)
    ),
    "cancel": effects.CancelOn(instance_id="p", request_id="r", reason="the client left"),
    "drain": commands.Drain(abort=True),
    "keep_traces": commands.KeepTraces(trace_ids=("4bf92f3577b34da6a3ce929d0e0e4736",)),
    "policy": commands.PolicyInForce(
        name="edf", weights=Weights(classes={"chat": 2.0}, tenants={"acme": 0.5})
    ),
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_every_command_reaches_the_wire_with_all_its_fields(kind):
    command = COMMANDS[kind]
    message = codec.command_message(command)
    assert message.WhichOneof("kind") == codec.command_kind(command) == kind
    told = getattr(message, kind)
    names = {field.name for field in told.DESCRIPTOR.fields}
    assert {field.name for field, _ in told.ListFields()} == names


def test_every_kind_of_command_has_its_codec():
    kinds = {f.name for f in scheduler_pb2.WorkerCommand.DESCRIPTOR.oneofs_by_name["kind"].fields}
    assert kinds == set(COMMANDS)
    wanted = set(typing.get_args(messages.WorkerCommand))
    assert {type(command) for command in COMMANDS.values()} == wanted


def test_commands_name_the_members_and_carry_the_spec():
    run = codec.command_message(COMMANDS["run_prefill"]).run_prefill
    admit = codec.command_message(COMMANDS["admit_decode"]).admit_decode
    assert run.request == admit.request == SPEC
    assert (run.attempt, admit.attempt, admit.kept_tokens) == (2, 2, 3)
    assert [(c.index, c.start_token, c.num_tokens, list(c.instance_ids)) for c in run.chunks] == [
        (0, 0, 9, ["p", "q"])
    ]
    assert MEMBER.decode(run.decode) == MEMBERS["d"]
    assert [MEMBER.decode(one).incarnation.id for one in run.group] == ["p", "q"]
    for shards in (run.shards, admit.shards):
        assert [(MEMBER.decode(s.worker), s.start_token, s.end_token) for s in shards] == [
            (MEMBERS["d"], 0, 32),
            (MEMBERS["k"], 32, 48),
        ]


def test_settings_and_cancellations_reach_the_wire_as_they_are():
    told = codec.command_message(COMMANDS["registered"]).registered
    assert told.heartbeat_s == 0.5
    assert (told.preemption, told.policy) == (scheduler_pb2.PREEMPTION_OPERATOR, "lars")
    cancel = codec.command_message(COMMANDS["cancel"]).cancel
    assert (cancel.request_id, cancel.reason) == ("r", "the client left")
    assert codec.command_message(COMMANDS["drain"]).drain.abort
    assert codec.command_message(COMMANDS["policy"]).policy.name == "edf"


@pytest.mark.parametrize("role, needs_batch", [("prefill", 0), ("kvp", 0), ("mixed", 1)])
def test_only_who_decodes_has_a_batch(role, needs_batch):
    message = scheduler_pb2.Register(
        incarnation=common_pb2.Incarnation(id="i", generation=1),
        role=codec.ROLES.number[role],
        address="h:1",
        model_hash="m",
        kv_pages=2,
        page_tokens=3,
        max_context_tokens=4,
    )
    if needs_batch:
        with pytest.raises(MessageError, match="max_batch is 0; it must be at least 1"):
            codec.joined(message)
        message.max_batch = 1
    assert codec.joined(message).role == role
    for unknown in (0, 99):
        message.role = unknown
        wanted = f"role is {unknown}; it must be prefill or decode or mixed or kvp"
        with pytest.raises(MessageError, match=wanted):
            codec.joined(message)


def test_blocks_of_a_cache_end_with_pages():
    message = scheduler_pb2.Register(
        incarnation=common_pb2.Incarnation(id="i", generation=1),
        role=scheduler_pb2.ROLE_PREFILL,
        address="h:1",
        model_hash="m",
        kv_pages=2,
        page_tokens=3,
        max_context_tokens=4,
        block_tokens=7,
    )
    with pytest.raises(MessageError, match="block_tokens is 7; it must be a multiple of pa"):
        codec.joined(message)


def test_a_step_time_that_makes_no_sense_is_named():
    message = scheduler_pb2.Register(
        incarnation=common_pb2.Incarnation(id="i", generation=1),
        role=scheduler_pb2.ROLE_DECODE,
        address="h:1",
        model_hash="m",
        kv_pages=2,
        page_tokens=3,
        max_context_tokens=4,
        max_batch=1,
        decode_step=scheduler_pb2.DecodeStepTime(per_sequence_s=-1.0),
    )
    with pytest.raises(MessageError, match=r"decode_step.per_sequence_s is -1.0; it must"):
        codec.joined(message)
