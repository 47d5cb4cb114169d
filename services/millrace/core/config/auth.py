"""Who may use the proxy: API keys and tokens of an OpenID provider."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from millrace.core.config.fields import Section, one_of, setting, within
from millrace.core.errors import ConfigError


def _web_address(value: Any) -> str | None:  # noqa: ANN401 - a check sees any field's value
    known = isinstance(value, str) and (not value or value.startswith(("https://", "http://")))
    return None if known else "an https:// or http:// URL"


@dataclass(frozen=True, kw_only=True)
class AuthConfig(Section):
    require_key: str = setting(
        "off", one_of("on", "off"), "on: requests without a known key or token get 401"
    )
    keys_file: str = setting(
        "", None, "TOML file with tables `tenants.NAME`; the proxy reads it again when it changes"
    )
    stored_keys: str = setting(
        "off", one_of("on", "off"), "on: tenants of PUT /admin/tenants, kept in the store, count"
    )
    oidc_issuer: str = setting(
        "", None, "issuer of JSON web tokens that count as keys; empty: no tokens"
    )
    oidc_audience: str = setting("", None, "audience that a token must have")
    oidc_jwks_url: str = setting("", _web_address, "where the issuer's public keys are")
    oidc_tenant_claim: str = setting("tenant", None, "claim of a token that names its tenant")
    oidc_leeway_s: float = setting(
        10.0, within(0, 600), "difference of clocks that a token's times are allowed"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        needed = ("oidc_issuer", "oidc_audience", "oidc_jwks_url")
        given = [name for name in needed if getattr(self, name)]
        if 0 < len(given) < len(needed):
            missing = next(name for name in needed if name not in given)
            raise ConfigError(
                f"auth.{missing} is ''; it must be set, as auth.{given[0]} is: tokens need all of "
                f"{', '.join(needed)}"
            )
