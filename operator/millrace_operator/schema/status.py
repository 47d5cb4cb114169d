"""The status of a ModelService and of a pool."""

from __future__ import annotations

from millrace_operator.schema.fields import (
    Schema,
    count,
    generation,
    keyed_list,
    moment,
    record,
    text,
)


def _conditions(doc: str) -> Schema:
    condition = record(
        "One condition.",
        {
            "type": text("Type of the condition.", longest=64),
            "status": {
                "type": "string",
                "description": "True, False or Unknown.",
                "enum": ["True", "False", "Unknown"],
            },
            "reason": text("Reason in one word.", longest=128),
            "message": text("Reason as text.", longest=1024),
            "lastTransitionTime": moment("Time of the last change of its status."),
            "observedGeneration": generation("Generation of the spec that was observed."),
        },
        required=("type", "status", "reason", "message", "lastTransitionTime"),
    )
    return keyed_list(doc, "type", 16, condition)


def service_status() -> Schema:
    ready = "Ready and wanted instances, as 2/3"
    return record(
        "What there is.",
        {
            "observedGeneration": generation("Generation of the spec that this speaks of."),
            "phase": {
                "type": "string",
                "description": "The state in one word.",
                "enum": ["Pending", "Ready", "Scaling", "Degraded", "Idle", "Paused"],
            },
            "endpoint": text("URL of the gateway inside the cluster.", longest=512),
            "prefillReady": text(f"{ready}: prefill.", longest=32),
            "decodeReady": text(f"{ready}: decode.", longest=32),
            "kvpReady": text(f"{ready}: KVP workers.", longest=32),
            "revision": text("Hash of the served revision of the model.", longest=63),
            "conditions": _conditions("Available, Progressing, Degraded."),
        },
    )


def pool_status() -> Schema:
    metric = record(
        "One signal.",
        {
            "name": text("Name of the signal, as in autoscaling.metrics.", longest=64),
            "value": text("Measured value per instance.", longest=32),
            "target": text("Target value per instance.", longest=32),
        },
        required=("name", "value"),
    )
    draining = record(
        "An instance that leaves, or whose cordon is not known to be lifted yet.",
        {
            "pod": text("Name of the pod."),
            "uid": text("UID of the pod.", longest=64),
            "since": moment("Time at which it was taken out of service."),
            "reason": text("Reason: ScaleIn, Rollout or Retired.", longest=32),
            "timedOut": {
                "type": "boolean",
                "description": "True once drain.timeoutSeconds have passed.",
            },
            "removed": {"type": "boolean", "description": "True once its pod is being deleted."},
            "returning": {
                "type": "boolean",
                "description": "True if it is wanted again and the scheduler can't be reached yet.",
            },
        },
        required=("pod", "since"),
    )
    return record(
        "What there is.",
        {
            "observedGeneration": generation("Generation of the spec that this speaks of."),
            "replicas": count("All instances, also starting and draining instances."),
            "readyReplicas": count("Instances that take work."),
            "updatedReplicas": count("Instances of the current template."),
            "updatedReadyReplicas": count("Instances of the current template that take work."),
            "desiredReplicas": count("Instances that the signals ask for, within the limits."),
            "drainingReplicas": count("Instances that drain."),
            "recommendationReason": text("Reason of desiredReplicas.", longest=512),
            "limitedBy": text(
                "The limit that keeps desiredReplicas from the signals' number: step, minimum, "
                "maximum or quota.",
                longest=32,
            ),
            "draining": keyed_list("Instances that leave.", "pod", 1000, draining),
            "selector": text("Selects the pool's pods; an HPA reads it.", longest=512),
            "lastScaleTime": moment("Time at which the operator last set spec.replicas."),
            "lastScaleReason": text("Reason of that change.", longest=512),
            "revision": text("Hash of the wanted revision of the model."),
            "servingRevisions": {
                "type": "array",
                "description": "Hashes of the revisions of instances that take work.",
                "maxItems": 16,
                "x-kubernetes-list-type": "set",
                "items": text("One hash.", longest=63),
            },
            "template": text("Hash of the wanted pod template."),
            "metricsTime": moment("Time at which the signals in metrics were measured."),
            "metrics": keyed_list("Measured signals.", "name", 8, metric),
            "conditions": _conditions(
                "Available, Progressing, MetricsAvailable, ScalingActive, ScalingLimited, "
                "Draining, Degraded."
            ),
        },
    )
