"""The chart's values for the platform: images, operator, Redis, ingress, security.

Helm checks them; no code parses them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, WithJsonSchema

from millrace_operator.schema.record import NonEmpty, Partial, Port, Record, Text, doc
from millrace_operator.schema.service import PullPolicy

#: An object of Kubernetes itself, which the API server checks.
Opaque = Annotated[Mapping[str, Any], WithJsonSchema({"type": "object"})]
Opaques = tuple[Opaque, ...]
Texts = Mapping[str, str]
Image = Annotated[str, Field(max_length=1024)]
Quantity = Annotated[
    str | int,
    WithJsonSchema(
        {"type": ["string", "integer"], "pattern": r"^[0-9]+(\.[0-9]+)?([EPTGMk]i?|m)?$"}
    ),
]
Hosts = tuple[Annotated[NonEmpty, Field(description="A host name.")], ...]
Hours = Annotated[str, Field(pattern="^([0-9]+(h|m|s))+$")]
Duration = Annotated[str, Field(pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$")]
Peers = Annotated[Opaques, Field(description="NetworkPolicy peers.")]
Ports = Annotated[
    tuple[Annotated[Port, Field(description="A port.")], ...], Field(description="Ports.")
]


class Resources(Partial):
    """Requests and limits of the container."""

    requests: Mapping[str, Quantity] = doc("Amount by resource.")
    limits: Mapping[str, Quantity] = doc("Amount by resource.")


class Variable(Record):
    """One variable, as of a container."""

    name: NonEmpty = doc("Name of the variable.")
    value: str | None = doc("Value of the variable.", None, max_length=32768)
    value_from: Opaque | None = doc("Source of the value.", None)


class Placement(Partial):
    """The place and the resources of pods."""

    resources: Resources
    node_selector: Texts = doc("Labels of the nodes on which pods may run.")
    affinity: Opaque = doc("Affinity, as of a pod.")
    tolerations: Opaques = doc("Tolerations, as of a pod.")
    priority_class_name: Text = doc("PriorityClass of the pods.")
    pod_annotations: Texts = doc("Annotations of the pods.")


class Pods(Placement):
    """The place, the resources and the environment of pods."""

    env: tuple[Variable, ...] = doc("Environment variables of the container.")


class ImageValues(Partial):
    """Images of the services: REGISTRY/millrace-ROLE:TAG."""

    registry: Text = doc(
        "Registry and folder, without https://.", pattern="^([^:/]+(:[0-9]+)?(/.*)?)?$"
    )
    tag: str = doc("Tag; empty: the chart's appVersion.", max_length=128)
    pull_policy: PullPolicy = doc("Pull policy of the images.")
    pull_secrets: Opaques = doc("Secrets for pulling images.")


class Images(Partial):
    """Whole image references, by role."""

    proxy: Image = doc("Image of proxy.")
    scheduler: Image = doc("Image of scheduler.")
    prefill: Image = doc("Image of prefill.")
    decode: Image = doc("Image of decode.")
    kvp: Image = doc("Image of kvp.")
    operator: Image = doc("Image of operator.")


class Operator(Pods):
    """The operator."""

    enabled: bool = doc("Whether this release runs the operator.")
    replicas: int = doc("Operator pods; only the leader acts.", ge=0, le=5)
    watch_namespaces: tuple[Annotated[NonEmpty, Field(description="A namespace.")], ...] = doc(
        "Namespaces that the operator manages; none: all."
    )
    upgrade_crds: bool = doc("Whether the operator installs its CRDs at start.")
    log_level: Literal["debug", "info", "warning", "error"] = doc("Log level.")


class ServiceAccount(Partial):
    """The operator's ServiceAccount."""

    create: bool = doc("Whether the chart creates the account.")
    name: Text = doc("Name of the account.")
    annotations: Texts = doc("Annotations of the account.")


class Persistence(Partial):
    """The volume of the append-only file."""

    enabled: bool = doc("Whether the data outlives the pod.")
    size: Quantity = doc("Size of the volume.")
    storage_class: Text = doc("StorageClass; empty: the cluster's default; -: none.")
    when_deleted: Literal["Delete", "Retain"] = doc(
        "Whether the volume is kept when Redis is deleted."
    )


class Redis(Placement):
    """The chart's own Redis."""

    enabled: bool = doc("Whether the chart runs Redis.")
    image: Image = doc("Image with a version.", pattern="^.+(:[^:/]+|@sha256:.+)$")
    existing_secret: Text = doc("Secret with the keys password and url.")
    per_service_users: bool = doc("Whether each service has a user with its own rights.")
    maxmemory: str = doc(
        "Largest memory, such as 3gb; empty: no limit.", pattern="^([0-9]+([kmg]b?)?)?$"
    )
    config: str = doc("Further lines of redis.conf.", max_length=65536)
    persistence: Persistence


