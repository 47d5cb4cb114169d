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
            "type": text("What it speaks of.", longest=64),
            "status": {
                "type": "string",
                "description": "True, False or Unknown.",
                "enum": ["True", "False", "Unknown"],
            },
            "reason": text("Why, in one word.", longest=128),
            "message": text("Why, for people.", longest=1024),
            "lastTransitionTime": moment("When its status changed last."),
            "observedGeneration": generation("Generation of the spec that it speaks of."),
        },
        required=("type", "status", "reason", "message", "lastTransitionTime"),
    )
    return keyed_list(doc, "type", 16, condition)


def service_status() -> Schema:
    ready = "Ready instances of those that are wanted, as 2/3"
    return record(
        "What there is.",
        {
            "observedGeneration": generation("Generation of the spec that this speaks of."),
            "phase": {
                "type": "string",
                "description": "The state in one word, for people.",
                "enum": ["Pending", "Ready", "Scaling", "Degraded", "Idle", "Paused"],
            },
            "endpoint": text("URL of the gateway inside the cluster.", longest=512),
            "prefillReady": text(f"{ready}: prefill.", longest=32),
            "decodeReady": text(f"{ready}: decode.", longest=32),
            "kvpReady": text(f"{ready}: KVP workers.", longest=32),
            "revision": text("Hash of the model's revision that is served.", longest=63),
            "conditions": _conditions("Available, Progressing, Degraded."),
        },
    )


def pool_status() -> Schema:
    metric = record(
        "One signal.",
        {
            "name": text("Its name, as in autoscaling.metrics.", longest=64),
            "value": text("What was measured, an instance.", longest=32),
            "target": text("What it is kept to.", longest=32),
        },
        required=("name", "value"),
    )
    draining = record(
        "An instance that is to leave, or was and is not known to take work again.",
        {
            "pod": text("Name of its pod."),
            "uid": text("UID of its pod.", longest=64),
            "since": moment("When it was taken out of service."),
            "reason": text("Why it leaves: ScaleIn, Rollout or Retired.", longest=32),
            "timedOut": {
                "type": "boolean",
                "description": "True once drain.timeoutSeconds have passed.",
            },
            "removed": {"type": "boolean", "description": "True once its pod was told to end."},
            "returning": {
                "type": "boolean",
                "description": "True where it is wanted again and the scheduler can't be told yet.",
            },
        },
        required=("pod", "since"),
    )
    return record(
        "What there is.",
        {
            "observedGeneration": generation("Generation of the spec that this speaks of."),
            "replicas": count("Instances that there are, starting and draining ones included."),
            "readyReplicas": count("Instances that take work."),
            "updatedReplicas": count("Instances of the current template."),
            "updatedReadyReplicas": count("Instances of the current template that take work."),
            "desiredReplicas": count("Instances that the signals ask for, within the limits."),
            "drainingReplicas": count("Instances that end their work and leave."),
            "recommendationReason": text("Why desiredReplicas is what it is.", longest=512),
            "limitedBy": text(
                "What keeps desiredReplicas from what the signals ask for: step, minimum, "
                "maximum or quota.",
                longest=32,
            ),
            "draining": keyed_list("Instances that are to leave.", "pod", 1000, draining),
            "selector": text("Selects the pool's pods; an HPA reads it.", longest=512),
            "lastScaleTime": moment("When the operator set spec.replicas last."),
            "lastScaleReason": text("Why.", longest=512),
            "revision": text("Hash of the model's revision that instances are to serve."),
            "servingRevisions": {
                "type": "array",
                "description": "Hashes of the revisions of instances that take work.",
                "maxItems": 16,
                "x-kubernetes-list-type": "set",
                "items": text("One hash.", longest=63),
            },
            "template": text("Hash of the pod template that instances are to have."),
            "metricsTime": moment("When the signals below were measured."),
            "metrics": keyed_list("Signals that were measured.", "name", 8, metric),
            "conditions": _conditions(
                "Available, Progressing, MetricsAvailable, ScalingActive, ScalingLimited, "
                "Draining, Degraded."
            ),
        },
    )
