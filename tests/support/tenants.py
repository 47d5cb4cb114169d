"""Keys of tenants, and settings with their digests."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from millrace.core.config import Config, load_config


def digest(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def tenant_toml(name: str, *keys: str, **fields: object) -> str:
    """Returns the table of a tenant. Values are numbers, texts or lists of texts."""
    lines = [f"[tenants.{name}]", f"key_sha256 = {json.dumps([digest(key) for key in keys])}"]
    lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


def key_toml(tenant: str, key: str, **fields: object) -> str:
    """Returns the table of a key with an access of its own. It follows its tenant's table."""
    lines = [f"[[tenants.{tenant}.keys]]", f'sha256 = "{digest(key)}"']
    lines += [f"{field} = {json.dumps(value)}" for field, value in fields.items()]
    return "\n".join(lines) + "\n"


def config_with(folder: Path, tables: str, *settings: str) -> Config:
    """Returns the settings of a file with `tables`, overridden by `settings`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "settings.toml"
    path.write_text(tables)
    return load_config(path, settings)


def bearer(key: str) -> dict[str, Any]:
    return {"authorization": f"Bearer {key}"}