class ExternalRedis(Partial):
    """An existing Redis server."""

    url: str = doc(
        "URL of the server.", max_length=2048, pattern="^(rediss?([+](sentinel|cluster))?://.+)?$"
    )
    existing_secret: Text = doc("Secret with the key url.")
    per_service_users: bool = doc("Whether the secret has a URL for each service.")
    ports: Ports = doc("Ports of the servers and Sentinels; empty: those of the URL.")


class Ingress(Partial):
    """An Ingress to the gateway."""

    enabled: bool = doc("Whether the chart creates an Ingress.")
    class_name: Text = doc("Name of the IngressClass.")
    annotations: Texts = doc("Annotations of the Ingress.")
    hosts: Hosts = doc("Host names; none: any.")
    tls: Opaques = doc("Certificates, as of an Ingress.")


class Timeouts(Partial):
    """Time-outs; 0s: none."""

    request: Duration = doc("Time-out of a whole answer.")
    backend_request: Duration = doc("Time-out of one attempt.")


class HttpRoute(Partial):
    """An HTTPRoute (Gateway API) to the gateway."""

    enabled: bool = doc("Whether the chart creates an HTTPRoute.")
    parent_refs: Opaques = doc("Gateways of the route.")
    hostnames: Hosts = doc("Host names.")
    timeouts: Timeouts
    annotations: Texts = doc("Annotations of the HTTPRoute.")


class Issuer(Partial):
    """The issuer; none: the chart creates its own CA."""

    name: Text = doc("Name of the issuer.")
    kind: Text = doc("Issuer or ClusterIssuer.")
    group: Text = doc("API group of the issuer.")


class CertManager(Partial):
    """Certificates by cert-manager."""

    enabled: bool = doc("Whether cert-manager issues the certificates.")
    issuer_ref: Issuer
    duration: Hours = doc("Lifetime of a certificate.")
    renew_before: Hours = doc("Time of renewal before the end.")


class SelfSigned(Partial):
    """Certificates that Helm makes."""

    days: int = doc("Lifetime of the certificates.", ge=1, le=36500)


class TlsValues(Partial):
    """TLS between the services."""

    enabled: bool = doc("Whether the services and the chart's Redis use TLS.")
    existing_secret: Text = doc("Secret with ca.crt, tls.crt and tls.key.")
    cert_manager: CertManager
    self_signed: SelfSigned


class Dns(Partial):
    """The DNS servers."""

    peers: Peers
    ports: Ports


class ApiServer(Dns):
    """The API server; no peers: any address."""


class NetworkPolicy(Partial):
    """Network connections of the release's pods."""

    enabled: bool = doc("Whether the chart creates NetworkPolicies.")
    clients: Opaques = doc("Peers that may send requests; none: all.")
    prometheus: Opaques = doc("Peers that may read metrics.")
    dns: Dns
    api_server: ApiServer
    hub: Literal["auto", True, False] = doc(
        "HTTPS to all addresses; auto: for pods that fetch models."
    )
    extra_egress: Opaques = doc("Egress rules of the service's pods.")
    gateways: tuple[Annotated[NonEmpty, Field(description="A ModelService.")], ...] = doc(
        "ModelServices in this namespace whose gateways serve this release's model, too."
    )
    extra_redis_clients: Opaques = doc("Other peers that may use Redis.")


class PriorityClass(Partial):
    """A PriorityClass of the service's pods."""

    create: bool = doc("Whether the chart creates a PriorityClass.")
    value: int = doc("Value of the class.", ge=-1_000_000_000, le=1_000_000_000)
    preemption_policy: Literal["PreemptLowerPriority", "Never"] = doc(
        "Whether its pods preempt other pods."
    )


class Dashboards(Partial):
    """ConfigMaps with Grafana dashboards."""

    enabled: bool = doc("Whether the chart creates these objects.")
    labels: Texts = doc("Labels of these objects.")


class PodMonitor(Dashboards):
    """PodMonitors of all pods."""

    interval: str = doc("Time between two scrapes.", pattern="^[0-9]+(ms|s|m)$")


class Alerts(Dashboards):
    """A PrometheusRule."""

    ttft_attainment: float = doc(
        "Share of requests that are to meet their TTFT objective; alerts tell of more misses.",
        gt=0,
        le=1,
    )
    tbt_attainment: float = doc("The same of TBT objectives.", gt=0, le=1)
    e2e_attainment: float = doc(
        "The same of end-to-end objectives.", alias="e2eAttainment", gt=0, le=1
    )


class Monitoring(Partial):
    """Monitoring."""

    pod_monitor: PodMonitor
    alerts: Alerts
    dashboards: Dashboards
