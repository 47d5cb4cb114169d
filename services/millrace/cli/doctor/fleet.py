"""What `millrace doctor` checks of the scheduler and its instances."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence

from millrace.cli.doctor.findings import FAILURE, OK, WARNING, Finding
from millrace.cli.doctor.store import skew
from millrace.core.errors import TransferError
from millrace.core.kv.probe import Examination
from millrace.version import version
from millrace.wire.clients.probe_peer import examine
from millrace.wire.clients.scheduler_client import InstanceView, SchedulerUnavailable, get_instances

ANSWER_TIMEOUT_S = 5.0
#: Limit of one instance's probes of another.
PROBE_TIMEOUT_S = 25.0


async def fleet(scheduler: str) -> AsyncIterator[Finding]:
    """Yields whether every instance answers, has this version and the time, and can exchange KV
    with every other.
    """
    try:
        instances = sorted(await get_instances(scheduler), key=lambda one: (one.role, one.id))
    except SchedulerUnavailable as error:
        advice = "start it, or give its address by --scheduler; with TLS, the settings of tls"
        yield Finding(FAILURE, f"scheduler {scheduler}", str(error), advice)
        return
    roles = Counter(one.role for one in instances)
    sizes = ", ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "no instances"
    yield Finding(OK, f"scheduler {scheduler}", sizes)
    for finding in missing_roles(roles):
        yield finding
    answered: list[InstanceView] = []
    for one in instances:
        name = f"{one.role} {one.id}"
        try:
            asked_s = time.time()
            found = await examine(one.address, timeout_s=ANSWER_TIMEOUT_S)
        except TransferError as error:
            advice = "look at its log; a network policy or a stopped process keeps it from here"
            yield Finding(FAILURE, name, f"does not answer at {one.address}: {error}", advice)
            continue
        answered.append(one)
        for finding in of_instance(name, found, (asked_s + time.time()) / 2):
            yield finding
    for finding in await _paths(answered):
        yield finding


def missing_roles(roles: Mapping[str, int]) -> Iterator[Finding]:
    """Yields the roles without which no request is served. A mixed instance has both."""
    for role in ("prefill", "decode"):
        if not roles.get(role) and not roles.get("mixed"):
            yield Finding(FAILURE, "fleet", f"no {role} instance", f"start one: millrace {role}")


def of_instance(name: str, found: Examination, now_s: float) -> Iterator[Finding]:
    """Yields an instance's version and clock beside this machine's; `now_s`: at its answer."""
    text = f"millrace {found.version}, KV on {found.device}"
    if found.version == version():
        yield Finding(OK, name, text)
    else:
        advice = f"this machine has {version()}: roll all services to one version"
        yield Finding(WARNING, name, text, advice)
    yield skew(name, found.unix_s - now_s)


async def _paths(instances: Sequence[InstanceView]) -> list[Finding]:
    """Has every pair of instances probe each other; one asker at a time, since probes take time."""
    findings = []
    for number, one in enumerate(instances):
        others = [other.id for other in instances[number + 1 :]]
        if not others:
            continue
        try:
            limit_s = ANSWER_TIMEOUT_S + PROBE_TIMEOUT_S * len(others)
            async with asyncio.timeout(limit_s + ANSWER_TIMEOUT_S):
                found = await examine(one.address, others, timeout_s=limit_s)
        except (TransferError, TimeoutError) as error:
            advice = "look at its log for the failed probe"
            findings.append(Finding(FAILURE, f"KV paths of {one.id}", str(error), advice))
            continue
        findings += of_paths(one.id, found)
    return findings


def of_paths(asker: str, found: Examination) -> Iterator[Finding]:
    """Yields whether KV travels between an instance and each that it has probed."""
    for peer in found.peers:
        name = f"KV between {asker} and {peer.instance_id}"
        if peer.error:
            advice = "open the network between both; UCX_NET_DEVICES and UCX_TLS choose the path"
            yield Finding(FAILURE, name, peer.error, advice)
        else:
            yield Finding(OK, name, f"travels both ways, probed in {peer.seconds:.2f} s")
