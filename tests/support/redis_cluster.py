"""A real Redis Cluster on a loopback address of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from redis import Redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import RedisError

from millrace.core.config import StoreConfig
from millrace.local.private_redis import find_redis_server
from millrace.local.processes.child import ending_with_this
from millrace.state.redis.access import RIGHTS, rules_of, user_of
from support.deadlines import HANG_S
from support.redis_servers import HOST, NEVER_MS
from support.stores import PASSWORD

PRIMARIES = 3
#: Of a cluster that a test shares with others, and of one that it has for itself.
SHARED_PORT, OWN_PORT = 7001, 7011


class Node:
    """One server of a cluster."""

    def __init__(self, port: int, client: Redis) -> None:
        self.port = port
        self.client = client
        self.id: str = client.execute_command("CLUSTER", "MYID").decode()
        self.pid: int = client.info("server")["process_id"]

    def sees(self) -> list[list[str]]:
        """Returns the rows of CLUSTER NODES."""
        rows = self.client.execute_command("CLUSTER NODES")
        return [[address, *rows[address]["flags"].split(",")] for address in rows]

    def state(self) -> str:
        return str(self.client.execute_command("CLUSTER INFO")["cluster_state"])


class ClusterServers:
    """Three primaries, and perhaps a replica of one of them."""

    def __init__(self, primaries: Sequence[Node], replica: Node | None) -> None:
        self.primaries = primaries
        self.replica = replica
        self.followed = primaries[0]
        self.nodes = [*primaries, *([replica] if replica else [])]
        #: The first server that it names does not exist.
        self.url = (
            f"redis+cluster://{HOST}:6,{HOST}:{primaries[1].port},{HOST}:{self.nodes[-1].port}"
        )

    def owner(self, key: bytes) -> Node:
        """Returns the primary that has a key, by what the last server says."""
        return self._owner(key_slot(key), self.nodes[-1])

    def _owner(self, slot: int, by: Node) -> Node:
        for first, last, (_, port, *_), *_ in by.client.execute_command("CLUSTER", "SLOTS"):
            if first <= slot <= last:
                return next(node for node in self.nodes if node.port == port)
        raise AssertionError(f"nobody has slot {slot}")

    def empty(self) -> None:
        for node in self.primaries:
            node.client.flushall()
            node.client.script_flush()

    def add_users(self) -> None:
        """Makes the user of every service."""
        for node in self.nodes:
            for service in RIGHTS:
                rules = rules_of(service, StoreConfig.key_prefix, PASSWORD)
                node.client.execute_command("ACL", "SETUSER", user_of(service, "millrace"), *rules)

    def keys(self, slot: int, node: Node) -> list[bytes]:
        found: list[bytes] = node.client.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 1000)
        return found

    def begin_move(self, slot: int, source: Node, target: Node) -> None:
        target.client.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source.id)
        source.client.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target.id)

    def move_keys(self, keys: Sequence[bytes], source: Node, target: Node) -> None:
        for key in keys:
            source.client.execute_command("MIGRATE", HOST, target.port, key, 0, 10_000)

    def end_move(self, slot: int, source: Node, target: Node) -> None:
        """Returns when all servers agree on it. The source is told before the others: what it has
        said to them before changes nothing.
        """
        others = [one for one in self.primaries if one not in (source, target)]

        def agree() -> bool:
            for node in (target, source, *others):
                node.client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target.id)
            return all(self._owner(slot, node) is target for node in self.nodes)

        _until(agree)

    def follow(self, primary: Node) -> None:
        """Returns when the replica follows this primary, and all servers know it."""
        assert self.replica is not None
        replica, self.followed = self.replica, primary
        replica.client.execute_command("CLUSTER", "REPLICATE", primary.id)

        def link() -> bool:
            told = replica.client.info("replication")
            return (told["master_port"], told["master_link_status"]) == (primary.port, "up")

        _until(link)
        _until(lambda: all(self._follows(node, replica, primary) for node in self.nodes))

    def _follows(self, by: Node, replica: Node, primary: Node) -> bool:
        rows = by.client.execute_command("CLUSTER NODES")
        return bool(rows[f"{HOST}:{replica.port}"]["master_id"] == primary.id)

    def replicated(self) -> None:
        """Returns when the replica has all that its primary has now."""
        assert self.replica is not None
        follower = self.replica.client
        written = self.followed.client.info("replication")["master_repl_offset"]
        _until(lambda: follower.info("replication")["slave_repl_offset"] >= written)

    def kill_primary(self) -> None:
        """Kills the primary with the replica; the others promote this after 500 ms."""
        os.kill(self.followed.pid, signal.SIGKILL)
        self.notice_soon()

    def notice_soon(self) -> None:
        """Makes a server that is silent for 500 ms count as dead."""
        for node in self._alive():
            node.client.config_set("cluster-node-timeout", 500)

    def promoted(self) -> None:
        """Returns when the replica is a primary, and the cluster serves all slots again."""
        assert self.replica is not None
        promoted = self.replica
        _until(lambda: promoted.client.info("replication")["role"] == "master")
        _until(lambda: all(node.state() == "ok" for node in self._alive()))

    def _alive(self) -> list[Node]:
        return [node for node in self.nodes if node is not self.followed]


@contextmanager
def redis_cluster(first_port: int, *, replica: bool = False) -> Iterator[ClusterServers]:
    """Yields the servers when they serve all slots."""
    with ExitStack() as stack:
        ports = range(first_port, first_port + PRIMARIES + replica)
        nodes = [stack.enter_context(_node(port)) for port in ports]
        primaries = nodes[:PRIMARIES]
        share = -(-REDIS_CLUSTER_HASH_SLOTS // PRIMARIES)
        for index, node in enumerate(primaries):
            slots = range(index * share, min(index * share + share, REDIS_CLUSTER_HASH_SLOTS))
            node.client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            node.client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        for index, node in enumerate(nodes):
            for other in nodes[:index]:
                node.client.execute_command("CLUSTER", "MEET", HOST, other.port)
        _until(lambda: all(len(node.sees()) == len(nodes) for node in nodes))
        _until(lambda: not any("handshake" in row for node in nodes for row in node.sees()))
        servers = ClusterServers(primaries, nodes[-1] if replica else None)
        if replica:
            servers.follow(primaries[0])
        _until(lambda: all(node.state() == "ok" for node in nodes))
        yield servers


@contextmanager
def _node(port: int) -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        file = Path(folder) / "redis.conf"
        lines = [
            *(f"bind {HOST}", f"port {port}", f"dir {folder}", f"logfile {folder}/log"),
            *("cluster-enabled yes", f"cluster-announce-ip {HOST}", 'save ""'),
            *(f"cluster-node-timeout {NEVER_MS}", "cluster-replica-validity-factor 0"),
            "repl-diskless-sync-delay 0",
        ]
        file.write_text("\n".join(lines) + "\n")
        command = [str(find_redis_server()), str(file)]
        process = subprocess.Popen(ending_with_this(command, signal.SIGKILL))
        try:
            with Redis(host=HOST, port=port, protocol=2) as client:
                _until(client.ping)
                yield Node(port, client)
        finally:
            process.kill()
            process.wait()


def _until(check: Callable[[], object]) -> None:
    """Waits for `check` to be true; until then its server may be out of reach."""
    deadline_s = time.monotonic() + HANG_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(RedisError, OSError):
            if check():
                return
        time.sleep(0.01)
    raise AssertionError(f"not within {HANG_S:g} s")
