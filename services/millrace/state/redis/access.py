"""What each service may do in Redis: its user's rules in Redis' access control lists (ACL).

Redis checks the commands and keys inside scripts, too. The rules hold for Redis 6 and later. Redis
6 has no right to a key for reading alone: what a service only reads is safe from it as far as it
has no command that writes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256

_CONNECTION = ("hello", "ping", "select", "time")
#: To find a key's server.
_CLUSTER = ("asking", "cluster|slots")
_SCRIPTS = ("evalsha", "script|load")
_LEASE = ("hmget",)
#: What begins and ends a request's record, and its journal.
_ENDING = ("hmget", "hset", "hdel", "del", "pexpire")
_APPENDING = ("append", "pexpire", "pttl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """Patterns of keys after the prefix, and commands."""

    keys: tuple[str, ...]
    commands: tuple[str, ...]


#: By service. Mixed instances have the rights of decode; `tools` is for `millrace doctor` and
#: `millrace report`.
RIGHTS: Mapping[str, Rights] = {
    "proxy": Rights(
        keys=(
            *("request:*", "stream:*", "document:*", "file:*", "batch:*", "limits:*"),
            *("tenants", "lease:*", "waterfall:*", "begun_waterfall:*"),
        ),
        commands=(
            *(*_SCRIPTS, *_ENDING, *_APPENDING, "exists", "set", "unlink", "getrange"),
            *("hget", "hgetall", "hincrby", "mget", "rpush", "llen", "lrange"),
            *("zadd", "zcard", "zrange", "zrangebyscore", "zrank", "zrem", "zremrangebyscore"),
            *("zrevrange", "zrevrank", "zscore"),
        ),
    ),
    "scheduler": Rights(
        keys=("request:*", "lease:*", "scheduler:*"),
        # The last two: `millrace report` runs in its container.
        commands=(*_SCRIPTS, *_ENDING, *_LEASE, "hget", "rpush", "ltrim", "lrange", "scan"),
    ),
    "prefill": Rights(keys=("request:{*}:prompt", "lease:*"), commands=(*_LEASE, "getrange")),
    "decode": Rights(
        keys=("request:{*}", "request:{*}:prompt", "request:{*}:journal", "lease:*"),
        commands=(*_SCRIPTS, *_LEASE, *_APPENDING, "getrange"),
    ),
    "kvp": Rights(keys=("lease:*",), commands=_LEASE),
    "tools": Rights(keys=("scheduler:*",), commands=("info", "lrange", "scan")),
}


def user_of(service: str, prefix: str) -> str:
    """Returns the name of a service's user. `prefix`: `store.key_prefix`."""
    return f"{prefix}-{service}"


def rules_of(service: str, prefix: str, password: str) -> list[str]:
    """Returns the rules of a service's user, as ACL SETUSER takes them: they replace all others.

    Redis keeps the digest of `password` alone.
    """
    rights = RIGHTS[service]
    stem = re.sub(r"([\\*?\[\]])", r"\\\1", prefix)
    commands = sorted({*_CONNECTION, *_CLUSTER, *rights.commands})
    return [
        *("reset", "on", f"#{sha256(password.encode()).hexdigest()}"),
        *(f"~{stem}:{key}" for key in rights.keys),
        *(f"+{command}" for command in commands),
    ]


def acl_file(passwords: Mapping[str, str], prefix: str) -> str:
    """Returns the lines of an aclfile with the users of `passwords`, which is by service.

    It closes the user `default`, whom Redis lets do all without a password where an aclfile does
    not name it.
    """
    lines = ["user default reset"]
    for service, password in passwords.items():
        rules = " ".join(rules_of(service, prefix, password))
        lines.append(f"user {user_of(service, prefix)} {rules}")
    return "\n".join(lines) + "\n"
