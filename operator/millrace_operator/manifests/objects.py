"""Makes the manifests of a ModelService and of a pool, as they are applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from millrace_operator.manifests import config_file, naming, pods
from millrace_operator.manifests.gateway_models import MODELS_FILE, lists_models
from millrace_operator.manifests.pods import Context
from millrace_operator.observed import Object, Pool, Resource
from millrace_operator.schema import API_VERSION
from millrace_operator.schema.pools import KINDS, PoolKind
from millrace_operator.schema.record import Record

Manifest = dict[str, Any]


def of_service(context: Context) -> list[Manifest]:
    """Returns every object of a ModelService, in the order of their dependencies."""
    found = [
        _config_map(context),
        _scheduler_service(context),
        _scheduler(context),
        _scheduler_budget(context),
        _gateway_service(context),
        _gateway(context),
        _gateway_budget(context),
    ]
    found += [_pool(context, kind) for kind in KINDS.values() if kind.role in context.spec.pools]
    return [naming.stamped(manifest) for manifest in found]


def of_pool(pool: Pool, makers: Iterable[Manifest]) -> list[Manifest]:
    """Returns every object of a pool; `makers` are those that make its pods."""
    found = [_headless(pool), _pool_budget(pool), *makers]
    return [naming.stamped(manifest) for manifest in found]


def changed(live: Mapping[tuple[str, str], Object], wanted: list[Manifest]) -> list[Manifest]:
    """Returns the wanted objects that must be applied: they are missing from `live`, which has
    objects by kind and name, or differ from the last apply.
    """
    return [
        manifest
        for manifest in wanted
        if _differs(live.get((manifest["kind"], manifest["metadata"]["name"])), manifest)
    ]


def _differs(live: Object | None, manifest: Manifest) -> bool:
    if live is None:
        return True
    applied = live["metadata"].get("annotations", {}).get(naming.APPLIED)
    if applied != manifest["metadata"]["annotations"][naming.APPLIED]:
        return True
    # A size that another writer has set; of pools the size is not ours.
    size = manifest["spec"].get("replicas") if "spec" in manifest else None
    return size is not None and live["spec"].get("replicas") != size


def _metadata(
    owner: Resource[Record], name: str, labels: Mapping[str, str], **more: Mapping[str, str]
) -> Manifest:
    return {
        "name": name,
        "namespace": owner.metadata["namespace"],
        "labels": dict(labels),
        **more,
        "ownerReferences": [naming.owner(owner)],
    }


def _part_metadata(context: Context, component: str) -> Manifest:
    name = naming.part_name(context.name, component)
    return _metadata(context.service, name, naming.labels(context.name, component))


def _config_map(context: Context) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _part_metadata(context, "config"),
        "data": {"config.toml": config_file.text(context.tables), **_models_file(context)},
    }


def _models_file(context: Context) -> Mapping[str, str]:
    """Returns the file that a gateway of several models reads, and follows without a restart."""
    if not lists_models(context.service):
        return {}
    return {MODELS_FILE: context.models.text(context.service, context.config)}


def _network_service(
    metadata: Manifest, selector: Mapping[str, str], ports: list[Manifest], **more: object
) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata,
        "spec": {"selector": dict(selector), "ports": ports, **more},
    }


def _port(name: str, port: int) -> Manifest:
    return {"name": name, "port": port, "targetPort": name, "protocol": "TCP"}


def _scheduler_service(context: Context) -> Manifest:
    return _network_service(
        _part_metadata(context, "scheduler"),
        naming.component_selector(context.name, "scheduler"),
        [_port("grpc", naming.SCHEDULER_PORT), _port("metrics", config_file.METRICS_PORT)],
    )


def _gateway_service(context: Context) -> Manifest:
    return _network_service(
        _part_metadata(context, "proxy"),
        naming.component_selector(context.name, "proxy"),
        [_port("http", context.spec.gateway.port)],
    )


def _deployment(context: Context, component: str, spec: Mapping[str, object]) -> Manifest:
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": _part_metadata(context, component),
        "spec": {
            "selector": {"matchLabels": naming.component_selector(context.name, component)},
            "revisionHistoryLimit": 3,
            **spec,
        },
    }


def _scheduler(context: Context) -> Manifest:
    """Makes one pod that leads and others that stand by. A new pod is ready before one ends."""
    spec = {
        "replicas": context.spec.scheduler.replicas,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pods.scheduler(context),
    }
    return _deployment(context, "scheduler", spec)


def _gateway(context: Context) -> Manifest:
    spec = {
        "replicas": context.spec.gateway.replicas,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": pods.gateway(context),
    }
    return _deployment(context, "proxy", spec)


def _budget(metadata: Manifest, selector: Mapping[str, str], **limit: int) -> Manifest:
    """Lets pods that are not ready always be evicted: they serve no requests."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata,
        "spec": {
            "selector": {"matchLabels": dict(selector)},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
            **limit,
        },
    }


