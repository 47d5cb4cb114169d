"""Makes the pod templates of the scheduler and the gateway, and the parts of all pod templates.

The pods meet the pod security level `restricted` (except with hostPath weights); RDMA needs a
template that adds the capability IPC_LOCK.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from millrace.core.config import Config, EngineConfig
from millrace.listening import EVERYWHERE
from millrace_operator.manifests import config_file, naming, templates
from millrace_operator.manifests.config_file import Table, digest, digest_for
from millrace_operator.manifests.gateway_models import (
    MODELS,
    MODELS_FILE,
    MODELS_FOLDER,
    GatewayModels,
    lists_models,
    others_folder,
)
from millrace_operator.observed import Service
from millrace_operator.schema.record import SecretRef
from millrace_operator.schema.service import ModelServiceSpec, ServedModel, StoreUrl, Tls
from millrace_operator.spec import Defaults, SpecError

CACHE = "/cache"

#: The user and the group of the images.
USER = 65532

#: Seconds beyond a pod's drain time before Kubernetes kills it: it must also deregister.
GOODBYE_S = 60
#: Seconds that an ending gateway pod still serves, until no endpoint list names it.
LINGER_S = 5
#: Weights take long to load: the limit is half an hour, in steps of 5 s.
STARTUP_PROBES = 360


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The values that all pods of a ModelService share. Raises SpecError for a wrong spec."""

    service: Service
    defaults: Defaults
    tables: Mapping[str, Table]
    config: Config  # the tables as the services read them
    revision: str  # hash of the fields that make two instances' KV differ
    models: GatewayModels  # of the gateway

    @classmethod
    def of(
        cls, service: Service, defaults: Defaults, listed: Mapping[str, Service] | None = None
    ) -> Context:
        """`listed` are the ModelServices of spec.gateway.models that exist."""
        if service.spec.tls is None and defaults.tls_secret:
            tls = Tls.model_validate({"secretName": defaults.tls_secret})
            service = replace(service, spec=service.spec.model_copy(update={"tls": tls}))
        tables = config_file.tables(service.spec)
        config = config_file.config(tables)
        return cls(
            service=service,
            defaults=defaults,
            tables=tables,
            config=config,
            revision=_revision(service.spec.model, config.engine),
            models=GatewayModels.of(service, listed or {}, defaults.redis_secret),
        )

    @property
    def spec(self) -> ModelServiceSpec:
        return self.service.spec

    @property
    def name(self) -> str:
        return self.service.name

    @property
    def group(self) -> str:
        """What tells its scheduler and its gateway from others with the same Redis."""
        return f"{self.service.metadata['namespace']}/{self.name}"


def _revision(model: ServedModel, engine: EngineConfig) -> str:
    return digest(
        {
            "uri": model.uri,
            "revision": model.revision,
            "dtype": engine.dtype,
            "page_tokens": engine.page_tokens,
            "max_context_tokens": engine.max_context_tokens,
        }
    )


def scheduler(context: Context) -> dict[str, Any]:
    """Returns the scheduler's pod template."""
    ports = {"grpc": naming.SCHEDULER_PORT, "metrics": config_file.METRICS_PORT}
    container = {
        **main_container(context, "scheduler", ports),
        "args": [
            *("scheduler", "--host", EVERYWHERE, "--port", str(naming.SCHEDULER_PORT)),
            *("--advertise", "$(POD_IP)"),
            *("--set", f"scheduler.group={context.group}"),
            *CONFIG_ARGS,
        ],
        "env": environment(context, "scheduler"),
        **probes("metrics"),
    }
    over = context.spec.scheduler.template
    pod = pod_spec(context, container, GOODBYE_S)
    pod["topologySpreadConstraints"] = [
        spread(naming.component_selector(context.name, "scheduler"))
    ]
    return pod_template(context, "scheduler", pod, over)


