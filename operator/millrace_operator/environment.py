"""What the operator reads from its environment, which the chart writes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from millrace.core.config import load_config
from millrace.core.errors import MillraceError
from millrace.telemetry.log import setup_logging
from millrace.wire.tls import use_tls
from millrace_operator.schema.pools import KINDS
from millrace_operator.spec import Defaults

TLS = "MILLRACE_TLS__"
ROLES = ("proxy", "scheduler", *(kind.role for kind in KINDS.values()))


def defaults_from(environment: Mapping[str, str]) -> Defaults:
    """Reads the images and secrets for specs that name none. Raises MillraceError for a missing
    image.
    """
    images = {role: environment.get(f"MILLRACE_IMAGE_{role.upper()}", "") for role in ROLES}
    missing = [f"MILLRACE_IMAGE_{role.upper()}" for role, image in images.items() if not image]
    if missing:
        raise MillraceError(f"the environment lacks {', '.join(missing)}")
    return Defaults(
        images=images,
        pull_policy=environment.get("MILLRACE_IMAGE_PULL_POLICY", "IfNotPresent"),
        redis_secret=environment.get("MILLRACE_REDIS_SECRET", ""),
        redis_per_service=environment.get("MILLRACE_REDIS_PER_SERVICE", "") == "true",
        tls_secret=environment.get("MILLRACE_TLS_SECRET", ""),
    )


def use_settings_of(environment: Mapping[str, str], *, log_format: str, log_level: str) -> None:
    """Sets TLS to schedulers from MILLRACE_TLS__*, and logging. Raises ConfigError."""
    given = {
        f"tls.{name.removeprefix(TLS).lower()}": value
        for name, value in environment.items()
        if name.startswith(TLS)
    }
    given |= {"telemetry.log_format": log_format, "telemetry.log_level": log_level}
    config = load_config(overrides=[f"{name}={value}" for name, value in given.items()])
    setup_logging(config.telemetry, "operator")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    use_tls(config.tls)
