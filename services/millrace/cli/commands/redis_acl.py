"""`millrace redis-acl`: makes a user of Redis for every service, and the URLs that name them."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Annotated

import typer

from millrace.state.redis.access import RIGHTS, acl_file, user_of

_PASSWORD_BYTES = 32
#: Characters that mean the same in a key, in an aclfile and in a URL.
_PREFIX = re.compile("[A-Za-z0-9_.-]+")
_URL = re.compile("(rediss?(?:[+](?:sentinel|cluster))?://|unix://)([^@]+)")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("redis-acl")(redis_acl)


def redis_acl(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new folder, which nobody else may read.")
    ],
    url: Annotated[
        str, typer.Option("--url", metavar="URL", help="store.url, without user and password.")
    ] = "redis://127.0.0.1:6379/0",
    prefix: Annotated[
        str, typer.Option("--prefix", metavar="NAME", help="store.key_prefix of the services.")
    ] = "millrace",
) -> None:
    """Make a user of Redis for each service: FOLDER/users.acl for Redis, and FOLDER/SERVICE.url,
    the service's store.url with a new password.
    """
    found = _URL.fullmatch(url)
    if found is None:
        raise typer.BadParameter(
            "it must be a URL of a server, of Sentinels or of a cluster, without a user",
            param_hint="--url",
        )
    if _PREFIX.fullmatch(prefix) is None:
        raise typer.BadParameter(
            "it must be letters, digits, '_', '.' and '-'", param_hint="--prefix"
        )
    passwords = {service: secrets.token_urlsafe(_PASSWORD_BYTES) for service in RIGHTS}
    try:
        folder.mkdir(mode=0o700)
    except OSError as error:
        raise typer.BadParameter(f"{folder}: {error.strerror}", param_hint="FOLDER") from error
    (folder / "users.acl").write_text(acl_file(passwords, prefix))
    for service, password in passwords.items():
        named = f"{found[1]}{user_of(service, prefix)}:{password}@{found[2]}"
        (folder / f"{service}.url").write_text(named)
    print(f"{folder}: users.acl, and {', '.join(f'{service}.url' for service in passwords)}")
