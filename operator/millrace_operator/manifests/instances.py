"""Makes the pod templates of a pool's instances."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace_operator.manifests import config_file, naming
from millrace_operator.manifests.config_file import digest
from millrace_operator.manifests.pods import (
    CONFIG_ARGS,
    GOODBYE_S,
    Context,
    add_volume,
    environment,
    hub_token,
    identity,
    main_container,
    model_args,
    pod_spec,
    pod_template,
    probes,
    spread,
    with_weights,
)
from millrace_operator.observed import Pool
from millrace_operator.schema.pools import KINDS, PoolSpec
from millrace_operator.spec import SpecError, gpus_of_a_pod

#: The drain time of an instance without a limit, in seconds: Kubernetes needs a number.
DAY_S = 86400

Template = dict[str, Any]


def instance(pool: Pool, context: Context) -> Template:
    """Returns the template of instances of a pod each, with the labels that rollouts read."""
    template = _first(pool, context)
    return _labelled(template, context, digest(template))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The pods of an instance whose stages have pods of their own."""

    name: str  # with -0 that of the first stage's pod; with -0-1, -0-2 those of the later stages
    first: Template
    later: Template
    later_stages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """Describes the groups of a pool. Raises SpecError for settings that forbid them."""

    pool: Pool
    context: Context
    template: str  # hash of what all groups have in common

    @classmethod
    def of(cls, pool: Pool, context: Context) -> Groups:
        _check_settings(context)
        parts = _parts(pool, context, f"{pool.name}-0", pool.name)
        return cls(pool=pool, context=context, template=digest(parts))

    def group(self, ordinal: int, subdomain: str = "") -> Group:
        """`subdomain`: the headless Service that names the pods; default: the pool's."""
        name = f"{self.pool.name}-{ordinal}"
        first, later = (
            _labelled(template, self.context, self.template)
            for template in _parts(self.pool, self.context, name, subdomain or self.pool.name)
        )
        stages = self.pool.spec.stages
        return Group(name=name, first=first, later=later, later_stages=stages - 1)


def _parts(pool: Pool, context: Context, name: str, subdomain: str) -> tuple[Template, Template]:
    """Returns the templates of the first and of the later stages' pods of the group `name`."""
    domain = f"{subdomain}.{pool.metadata['namespace']}.svc:{naming.WORKER_PORT}"
    hosts = ",".join(f"{name}-0-{stage}.{domain}" for stage in range(1, pool.spec.stages))
    first = _first(pool, context, f"engine.stage_hosts={hosts}")
    later = _later(pool, context)
    for template, stage in ((first, naming.FIRST), (later, naming.LATER)):
        template["metadata"]["labels"] |= naming.group_selector(name, stage)
    return first, later


def _first(pool: Pool, context: Context, *settings: str) -> Template:
    """Makes the template of the pod that is the instance to others."""
    spec, role = pool.spec, KINDS[pool.kind].role
    drain_s = _drain_s(spec)
    container = {
        **_container(pool, context, _instance_args(spec, context, drain_s, settings)),
        "env": [*environment(context, role), *hub_token(context), *_parallel(spec)],
    }
    return _template(pool, context, container, drain_s + GOODBYE_S)


def _later(pool: Pool, context: Context) -> Template:
    """Makes the template of a host of later stages.

    It ends after its instance: at its end it waits for as long as the instance may take to leave.
    """
    drain_s = _drain_s(pool.spec) + GOODBYE_S
    args = [
        *("stage", "--model", context.spec.model.uri),
        *("--host", "$(POD_IP)", "--port", str(naming.WORKER_PORT)),
        *("--drain-timeout-s", str(drain_s)),
        *CONFIG_ARGS,
    ]
    container = {
        **_container(pool, context, args),
        "env": [*identity(), *hub_token(context)],
    }
    return _template(pool, context, container, drain_s + GOODBYE_S)


