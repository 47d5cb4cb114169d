"""Every setting as a TOML file to start from, and as docs/reference/configuration.md."""

from __future__ import annotations

import itertools
from operator import attrgetter

import orjson

from millrace.core.config import Setting, settings

HEAD = """# Configuration

One tree of settings serves all commands. Defaults are overridden by a TOML file (`--config FILE`,
a table a section), then by the environment (`MILLRACE_SECTION__FIELD`, such as
`MILLRACE_STORE__URL`), then by `--set section.field=value`. A value out of range ends the command
with a line that names the field, the value and the range. `_s` are seconds, `_ms` milliseconds;
sizes are in bytes or tokens as the name says.

SLO classes, chosen by clients with `x-millrace-class`, are tables of their own:

```toml
[slo_classes.chat]
ttft_s = 0.5
tbt_s = 0.05
```

What a class leaves out is `proxy.default_ttft_slo_ms` and `proxy.default_tbt_slo_ms`, as for
requests without a class; a request's own headers go before both. The class of requests that name
none is `default`, and may have a table too.

With `tls`, all gRPC between services is mutual TLS: each end shows its certificate, and takes only
peers whose certificate the CA has signed. Every certificate must be valid for the DNS name
`millrace.internal`, which is what clients check: instances come and go, and are reached by their
addresses. Files that were renewed are used for every connection from then on, without a restart.
Who speaks to a scheduler (`millrace policy`) needs the settings too. HTTP (the proxy's API and
`/metrics`) and KV between instances stay as they are ([transfer.md](transfer.md#encryption)).
A Redis that speaks TLS has a URL with `rediss://`; with certificates from a CA of one's own:
`rediss://:PASSWORD@HOST:6379/0?ssl_ca_certs=ca.crt&ssl_certfile=tls.crt&ssl_keyfile=tls.key`.

This page is written by `millrace config --markdown`.
"""

TABLE_HEAD = ("| setting | default | range | meaning |", "|---|---|---|---|")


def as_toml() -> str:
    """All defaults, commented."""
    lines: list[str] = []
    for section, fields in itertools.groupby(settings(), key=attrgetter("section")):
        lines.append(f"[{section}]")
        lines += [f"{f.name} = {_value(f)}{_comment(f)}" for f in fields]
        lines.append("")
    return "\n".join(lines)


def as_markdown() -> str:
    """docs/reference/configuration.md."""
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
