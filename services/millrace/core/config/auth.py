"""Who may use the proxy."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.config.fields import Section, one_of, setting


@dataclass(frozen=True, kw_only=True)
class AuthConfig(Section):
    require_key: str = setting(
        "off", one_of("on", "off"), "on: requests without a known API key get 401"
    )
    keys_file: str = setting(
        "", None, "TOML file with tables `tenants.NAME`; the proxy reads it again when it changes"
    )
