"""Parses custom objects, and interprets a pool's autoscaling for `core.autoscale.rules`.

The API server has checked types, bounds and enums, and filled in defaults, before anything here
runs. What is wrong nevertheless is an error here, with the field's path, value and range.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from pydantic import ValidationError

from millrace.core.autoscale.load import PoolLoad
from millrace.core.autoscale.rules import (
    AutoscaleConfig,
    DecodeTargets,
    Direction,
    KvpTargets,
    PrefillTargets,
    Targets,
)
from millrace.core.errors import ConfigError, MillraceError
from millrace_operator.observed import Object, Pool, Resource, Service, SpecT
from millrace_operator.schema import autoscaling
from millrace_operator.schema.pools import KINDS, KVPWorkerPoolSpec, PoolSpec
from millrace_operator.schema.record import structural
from millrace_operator.schema.service import ModelServiceSpec


class SpecError(MillraceError):
    """The API server accepted a spec that is wrong: the error names field and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of the operator's environment, for specs that leave them out."""

    images: Mapping[str, str]  # by role: proxy, scheduler, prefill, decode, kvp
    pull_policy: str = "IfNotPresent"
    redis_secret: str = ""  # name of a Secret in the ModelService's namespace, key `url`
    redis_per_service: bool = False  # as perService of a ModelService's spec.redis.secretRef
    tls_secret: str = ""  # the same with the keys ca.crt, tls.crt and tls.key; empty: no TLS


def parse_service(given: Object) -> Service:
    """Parses a ModelService. Raises SpecError."""
    return _parsed(given, ModelServiceSpec)


def parse_pool(given: Object) -> Pool:
    """Parses a PrefillGroup, DecodePool or KVPWorkerPool. Raises SpecError."""
    return _parsed(given, KINDS[given["kind"]].spec)


def _parsed(given: Object, model: type[SpecT]) -> Resource[SpecT]:
    try:
        spec = model.model_validate(given["spec"])
    except ValidationError as error:
        raise SpecError(_refusal(model, error)) from error
    return Resource(
        kind=given["kind"],
        metadata=given["metadata"],
        spec=spec,
        given=given["spec"],
        status=given.get("status", {}),
    )


def _refusal(model: type[SpecT], error: ValidationError) -> str:
    """Returns path, value and range of the first wrong field."""
    first = error.errors()[0]
    path, node = "spec", structural(model)
    for step in first["loc"]:
        path += f".{step}" if isinstance(step, str) else f"[{step}]"
        node = node.get("properties", {}).get(step) or node.get("items", {})
    if first["type"] == "missing":
        return f"{path} is missing"
    wanted = re.sub("^[A-Z][a-z]+ should ", "", first["msg"])
    if "minimum" in node:
        wanted = f"be an integer from {node['minimum']} to {node['maximum']}"
    return f"{path} is {first['input']!r}; it must {wanted}"


@dataclass(frozen=True, slots=True)
class Signal:
    """Maps a name of spec.autoscaling.metrics to the terms of `core.autoscale.rules`."""

    target: str  # field of the targets
    measured: str  # field of PoolLoad and PoolMetrics


SIGNALS: Mapping[str, Signal] = {
    "backlogSeconds": Signal("backlog_s", "backlog_s"),
    "utilization": Signal("utilisation", "arriving"),
    "ttftSloRatio": Signal("ttft_slo_ratio", "ttft_slo_ratio"),
    "kvUtilization": Signal("kv_utilisation", "kv_utilisation"),
    "tbtSloRatio": Signal("tbt_slo_ratio", "tbt_slo_ratio"),
}


def signals(spec: PoolSpec) -> Mapping[str, str]:
    """Returns the pool's targets by signal, in the spec's order; none for a KVPWorkerPool."""
    if (given := spec.autoscaling.metrics) is not None:
        return {signal.name: signal.target for signal in given}
    more = autoscaling.PREFILL_TARGETS if spec.role == "mixed" else {}
    return autoscaling.DECODE_TARGETS | more


def autoscale_config(spec: PoolSpec) -> AutoscaleConfig:
    """Returns a pool's limits and targets for the autoscaler. Raises SpecError."""
    given = spec.autoscaling
    try:
        return AutoscaleConfig(
            targets=_targets(spec),
            min_replicas=given.min_replicas,
            max_replicas=given.max_replicas,
            up=_direction(given.scale_up),
            down=_direction(given.scale_down),
            stale_s=float(given.metrics_stale_seconds),
            scale_to_zero=given.scale_to_zero.enabled,
            idle_s=float(given.scale_to_zero.idle_seconds),
        )
    except ConfigError as error:
        raise SpecError(_in_terms_of_the_spec(str(error))) from error


def followed(spec: PoolSpec, load: PoolLoad) -> PoolLoad:
    """Removes the signals that the pool's spec does not list from the load."""
    listed = signals(spec)
    unheard: dict[str, Any] = {s.measured: None for n, s in SIGNALS.items() if n not in listed}
    return replace(load, **unheard)


def gpus_of_a_pod(spec: PoolSpec) -> int:
    """Returns the units of spec.gpuResource per pod of an instance."""
    of_instance = spec.tensor_parallel * spec.stages if spec.gpus is None else spec.gpus
    return of_instance // pods_of_an_instance(spec)


def pods_of_an_instance(spec: PoolSpec) -> int:
    """Returns how many pods an instance has."""
    return spec.stages if spec.stage_pods == "Own" else 1


def _direction(given: autoscaling.Direction) -> Direction:
    return Direction(
        window_s=float(given.stabilization_window_seconds),
        max_step=given.max_step,
        period_s=float(given.period_seconds),
        tolerance=given.tolerance_percent / 100,
    )


def _targets(spec: PoolSpec) -> tuple[Targets, ...]:
    if isinstance(spec, KVPWorkerPoolSpec):
        return (_kvp_targets(spec),)
    given = {SIGNALS[name].target: float(target) for name, target in signals(spec).items()}
    prefill = PrefillTargets(**_of(PrefillTargets, given))
    decode = DecodeTargets(**_of(DecodeTargets, given))
    by_role: Mapping[str, tuple[Targets, ...]] = {
        "prefill": (prefill,),
        "decode": (decode,),
        "mixed": (prefill, decode),
    }
    return by_role[spec.role]


def _of(
    targets: type[PrefillTargets | DecodeTargets], given: Mapping[str, float]
) -> dict[str, float]:
    names = {field.name for field in fields(targets)}
    return {name: target for name, target in given.items() if name in names}


def _kvp_targets(spec: KVPWorkerPoolSpec) -> KvpTargets:
    return KvpTargets(
        tokens_per_worker=spec.tokens_per_worker,
        worker_kv_tokens=spec.worker_capacity_tokens,
        max_workers_per_request=spec.max_workers_per_request,
        warm_spares=spec.warm_spares,
        lead_s=float(spec.growth_lead_seconds),
    )


def _in_terms_of_the_spec(message: str) -> str:
    """Renames fields in core's message to their names in the spec."""
    fields = {f"autoscale.targets.{s.target}": f"metrics[{n}].target" for n, s in SIGNALS.items()}
    fields |= {
        "autoscale.min_replicas": "minReplicas",
        "autoscale.max_replicas": "maxReplicas",
        "autoscale.tolerance": "tolerancePercent / 100",
    }
    for ours, theirs in fields.items():
        message = message.replace(ours, f"spec.autoscaling.{theirs}")
    return message
