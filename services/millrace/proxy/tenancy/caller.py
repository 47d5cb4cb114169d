"""Who sends a request, and what its sender may use."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.config.tenants import Access, TenantConfig
from millrace.core.limits.rules import Limits
from millrace.core.weights import DEFAULT_TENANT
from millrace.proxy.errors import ApiError, shown

#: The name of the account that all keys of a tenant share.
TENANT_ACCOUNT = "tenant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """A set of meters: the tenant's, or that of one key."""

    name: str
    limits: Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of a request. `key` is the name of its key; empty without a key.

    Empty `models` and `slo_classes` allow everything. `accounts` are those with limits.
    """

    tenant: str = DEFAULT_TENANT
    key: str = ""
    models: tuple[str, ...] = ()
    slo_classes: tuple[str, ...] = ()
    accounts: tuple[Account, ...] = ()

    def may_use(self, model: str) -> bool:
        return not self.models or model in self.models

    def check_model(self, model: str) -> None:
        """Raises ApiError (403) if the model is not allowed."""
        if not self.may_use(model):
            raise ApiError(
                403,
                f"This key may not use the model {shown(model)}; it may use "
                f"{', '.join(self.models)}.",
                param="model",
                code="model_not_allowed",
            )


def caller_of(
    tenant: str, config: TenantConfig, *, key: str = "", own: Access | None = None, digest: str = ""
) -> Caller:
    """Returns the sender of requests with a key of the tenant.

    `own` is the key's own access, inside the tenant's; its account is named by `digest`.
    """
    access = config.access
    accounts = [Account(name=TENANT_ACCOUNT, limits=access.limits)]
    models, classes = access.models, access.slo_classes
    if own is not None:
        models, classes = _inside(own.models, models), _inside(own.slo_classes, classes)
        accounts.append(Account(name=f"key-{digest[:16]}", limits=own.limits))
    return Caller(
        tenant=tenant,
        key=key,
        models=models,
        slo_classes=classes,
        accounts=tuple(account for account in accounts if account.limits.any),
    )


def _inside(own: tuple[str, ...], of_tenant: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the names that the key allows: it allows none beside its tenant's (settings)."""
    return own or of_tenant
