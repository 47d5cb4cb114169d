"""The environment variables of UCX and NIXL. A service's main sets them before its first agent."""

from __future__ import annotations

import ipaddress


def transport_environment(host: str) -> dict[str, str]:
    """Returns defaults for a process that serves on `host`; values of the user take precedence.

    `NIXL_LOG_LEVEL=WARN`: NIXL logs only warnings and errors. `UCX_NET_DEVICES=lo` on a loopback
    address: connections stay on the loopback device even where others exist. UCX_TLS stays unset:
    UCX picks shared memory and CMA inside a machine, RDMA or TCP between machines.
    `UCX_MEM_MMAP_HOOK_MODE=none`, also on a loopback address: UCX leaves the code of `mmap` and
    others as it is. Its patches take 0.3 s of CPU time in each process, and serve a cache of
    registrations alone: transports here register their memory once, and end before it is freed.
    """
    environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "ERROR"}
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    if loopback:
        environment |= {"UCX_NET_DEVICES": "lo", "UCX_MEM_MMAP_HOOK_MODE": "none"}
    return environment