def gateway(context: Context) -> dict[str, Any]:
    """Returns the gateway's pod template."""
    gateway_spec = context.spec.gateway
    container = {
        **main_container(context, "proxy", {"http": naming.GATEWAY_PORT}),
        "args": [
            *("proxy", *_gateway_args(context)),
            *("--set", f"files.group={context.group}"),
            *("--host", EVERYWHERE, "--port", str(naming.GATEWAY_PORT)),
            *CONFIG_ARGS,
        ],
        "env": [
            *environment(context, "proxy"),
            *hub_token(context),
            *_secret("MILLRACE_PROXY__ADMIN_TOKEN", gateway_spec.admin_token_secret_ref),
        ],
        "lifecycle": {"preStop": {"sleep": {"seconds": LINGER_S}}},
        **probes("http"),
    }
    drain_s = context.config.proxy.drain_timeout_s
    grace_s = LINGER_S + math.ceil(drain_s) + GOODBYE_S
    pod = with_weights(context.spec, pod_spec(context, container, grace_s))
    for other in context.models.others:
        with_weights(other.spec, pod, f"weights-{other.name}", others_folder(other.name))
    if lists_models(context.service):
        config = {"name": naming.part_name(context.name, "config"), "items": [_as(MODELS_FILE)]}
        mount = {"mountPath": MODELS_FOLDER, "readOnly": True}
        add_volume(pod, "models", {"projected": {"sources": [{"configMap": config}]}}, mount)
    if (keys := gateway_spec.keys) is not None and (file := keys.secret_ref) is not None:
        secret = {"name": file.name, "items": [_as(file.key, config_file.KEYS_FILE)]}
        mount = {"mountPath": config_file.KEYS_FOLDER, "readOnly": True}
        add_volume(pod, "keys", {"projected": {"sources": [{"secret": secret}]}}, mount)
    pod["topologySpreadConstraints"] = [spread(naming.component_selector(context.name, "proxy"))]
    files = gateway_spec.files
    if files is not None and files.claim_name is not None:
        source = {"persistentVolumeClaim": {"claimName": files.claim_name}}
        add_volume(pod, "files", source, {"mountPath": config_file.FILES})
        # A new volume belongs to root.
        group = {"fsGroup": USER, "fsGroupChangePolicy": "OnRootMismatch"}
        pod["securityContext"] = {**pod["securityContext"], **group}
    return pod_template(context, "proxy", pod, gateway_spec.template)


CONFIG_ARGS = ("--config", f"{config_file.FOLDER}/config.toml")


def model_args(context: Context) -> list[str]:
    model = context.spec.model
    scheduler_at = f"{naming.part_name(context.name, 'scheduler')}:{naming.SCHEDULER_PORT}"
    return [
        *("--model", model.uri, "--model-name", model.name),
        *("--scheduler", scheduler_at),
    ]


def _gateway_args(context: Context) -> list[str]:
    """Names the model and its scheduler, or the file that lists several."""
    if not lists_models(context.service):
        return model_args(context)
    return ["--set", f"proxy.models_file={MODELS_FOLDER}/{MODELS_FILE}"]


