"""Prints every setting as a TOML file, and as docs/reference/configuration.md."""

from __future__ import annotations

import itertools
from operator import attrgetter

import orjson

from millrace.core.config import Setting, settings

HEAD = """# Configuration

One tree of settings serves all commands. Defaults are overridden by a TOML file (`--config FILE`,
one table per section), then by the environment (`MILLRACE_SECTION__FIELD`, such as
`MILLRACE_STORE__URL`), then by `--set section.field=value`. A value out of range ends the command
with a line that names the field, the value and the range. `_s` are seconds, `_ms` milliseconds;
sizes are in bytes or tokens as the name says.

SLO classes, chosen by clients with `x-millrace-class`, are tables of their own:

```toml
[slo_classes.chat]
ttft_s = 0.5
tbt_s = 0.05
```

A class without `ttft_s`, `tbt_s` or `e2e_s` (arrival to last token) takes
`proxy.default_ttft_slo_ms`, `proxy.default_tbt_slo_ms` or `proxy.default_e2e_slo_ms`, as requests
without a class do. A request's own headers override its class.

`weight` (0.001 to 1000, by default 1) is the weight of the class in the policy `millrace`. Tenants
are tables, too. A request whose bearer token has one of the digests belongs to the tenant; any
other request belongs to the tenant `default`, which may have a table with a weight:

```toml
[tenants.acme]
key_sha256 = ["9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"]
weight = 2
```

Requests that name no
class are of the class `default`, which may have a table too.

With `tls`, all gRPC between services is mutual TLS: both ends show a certificate, and each end
accepts only peers whose certificate the CA has signed. Every certificate must be valid for the DNS
name `millrace.internal`: clients check this name, because instances come and go and are reached by
their addresses. After a file is renewed, every new connection uses it without a restart. Commands
that call a scheduler (`millrace policy`) need the settings too. HTTP (the proxy's API and
`/metrics`) and KV between instances are not encrypted by these settings
([transfer.md](../concepts/transfer.md#encryption)).
A Redis that speaks TLS has a URL with `rediss://`; with certificates from a private CA:
`rediss://:PASSWORD@HOST:6379/0?ssl_ca_certs=ca.crt&ssl_certfile=tls.crt&ssl_keyfile=tls.key`.
[Redis](../guides/redis.md) has the URLs for Sentinels and clusters.

`millrace config --markdown` prints this page, and `make docs` writes it.
"""

TABLE_HEAD = ("| setting | default | range | meaning |", "|---|---|---|---|")


def as_toml() -> str:
    """Returns all defaults with comments."""
    lines: list[str] = []
    for section, fields in itertools.groupby(settings(), key=attrgetter("section")):
        lines.append(f"[{section}]")
        lines += [f"{f.name} = {_value(f)}{_comment(f)}" for f in fields]
        lines.append("")
    return "\n".join(lines)


def as_markdown() -> str:
    """Returns docs/reference/configuration.md."""
    lines = [HEAD]
    for section, fields in itertools.groupby(settings(), key=attrgetter("section")):
        lines += [f"## {section}", "", *TABLE_HEAD]
        lines += [f"| `{f.name}` | `{_value(f)}` | {f.range} | {f.doc} |" for f in fields]
        lines.append("")
    return "\n".join(lines)


def _value(setting: Setting) -> str:
    return orjson.dumps(setting.default).decode()


def _comment(setting: Setting) -> str:
    said = "; ".join(part for part in (setting.doc, setting.range) if part)
    return f"  # {said}" if said else ""