def _scheduler_budget(context: Context) -> Manifest:
    # The leader and its stand-ins never leave at once.
    selector = naming.component_selector(context.name, "scheduler")
    return _budget(_part_metadata(context, "scheduler"), selector, maxUnavailable=1)


def _gateway_budget(context: Context) -> Manifest:
    # A single pod may be evicted, or a node could never be emptied.
    least = context.spec.gateway.replicas - 1
    selector = naming.component_selector(context.name, "proxy")
    return _budget(_part_metadata(context, "proxy"), selector, minAvailable=least)


def _pool(context: Context, kind: PoolKind) -> Manifest:
    """Makes a pool without `replicas`: the autoscaler, an HPA or a person sets them."""
    section = context.spec.pools[kind.role]
    initial = section.replicas
    if initial is None:
        initial = max(section.autoscaling.min_replicas, 1)
    # Unparsed, so that the pool also gets the fields of a newer CRD.
    given = {k: v for k, v in context.service.given[kind.role].items() if k != "replicas"}
    metadata = _metadata(
        context.service,
        kind.name_in(context.name),
        naming.labels(context.name, kind.role),
        annotations={naming.INITIAL: str(initial)},
    )
    return {
        "apiVersion": API_VERSION,
        "kind": kind.kind,
        "metadata": metadata,
        "spec": {"serviceRef": {"name": context.name}, **given},
    }


def pool_metadata(pool: Pool) -> Manifest:
    """Returns the metadata of a pool's objects."""
    labels = naming.labels(pool.spec.service_ref.name, KINDS[pool.kind].role)
    return _metadata(pool, pool.name, {**labels, **pool_selector(pool)})


def pool_selector(pool: Pool) -> dict[str, str]:
    """Returns the labels of all pods of a pool."""
    return {naming.POOL_LABEL: pool.name}


def instance_selector(pool: Pool) -> dict[str, str]:
    """Returns the labels of one pod per instance."""
    first = {} if pool.spec.stage_pods == "Shared" else {naming.STAGE_LABEL: naming.FIRST}
    return {**pool_selector(pool), **first}


def _headless(pool: Pool) -> Manifest:
    return _network_service(
        pool_metadata(pool),
        pool_selector(pool),
        [_port("grpc", naming.WORKER_PORT), _port("metrics", config_file.METRICS_PORT)],
        clusterIP="None",
        publishNotReadyAddresses=True,
    )


def _pool_budget(pool: Pool) -> Manifest:
    return _budget(pool_metadata(pool), pool_selector(pool), maxUnavailable=1)


def stateful_set(pool: Pool, template: Mapping[str, Any], replicas: int) -> Manifest:
    """Returns the StatefulSet of instances of a pod each."""
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": pool_metadata(pool),
        "spec": stateful_set_spec(pool, template, replicas, pool_selector(pool)),
    }


def stateful_set_spec(
    pool: Pool, template: Mapping[str, Any], replicas: int, selector: Mapping[str, str]
) -> Manifest:
    return {
        "replicas": replicas,
        "serviceName": pool.name,
        "podManagementPolicy": "Parallel",
        # The operator deletes old pods itself, one by one, once they are empty.
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": 3,
        "selector": {"matchLabels": dict(selector)},
        "template": dict(template),
    }
