"""Translates between the messages of workers and administrators and the core's own types."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Final

from millrace.core.cost.latency import SpLatency
from millrace.core.cost.rates import parse_rates
from millrace.core.errors import ConfigError
from millrace.core.priority import POLICIES
from millrace.core.request import Request
from millrace.core.scheduler import commands, effects, events
from millrace.core.weights import DEFAULT_TENANT, Weights, is_weight, weight_range
from millrace.wire.codec.derive import Oneof, derive
from millrace.wire.codec.enums import EnumWords, MessageError
from millrace.wire.codec.incarnation import incarnation_of
from millrace.wire.codec.instance import DRAIN, KEEP_TRACES, POLICY, REGISTERED, REGISTRATION
from millrace.wire.codec.request_spec import ENCODED, SLO
from millrace.wire.fleet_messages import SendAdmitDecode, SendRunPrefill, WorkerCommand
from millrace.wire.pb import common_pb2, scheduler_pb2

WEIGHTS = derive(Weights, scheduler_pb2.Weights)
ROLES = EnumWords(scheduler_pb2.Role, "role")
BREAKERS = EnumWords(scheduler_pb2.Breaker, "breaker", unset="")
PREEMPTIONS = EnumWords(scheduler_pb2.Preemption, "preemption", unset="")

#: The roles that run a decode batch.
_DECODES = ("decode", "mixed")

#: The fields that a registration and its event share.
_OF_CARD = (
    *("role", "kv_pages", "page_tokens", "max_context_tokens", "max_batch", "model_hash"),
    *("node", "kv_layers", "decode_step", "block_tokens", "adaptive_chunks", "held"),
)

# ---- to the scheduler


def joined(message: scheduler_pb2.Register) -> events.InstanceJoined:
    """Decodes a registration. Raises MessageError for an instance that can't be scheduled."""
    card = REGISTRATION.decode(message)
    _require("incarnation.id", card.incarnation.id, bool(card.incarnation.id), "not empty")
    _require("address", card.address, bool(card.address), "host:port")
    _require("model_hash", card.model_hash, bool(card.model_hash), "not empty")
    for name in ("kv_pages", "page_tokens", "max_context_tokens"):
        value = getattr(card, name)
        _require(name, value, value >= 1, "at least 1")
    if card.role in _DECODES:
        _require("max_batch", card.max_batch, card.max_batch >= 1, "at least 1")
    in_pages = card.block_tokens % card.page_tokens == 0
    _require("block_tokens", card.block_tokens, in_pages, "a multiple of page_tokens")
    if card.decode_step is not None:
        for field in fields(card.decode_step):
            value = getattr(card.decode_step, field.name)
            holds = 0 <= value < math.inf
            _require(f"decode_step.{field.name}", value, holds, "0 or more, and finite")
    return events.InstanceJoined(
        instance_id=card.incarnation.id,
        generation=card.incarnation.generation,
        latency=card.latency or SpLatency(),
        **{name: getattr(card, name) for name in _OF_CARD},
    )


def reopened(message: scheduler_pb2.OpenRequest, *, proxy_id: str, now_s: float) -> events.Reopened:
    """Returns a request that was submitted on an earlier stream. Raises MessageError."""
    _require("age_s", message.age_s, 0 <= message.age_s < math.inf, "0 or more, and finite")
    found = request(message.request, proxy_id=proxy_id, now_s=now_s - message.age_s)
    token_age_s = None
    if message.HasField("token_age_s"):
        token_age_s = message.token_age_s
        _require("token_age_s", token_age_s, 0 <= token_age_s < math.inf, "0 or more, and finite")
    return events.Reopened(
        request=found,
        decode=incarnation_of(message.decode) if message.HasField("decode") else None,
        token_age_s=token_age_s,
    )