def main_container(context: Context, role: str, ports: Mapping[str, int]) -> dict[str, Any]:
    return {
        "name": "millrace",
        "image": context.defaults.images.get(role, ""),
        "imagePullPolicy": context.defaults.pull_policy,
        "ports": [{"name": n, "containerPort": p, "protocol": "TCP"} for n, p in ports.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [],
        # A failed start says why in the log's last line, which then stands in the pool's status.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def pod_spec(context: Context, container: dict[str, Any], grace_s: int) -> dict[str, Any]:
    pod: dict[str, Any] = {
        "containers": [container],
        "volumes": [],
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": grace_s,
        "securityContext": {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    config_map = {"name": naming.part_name(context.name, "config"), "items": [_as("config.toml")]}
    sources: list[dict[str, Any]] = [{"configMap": config_map}]
    if (tls := context.spec.tls) is not None:
        files = [_as(file, f"tls/{file}") for file in ("ca.crt", "tls.crt", "tls.key")]
        sources.append({"secret": {"name": tls.secret_name, "items": files}})
    mount = {"mountPath": config_file.FOLDER, "readOnly": True}
    add_volume(pod, "config", {"projected": {"sources": sources}}, mount)
    add_volume(pod, "tmp", {"emptyDir": {}}, {"mountPath": "/tmp"})
    add_volume(pod, "cache", {"emptyDir": _cache_size(context)}, {"mountPath": CACHE})
    return pod


def _as(key: str, path: str = "") -> dict[str, str]:
    return {"key": key, "path": path or key}


def _cache_size(context: Context) -> dict[str, str]:
    size = context.spec.weights.hub.cache.size_limit
    return {} if size is None else {"sizeLimit": size}


def add_volume(
    pod: dict[str, Any], name: str, source: Mapping[str, Any], mount: Mapping[str, Any]
) -> None:
    pod["volumes"].append({"name": name, **source})
    pod["containers"][0]["volumeMounts"].append({"name": name, **mount})


def with_weights(
    spec: ModelServiceSpec, pod: dict[str, Any], name: str = "weights", folder: str = MODELS
) -> dict[str, Any]:
    weights = spec.weights
    mount: dict[str, Any] = {"mountPath": folder, "readOnly": True}
    if claim := weights.persistent_volume_claim:
        source = {"claimName": claim.claim_name, "readOnly": claim.read_only}
        if claim.sub_path:
            mount["subPath"] = claim.sub_path
        add_volume(pod, name, {"persistentVolumeClaim": source}, mount)
    elif path := weights.host_path:
        host = {"path": path.path, "type": "Directory"}
        add_volume(pod, name, {"hostPath": host}, mount)
    elif image := weights.image:
        add_volume(pod, name, {"image": image.model_dump(by_alias=True)}, mount)
    return pod


def environment(context: Context, role: str) -> list[dict[str, Any]]:
    """Returns the environment of a pod that uses the store."""
    defaults = context.defaults
    redis = context.spec.redis.secret_ref if context.spec.redis else None
    if redis is None and defaults.redis_secret:
        given = {"name": defaults.redis_secret, "perService": defaults.redis_per_service}
        redis = StoreUrl.model_validate(given)
    if redis is None:
        raise SpecError("spec.redis is missing; the operator has no Redis server of its own")
    url = _secret("MILLRACE_STORE__URL", SecretRef(name=redis.name, key=redis.key_of(role)))
    return [*identity(), *url]


def identity() -> list[dict[str, Any]]:
    """Returns a pod's names and its writable folders, in its environment."""
    fields = {
        "POD_NAME": "metadata.name",
        "POD_IP": "status.podIP",
        "NODE_NAME": "spec.nodeName",
    }
    return [
        *({"name": n, "valueFrom": {"fieldRef": {"fieldPath": p}}} for n, p in fields.items()),
        {"name": "HOME", "value": CACHE},
        {"name": "XDG_CACHE_HOME", "value": CACHE},
        {"name": "HF_HOME", "value": f"{CACHE}/huggingface"},
    ]


def hub_token(context: Context) -> list[dict[str, Any]]:
    return _secret("HF_TOKEN", context.spec.weights.hub.secret_ref)


def _secret(name: str, ref: SecretRef | None) -> list[dict[str, Any]]:
    if ref is None:
        return []
    source = {"secretKeyRef": {"name": ref.name, "key": ref.key}}
    return [{"name": name, "valueFrom": source}]


def probes(port: str) -> dict[str, Any]:
    """Makes HTTP probes: Kubernetes' gRPC probes do not support TLS."""

    def get(path: str, period_s: int, failures: int) -> dict[str, Any]:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": period_s,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    return {
        "startupProbe": get("/health", 5, STARTUP_PROBES),
        "livenessProbe": get("/health", 10, 6),
        "readinessProbe": get("/ready", 5, 2),
    }


def spread(selector: Mapping[str, str]) -> dict[str, Any]:
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": dict(selector)},
    }


def pod_template(
    context: Context,
    component: str,
    pod: Mapping[str, Any],
    over: Mapping[str, Any] | None,
    *,
    reads: str = "",
    more: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Merges the user's template over ours; the labels of selectors stay ours."""
    read = digest_for(reads or component, context.tables)
    base = {"metadata": {"labels": {}, "annotations": {naming.CONFIG: read}}, "spec": pod}
    template = templates.merged(base, over or {}, "spec.template")
    own = {**naming.labels(context.name, component), **(more or {})}
    template["metadata"]["labels"] |= own
    images = [c.get("image") for c in template["spec"]["containers"] if c["name"] == "millrace"]
    if not any(images):
        raise SpecError(
            f"the container millrace of {component} has no image; name one in its template"
        )
    return template
