"""The status of a ModelService and of a pool.

The operator writes both as plain data and reads its last status as plain data, so that a status of
another version never stops it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema

from millrace_operator.schema.record import Partial, Record, Text, doc, keyed_list

Moment = Annotated[str, WithJsonSchema({"type": "string", "format": "date-time"})]
Generation = Annotated[int, Field(json_schema_extra={"format": "int64"})]
ShortText = Annotated[str, Field(max_length=32)]
LongText = Annotated[str, Field(max_length=512)]

OBSERVED = "Generation of the spec that this speaks of."
READY = "Ready and wanted instances, as 2/3"


class Condition(Record):
    """One condition."""

    type: str = doc("Type of the condition.", max_length=64)
    status: Literal["True", "False", "Unknown"] = doc("True, False or Unknown.")
    reason: str = doc("Reason in one word.", max_length=128)
    message: str = doc("Reason as text.", max_length=1024)
    last_transition_time: Moment = doc("Time of the last change of its status.")
    observed_generation: Generation | None = doc("Generation of the spec that was observed.", None)


class ServiceStatus(Partial):
    """What there is."""

    observed_generation: Generation = doc(OBSERVED)
    phase: Literal["Pending", "Ready", "Scaling", "Degraded", "Idle", "Paused"] = doc(
        "The state in one word."
    )
    endpoint: LongText = doc("URL of the gateway inside the cluster.")
    prefill_ready: ShortText = doc(f"{READY}: prefill.")
    decode_ready: ShortText = doc(f"{READY}: decode.")
    kvp_ready: ShortText = doc(f"{READY}: KVP workers.")
    revision: str = doc("Hash of the served revision of the model.", max_length=63)
    conditions: tuple[Condition, ...] = keyed_list("Available, Progressing, Degraded.", "type", 16)


class Metric(Record):
    """One signal."""

    name: str = doc("Name of the signal, as in autoscaling.metrics.", max_length=64)
    value: ShortText = doc("Measured value per instance.")
    target: ShortText | None = doc("Target value per instance.", None)


class Draining(Record):
    """An instance that leaves, or whose cordon is not known to be lifted yet."""

    pod: Text = doc("Name of the pod.")
    uid: str | None = doc("UID of the pod.", None, max_length=64)
    since: Moment = doc("Time at which it was taken out of service.")
    reason: ShortText | None = doc("Reason: ScaleIn, Rollout, StageLeaves or Retired.", None)
    waited_seconds: int | None = doc(
        "Seconds that it has drained, in steps of 30, by a clock that no step of the wall clock "
        "changes: another operator counts on from here.",
        None,
    )
    timed_out: bool | None = doc("True once drain.timeoutSeconds have passed.", None)
    removed: bool | None = doc("True once its pod is being deleted.", None)
    returning: bool | None = doc(
        "True if it is wanted again and the scheduler can't be reached yet.", None
    )


class PoolStatus(Partial):
    """What there is."""

    observed_generation: Generation = doc(OBSERVED)
    replicas: int = doc("All instances, also starting and draining instances.")
    ready_replicas: int = doc("Instances that take work.")
    updated_replicas: int = doc("Instances of the current template.")
    updated_ready_replicas: int = doc("Instances of the current template that take work.")
    desired_replicas: int = doc("Instances that the signals ask for, within the limits.")
    draining_replicas: int = doc("Instances that drain.")
    recommendation_reason: LongText = doc("Reason of desiredReplicas.")
    limited_by: ShortText = doc(
        "The limit that keeps desiredReplicas from the signals' number: step, minimum, "
        "maximum or quota."
    )
    draining: tuple[Draining, ...] = keyed_list("Instances that leave.", "pod", 1000)
    selector: LongText = doc("Selects the pool's pods; an HPA reads it.")
    last_scale_time: Moment = doc("Time at which the operator last set spec.replicas.")
    last_scale_reason: LongText = doc("Reason of that change.")
    revision: Text = doc("Hash of the wanted revision of the model.")
    serving_revisions: tuple[Annotated[str, Field(max_length=63, description="One hash.")], ...] = (
        doc(
            "Hashes of the revisions of instances that take work.",
            max_length=16,
            json_schema_extra={"x-kubernetes-list-type": "set"},
        )
    )
    template: Text = doc("Hash of the wanted pod template.")
    metrics_time: Moment = doc("Time at which the signals in metrics were measured.")
    metrics: tuple[Metric, ...] = keyed_list("Measured signals.", "name", 8)
    conditions: tuple[Condition, ...] = keyed_list(
        "Available, Progressing, MetricsAvailable, ScalingActive, ScalingLimited, "
        "Draining, Degraded.",
        "type",
        16,
    )
