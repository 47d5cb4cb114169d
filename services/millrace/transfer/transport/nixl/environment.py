"""The environment variables of UCX and NIXL. A service's main sets them before its first agent."""

from __future__ import annotations

import ipaddress


def transport_environment(host: str) -> dict[str, str]:
    """Returns defaults for a process that serves on `host`; values of the user take precedence.

    `NIXL_LOG_LEVEL=WARN`: NIXL logs only warnings and errors. `UCX_NET_DEVICES=lo` on a loopback
    address: connections stay on the loopback device even where others exist. UCX_TLS stays unset:
    UCX picks shared memory and CMA inside a machine, RDMA or TCP between machines.
    """
    environment = {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "ERROR"}
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return environment | {"UCX_NET_DEVICES": "lo"} if loopback else environment