def request(spec: common_pb2.RequestSpec, *, proxy_id: str, now_s: float) -> Request:
    """Returns a new request that arrived at `now_s`, the scheduler's time. Raises MessageError."""
    _require("request_id", spec.request_id, bool(spec.request_id), "not empty")
    for name, value in (
        ("prompt_tokens", spec.prompt_tokens),
        ("sampling.n", spec.sampling.n),
    ):
        _require(name, value, value >= 1, "at least 1")
    for name in ("ttft_s", "tbt_s", "e2e_s"):
        objective_s = getattr(spec.slo, name)
        _require(
            f"slo.{name}", objective_s, 0 <= objective_s < math.inf, "0 (none) or more, and finite"
        )
    scored, most = spec.sampling.prompt_logprobs >= 0, spec.sampling.max_tokens
    if spec.pooling:
        _require("sampling.max_tokens", most, most == 0, "0 with pooling")
    elif not scored:
        _require("sampling.max_tokens", most, most >= 1, "at least 1")
    return Request(
        id=spec.request_id,
        proxy_id=proxy_id,
        prompt_tokens=spec.prompt_tokens,
        max_new_tokens=spec.sampling.max_tokens,
        choices=spec.sampling.n,
        slo=SLO.decode(spec.slo),
        arrival_s=now_s,
        prefix_hashes=tuple(spec.prefix_hashes),
        tenant=spec.tenant or DEFAULT_TENANT,
        priority=spec.priority,
        # As `RequestSpec.needs_whole_prompt`, without decoding the whole spec.
        resumable=not scored and spec.pooling != common_pb2.POOLING_MEAN,
        deaths=tuple(incarnation_of(one) for one in spec.deaths),
    )


def policy_changed(message: scheduler_pb2.SetPolicyRequest) -> events.PolicyChanged | None:
    """Decodes a change of policy; None where only weights change.

    Raises MessageError, which lists all policies, for an unknown policy.
    """
    name = message.policy
    if not name and WEIGHTS.decode(message.weights) != Weights():
        return None
    _require("policy", name, name in POLICIES, "one of " + ", ".join(POLICIES))
    return events.PolicyChanged(policy=name)


def weights_changed(
    message: scheduler_pb2.SetPolicyRequest, known: Weights
) -> events.WeightsChanged | None:
    """Decodes a change of weights; None where there is none.

    Raises MessageError for a name that is not among the `known` ones, and a weight out of range.
    """
    wanted = WEIGHTS.decode(message.weights)
    if wanted == Weights():
        return None
    for field, given, names in (
        ("weights.classes", wanted.classes, known.classes),
        ("weights.tenants", wanted.tenants, known.tenants),
    ):
        for name, value in given.items():
            _require(field, name, name in names, "one of " + ", ".join(sorted(names)))
            _require(f"{field}.{name}", value, is_weight(value), weight_range())
    return events.WeightsChanged(weights=wanted)


def improvement_rate_changed(
    message: scheduler_pb2.SetImprovementRateRequest,
) -> events.ImprovementRateChanged:
    """Decodes a change. Raises MessageError for a rate outside 0 to 1, a bad table or neither."""
    match message.WhichOneof("kind"):
        case "rate":
            rate = message.rate
            _require("rate", rate, 0.0 <= rate <= 1.0, "between 0 and 1")
            return events.ImprovementRateChanged(rate=rate)
        case "rates":
            try:
                return events.ImprovementRateChanged(rows=parse_rates(message.rates).rows)
            except ConfigError as error:
                raise MessageError(f"rates is {message.rates!r}: {error}") from None
    raise MessageError("neither rate nor rates is given")


def traces_to_keep(message: scheduler_pb2.KeepTraces) -> commands.KeepTraces:
    """Raises MessageError for a malformed trace id."""
    for trace_id in message.trace_ids:
        is_id = re.fullmatch("[0-9a-f]{32}", trace_id) is not None
        _require("keep_traces.trace_ids", trace_id, is_id, "32 hexadecimal digits")
    return KEEP_TRACES.decode(message)


def _require(field: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise MessageError(f"{field} is {value!r}; it must be {wanted}")


# ---- from the scheduler to workers

_NO_ID = {"instance_id": ""}
_COMMANDS: Final[Oneof[WorkerCommand, scheduler_pb2.WorkerCommand]] = Oneof(
    scheduler_pb2.WorkerCommand,
    {
        "registered": REGISTERED,
        "admit_decode": derive(SendAdmitDecode, scheduler_pb2.AdmitDecode, request=ENCODED),
        "run_prefill": derive(SendRunPrefill, scheduler_pb2.RunPrefill, request=ENCODED),
        "order": derive(effects.Order, scheduler_pb2.Order, absent=_NO_ID),
        "cancel": derive(effects.CancelOn, scheduler_pb2.CancelRequest, absent=_NO_ID),
        "drain": DRAIN,
        "policy": POLICY,
        "keep_traces": KEEP_TRACES,
    },
)
command_message = _COMMANDS.encode
#: Returns the name of the command's field in `WorkerCommand`, for metrics.
command_kind = _COMMANDS.name
