"""Finds out whether the transport can move a device's memory, before an instance depends on it."""

from __future__ import annotations

from millrace.core.errors import TransferError
from millrace.transfer.transport.nixl.library import build
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import HOST, Memory


def check_registers(name: str, memory: Memory) -> str:
    """Registers `memory` once at a transport named `name`. Returns the text for the log.

    Raises TransferError when the device's memory can't be registered.
    """
    if memory.device == HOST:
        return f"NIXL is {build()}; KV is in host memory"
    transport = NixlTransport(name)
    try:
        transport.register(memory)
    except Exception as error:  # NIXL's errors have no common base
        raise TransferError(
            f"KV in the memory of cuda:{memory.device} can't be transferred: NIXL refused to "
            f"register it ({error}); NIXL is {build()}"
        ) from error
    finally:
        transport.close()
    return f"NIXL is {build()}; memory of cuda:{memory.device} can be registered"
