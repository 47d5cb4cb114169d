"""Interprets specs: a pool's kind and autoscaling, and the fields that a spec leaves to the
operator.

The API server has checked types, bounds and enums, and filled in defaults, before anything here
runs. Everything else that is wrong is an error here, with the field's path and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

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
from millrace_operator.observed import Object
from millrace_operator.schema import pools


class SpecError(MillraceError):
    """The API server accepted a spec that is wrong: the error names field and value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Values of the operator's environment, for specs that leave them out."""

    images: Mapping[str, str]  # by role: proxy, scheduler, prefill, decode, kvp
    pull_policy: str = "IfNotPresent"
    redis_secret: str = ""  # name of a Secret in the ModelService's namespace, key `url`


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """A kind of pool: its role, and its section in a ModelService's spec.

    `role` names the section, images and labels; `role_of` gives the instances' role at the
    scheduler.
    """

    kind: str
    plural: str
    role: str

    def name_in(self, service: str) -> str:
        """Returns the name of the pool that a ModelService makes from the section."""
        return f"{service}-{self.role}"


KINDS: Mapping[str, PoolKind] = {
    kind.kind: kind
    for kind in (
        PoolKind(kind="PrefillGroup", plural="prefillgroups", role="prefill"),
        PoolKind(kind="DecodePool", plural="decodepools", role="decode"),
        PoolKind(kind="KVPWorkerPool", plural="kvpworkerpools", role="kvp"),
    )
}


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


def role_of(pool: Object) -> str:
    """Returns the role with which the pool's instances register: prefill, decode, mixed or kvp."""
    return str(pool["spec"].get("role", KINDS[pool["kind"]].role))


def signals(pool: Object) -> Sequence[Mapping[str, str]]:
    """Returns names and targets of the pool's signals; empty for a KVPWorkerPool."""
    given: Sequence[Mapping[str, str]] | None = pool["spec"]["autoscaling"].get("metrics")
    if given is not None or pool["kind"] != pools.DECODE.kind:
        return given or ()
    more = pools.DECODE.mixed_targets if role_of(pool) == "mixed" else {}
    targets = {**pools.DECODE.targets, **more}
    return [{"name": name, "target": target} for name, target in targets.items()]


def decimal(path: str, text: str) -> float:
    """Reads a number given as text. Raises SpecError."""
    try:
        return float(text)
    except ValueError as error:
        raise SpecError(f"{path} is {text!r}; it must be a decimal number") from error


def autoscale_config(pool: Object) -> AutoscaleConfig:
    """Returns a pool's limits and targets for the autoscaler. Raises SpecError."""
    given: Mapping[str, Any] = pool["spec"]["autoscaling"]
    zero = given["scaleToZero"]
    try:
        return AutoscaleConfig(
            targets=_targets(pool),
            min_replicas=given["minReplicas"],
            max_replicas=given["maxReplicas"],
            up=_direction(given["scaleUp"]),
            down=_direction(given["scaleDown"]),
            stale_s=float(given["metricsStaleSeconds"]),
            scale_to_zero=zero["enabled"],
            idle_s=float(zero["idleSeconds"]),
        )
    except ConfigError as error:
        raise SpecError(_in_terms_of_the_spec(str(error))) from error


def heard(pool: Object, load: PoolLoad) -> PoolLoad:
    """Removes the signals that the pool's spec does not list from the load."""
    listed = {signal["name"] for signal in signals(pool)}
    unheard: dict[str, Any] = {s.measured: None for n, s in SIGNALS.items() if n not in listed}
    return replace(load, **unheard)


def gpus(spec: Mapping[str, Any]) -> int:
    """Returns the units of spec.gpuResource per instance."""
    given: int | None = spec.get("gpus")
    if given is not None:
        return given
    return int(spec.get("tensorParallel", 1)) * int(spec.get("stages", 1))


def _direction(given: Mapping[str, Any]) -> Direction:
    return Direction(
        window_s=float(given["stabilizationWindowSeconds"]),
        max_step=given["maxStep"],
        period_s=float(given["periodSeconds"]),
        tolerance=given.get("tolerancePercent", 0) / 100,
    )


def _targets(pool: Object) -> tuple[Targets, ...]:
    if pool["kind"] == pools.KVP.kind:
        return (_kvp_targets(pool["spec"]),)
    given = {
        SIGNALS[signal["name"]].target: decimal(
            f"spec.autoscaling.metrics[{signal['name']}].target", signal["target"]
        )
        for signal in signals(pool)
    }
    prefill = PrefillTargets(**_of(PrefillTargets, given))
    decode = DecodeTargets(**_of(DecodeTargets, given))
    by_role: Mapping[str, tuple[Targets, ...]] = {
        "prefill": (prefill,),
        "decode": (decode,),
        "mixed": (prefill, decode),
    }
    return by_role[role_of(pool)]


def _of(
    targets: type[PrefillTargets | DecodeTargets], given: Mapping[str, float]
) -> dict[str, float]:
    names = {field.name for field in fields(targets)}
    return {name: target for name, target in given.items() if name in names}


def _kvp_targets(spec: Mapping[str, Any]) -> KvpTargets:
    return KvpTargets(
        tokens_per_worker=spec["tokensPerWorker"],
        worker_kv_tokens=spec["workerCapacityTokens"],
        max_workers_per_request=spec["maxWorkersPerRequest"],
        warm_spares=spec["warmSpares"],
        lead_s=float(spec["growthLeadSeconds"]),
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