def _container(pool: Pool, context: Context, args: list[str]) -> dict[str, Any]:
    ports = {"grpc": naming.WORKER_PORT, "metrics": config_file.METRICS_PORT}
    role = KINDS[pool.kind].role
    found = {**main_container(context, role, ports), "args": args, **probes("metrics")}
    if devices := gpus_of_a_pod(pool.spec):
        found["resources"] = {"limits": {pool.spec.gpu_resource: str(devices)}}
    return found


def _template(pool: Pool, context: Context, container: dict[str, Any], grace_s: int) -> Template:
    spec, role = pool.spec, KINDS[pool.kind].role
    pod = with_weights(context.spec, pod_spec(context, container, grace_s))
    add_volume(pod, "shm", {"emptyDir": {"medium": "Memory"}}, {"mountPath": "/dev/shm"})
    own = {naming.POOL_LABEL: pool.name}
    pod |= _placement(spec.topology_key, own)
    template = pod_template(context, role, pod, spec.template, reads=spec.role, more=own)
    if spec.stage_pods == "Own":
        _check_args(template, container)
    return template


def _labelled(template: Template, context: Context, found: str) -> Template:
    template["metadata"]["labels"][naming.REVISION_LABEL] = context.revision
    template["metadata"]["labels"][naming.TEMPLATE_LABEL] = found
    return template


def _check_args(template: Template, container: Mapping[str, Any]) -> None:
    """Raises SpecError if the user's template gives all stages the same command line."""
    (merged,) = [one for one in template["spec"]["containers"] if one["name"] == "millrace"]
    for field in ("command", "args"):
        if merged.get(field) != container.get(field):
            raise SpecError(
                f"spec.template.spec.containers[millrace].{field} is {merged.get(field)!r}; with "
                "stagePods Own it can't be set: the first and the later stages differ in it"
            )


def _check_settings(context: Context) -> None:
    """Raises SpecError for settings with which instances refuse stages on other hosts."""
    config = context.config
    for path, value, wanted in (
        ("engine.kv_pools", config.engine.kv_pools, ("auto", "own")),
        ("transfer.kv_checksum", config.transfer.kv_checksum, ("off",)),
        ("transfer.buffer_bytes", config.transfer.buffer_bytes, (0,)),
    ):
        if value not in wanted:
            choice = " or ".join(map(str, wanted))
            raise SpecError(
                f"spec.settings[{path}] is {value!r}; with stagePods Own it must be {choice}"
            )


def _drain_s(spec: PoolSpec) -> int:
    return DAY_S if spec.drain.on_timeout == "Wait" else spec.drain.timeout_seconds


def _instance_args(
    spec: PoolSpec, context: Context, drain_s: int, settings: Iterable[str]
) -> list[str]:
    command = ("colocated", "--role", "mixed") if spec.role == "mixed" else (spec.role,)
    return [
        *(*command, *model_args(context)),
        *("--id", "$(POD_NAME)", "--host", "$(POD_IP)", "--port", str(naming.WORKER_PORT)),
        *("--node", "$(NODE_NAME)", "--revision", context.revision),
        *("--drain-timeout-s", str(drain_s)),
        *CONFIG_ARGS,
        *(("--stages", str(spec.stages)) if spec.stages > 1 else ()),
        *(part for setting in settings for part in ("--set", setting)),
    ]


def _parallel(spec: PoolSpec) -> list[dict[str, Any]]:
    ranks = spec.tensor_parallel
    return [{"name": "MILLRACE_ENGINE__TENSOR_PARALLEL", "value": str(ranks)}] if ranks > 1 else []


def _placement(topology_key: str | None, selector: Mapping[str, str]) -> dict[str, Any]:
    """Places prefill instances close together, for their groups; spreads others, against
    failures.
    """
    if topology_key is None:
        return {"topologySpreadConstraints": [spread(selector)]}
    term = {
        "topologyKey": topology_key,
        "labelSelector": {"matchLabels": dict(selector)},
    }
    preferred = [{"weight": 50, "podAffinityTerm": term}]
    return {
        "affinity": {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    }
