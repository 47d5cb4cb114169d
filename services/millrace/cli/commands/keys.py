"""`millrace keys`: makes an API key, and shows where its digest goes."""

from __future__ import annotations

import json
import re
import secrets
from hashlib import sha256
from typing import Annotated

import typer

#: 256 random bits: a digest protects only what nobody can guess.
_KEY_BYTES = 32
_PREFIX = "sk-millrace-"
_BARE = re.compile("[A-Za-z0-9_-]+")


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command("keys")(keys)


def keys(
    tenant: Annotated[
        str, typer.Argument(metavar="TENANT", help="Name of the tenant, for metrics and logs.")
    ],
    name: Annotated[
        str, typer.Option("--name", help="Name of the key, if it has limits of its own.")
    ] = "",
    existing: Annotated[
        bool, typer.Option("--stdin", help="Read a key from standard input instead of making one.")
    ] = False,
) -> None:
    """Make an API key; print it once, with its digest for the settings or for auth.keys_file."""
    if not tenant:
        raise typer.BadParameter("it is empty; a tenant must have a name", param_hint="TENANT")
    key = "" if not existing else typer.get_text_stream("stdin").readline().strip()
    if existing and not key:
        raise typer.BadParameter("standard input has no key in its first line")
    if not existing:
        key = _PREFIX + secrets.token_urlsafe(_KEY_BYTES)
        print(f"key     {key}")
    digest = sha256(key.encode()).hexdigest()
    print(f"sha256  {digest}\n\n{_table(tenant, name, digest)}")


def _table(tenant: str, name: str, digest: str) -> str:
    quoted = tenant if _BARE.fullmatch(tenant) else json.dumps(tenant, ensure_ascii=False)
    if not name:
        return f'[tenants.{quoted}]\nkey_sha256 = ["{digest}"]'
    named = json.dumps(name, ensure_ascii=False)
    return f'[[tenants.{quoted}.keys]]\nname = {named}\nsha256 = "{digest}"'
