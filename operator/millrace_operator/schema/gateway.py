"""The gateway's section of a ModelService."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from millrace_operator.schema.record import (
    NonEmpty,
    PodTemplate,
    Port,
    Record,
    SecretKey,
    SecretRef,
    doc,
    keyed_list,
    pod_template,
    rule,
    section,
)


class AdminToken(SecretRef):
    """Bearer token of /admin. Without it, /admin answers only inside the pod."""

    key: SecretKey = "token"


class KeysFile(SecretRef):
    """A TOML file of tenants, with the digests of their keys. Changes need no restart."""

    key: SecretKey = "keys.toml"


class Keys(Record):
    """API keys of clients, beside those of `tenants`."""

    required: bool = doc("Whether requests without a known key are refused (401).", False)
    secret_ref: KeysFile | None = None


class Parking(Record):
    """Requests that wait while no instance can serve them."""

    timeout_seconds: int = doc(
        "Longest wait before a request gets 503, s. 0: no wait.", 300, ge=0, le=86400
    )
    max_requests: int = doc("Most requests that wait at one gateway pod.", 1024, ge=1, le=100_000)


class FileStore(Record):
    """The bytes of files and batches. Without a claim or a URL the gateway refuses them."""

    rules = (
        rule("!has(self.claimName) || !has(self.url)", "claimName and url exclude each other"),
    )

    claim_name: str | None = doc(
        "Claim of the volume that all gateway pods write: ReadWriteMany with several.",
        None,
        min_length=1,
        max_length=253,
    )
    url: str | None = doc(
        "URL for fsspec, as s3://bucket/folder.",
        None,
        max_length=1024,
        pattern=r"^[a-z][a-z0-9+.-]*://.+$",
    )


class CanaryShare(Record):
    """The share of a model's requests that another model of the gateway answers."""

    service: NonEmpty = doc("ModelService that answers them: one of gateway.models.")
    percent: int = doc("Share of the requests, in percent.", ge=0, le=100)


Aliases = Annotated[
    tuple[Annotated[NonEmpty, Field(description="A name.")], ...],
    Field(
        max_length=16,
        strict=False,
        description="Further names of the model for clients of this gateway.",
    ),
]


class GatewayModel(Record):
    """A further model of the gateway: that of another ModelService."""

    service: NonEmpty = doc("Name of a ModelService in the same namespace, with the same redis.")
    aliases: Aliases | None = None
    canary: CanaryShare | None = None


GatewayModels = Annotated[
    tuple[GatewayModel, ...],
    keyed_list("Further models at this gateway's address. Changes need no restart.", "service", 64),
]


class Gateway(Record):
    """The REST gateway."""

    replicas: int = doc("Gateway pods.", 2, ge=1, le=100)
    port: Port = doc("Port of the gateway's Service.", 80)
    admin_token_secret_ref: AdminToken | None = None
    keys: Keys | None = None
    parking: Parking = section()
    files: FileStore | None = None
    models: GatewayModels | None = None
    aliases: Aliases | None = None
    canary: CanaryShare | None = None
    template: PodTemplate | None = pod_template("the gateway")
