"""The metadata that a transport gives its peers, and a check whether a peer's process still
lives.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from millrace.core.errors import TransferError
from millrace.transfer.transport.regions import Memory


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """Identifies a process among all processes of every machine since its boot.

    `host` and `namespace` are empty where the system does not report them; then `has_ended` is
    always False.
    """

    host: str
    namespace: str
    pid: int
    started: str

    @staticmethod
    def mine() -> ProcessIdentity:
        pid = os.getpid()
        try:
            host = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return ProcessIdentity(host, os.readlink("/proc/self/ns/pid"), pid, _status(pid)[1])
        except OSError:
            return ProcessIdentity("", "", pid, "")

    def has_ended(self, observer: ProcessIdentity) -> bool:
        """Returns whether the process is known to have ended, seen from `observer`, this process.

        Returns False for a process of another machine or PID namespace: its state is not known.
        """
        if not self.host or (self.host, self.namespace) != (observer.host, observer.namespace):
            return False
        try:
            state, started = _status(self.pid)
        except OSError:
            return True
        return started != self.started or state in "ZX"


def _status(pid: int) -> tuple[str, str]:
    """Returns (state letter, start time in clock ticks since boot): proc_pid_stat(5), fields 3 and
    22.
    """
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMetadata:
    """A transport's name, its regions, its process, and its library's own connection data."""

    name: str
    regions: tuple[Memory, ...]
    process: ProcessIdentity
    connection: bytes = b""

    def includes(self, other: PeerMetadata) -> bool:
        """Whether `other` tells nothing more: it is of the same process, at this time or before."""
        is_same = (self.name, self.process) == (other.name, other.process)
        return is_same and self.regions[: len(other.regions)] == other.regions

    def encode(self) -> bytes:
        return json.dumps(
            {
                "name": self.name,
                "regions": [asdict(r) for r in self.regions],
                "process": asdict(self.process),
                "connection": base64.b64encode(self.connection).decode(),
            }
        ).encode()

    @staticmethod
    def decode(data: bytes) -> PeerMetadata:
        """Raises TransferError for bytes that `encode` can't have made."""
        try:
            fields = json.loads(data)
            return PeerMetadata(
                name=fields["name"],
                regions=tuple(Memory(**r) for r in fields["regions"]),
                process=ProcessIdentity(**fields["process"]),
                connection=base64.b64decode(fields["connection"], validate=True),
            )
        except (ValueError, TypeError, KeyError, binascii.Error) as error:
            raise TransferError(f"not a transport's metadata: {error!r}") from error
