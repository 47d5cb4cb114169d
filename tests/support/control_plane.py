"""A real Kubernetes control plane for tests, on loopback ports and without a node.

`KUBEBUILDER_ASSETS` names a folder with `etcd` and `kube-apiserver`, as in Kubernetes' own
envtest. `kube-controller-manager` and `kubectl` in it are used too; without the first nothing makes
pods, collects garbage or runs an HPA. `MILLRACE_TEST_KUBECONFIG` names a kubeconfig of a running
cluster instead.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from millrace.local.processes.child import ending_with_this
from support.kube_api import Api, Refused

ASSETS = "KUBEBUILDER_ASSETS"
KUBECONFIG = "MILLRACE_TEST_KUBECONFIG"

#: The token of the API server's administrator; for this server only.
ADMIN_TOKEN = "admin"

#: Audits the calls of service accounts and their outcomes.
AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  userGroups: ["system:serviceaccounts"]
- level: None
"""

START_S = 60.0


class Unavailable(Exception):
    """No control plane can run here; the message says why."""


class ControlPlane:
    """An API server and its companions. Objects in it are the tests' own."""

    def __init__(
        self, api: Api, folder: Path, *, controllers: bool, assets: Path | None = None
    ) -> None:
        self.api = api  # as an administrator
        self.folder = folder  # logs, kubeconfigs
        self.controllers = controllers  # whether pods are made and garbage is collected
        self._assets = assets
        #: A line for each call of a service account; None if the server is not ours.
        self.audit = folder / "audit.log" if assets else None
        self.kubeconfig = self.write_kubeconfig("admin", _user(api.configuration))

    def calls_of(self, namespace: str, service_account: str) -> list[dict[str, Any]]:
        """Returns a service account's calls so far, with their answers: audit events."""
        assert self.audit is not None
        user = f"system:serviceaccount:{namespace}:{service_account}"
        *lines, _ = self.audit.read_text().split("\n")  # the last line may be incomplete
        events = [json.loads(line) for line in lines if user in line]
        return [
            event for event in events if event["user"]["username"] == user and "objectRef" in event
        ]

    def kubectl(self) -> Path | None:
        """Returns the binary, from the assets or on PATH."""
        beside = self._assets / "kubectl" if self._assets else None
        if beside is not None and beside.exists():
            return beside
        found = shutil.which("kubectl")
        return Path(found) if found else None

    def service_account(self, namespace: str, name: str) -> Path:
        """Returns a kubeconfig with only this service account's own token (for an hour)."""
        token = self.token(namespace, name)
        return self.write_kubeconfig(f"{namespace}-{name}", {"token": token}, namespace)

    def token(self, namespace: str, name: str) -> str:
        path = self.api.path("v1", "ServiceAccount", namespace, name, "token")
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        return str(self.api.call("POST", path, request)["status"]["token"])

    def write_kubeconfig(
        self, name: str, user: Mapping[str, Any], namespace: str = "default"
    ) -> Path:
        configuration = self.api.configuration
        cluster: dict[str, Any] = {"server": configuration.host}
        if configuration.ssl_ca_cert:
            pem = Path(configuration.ssl_ca_cert).read_bytes()
            cluster["certificate-authority-data"] = b64encode(pem).decode()
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "tests", "cluster": cluster}],
            "users": [{"name": name, "user": dict(user)}],
            "contexts": [
                {
                    "name": "tests",
                    "context": {"cluster": "tests", "user": name, "namespace": namespace},
                }
            ],
            "current-context": "tests",
        }
        path = self.folder / f"{name}.kubeconfig"
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        return path


@contextmanager
def control_plane(folder: Path, before_controllers: Any = None) -> Iterator[ControlPlane]:
    """Yields the environment's control plane; raises Unavailable without one.

    `before_controllers(api)` runs before the controller manager starts. CRDs installed there save
    the garbage collector's wait: it reads the list of kinds only every 30 s.
    """
    kubeconfig, assets = os.environ.get(KUBECONFIG), os.environ.get(ASSETS)
    if kubeconfig:
        api = Api(_configuration(Path(kubeconfig)))
        if before_controllers is not None:
            before_controllers(api)
        yield ControlPlane(api, folder, controllers=True)
        api.close()
    elif assets:
        with _own(Path(assets), folder, before_controllers) as plane:
            yield plane
    else:
        raise Unavailable(
            f"needs an API server: {ASSETS} (a folder with kube-apiserver and etcd) "
            f"or {KUBECONFIG} (of a cluster for tests)"
        )


@contextmanager
def _own(assets: Path, folder: Path, before_controllers: Any) -> Iterator[ControlPlane]:
    for name in ("etcd", "kube-apiserver"):
        if not (assets / name).exists():
            raise Unavailable(f"{ASSETS} has no {name}")
    processes = Processes(folder)
    # On a disk, every write of etcd may wait for the disk.
    with tempfile.TemporaryDirectory(prefix="millrace-etcd-", dir=_memory()) as data:
        try:
            api = _start_server(processes, assets, folder, Path(data))
            if before_controllers is not None:
                before_controllers(api)
            controllers = (assets / "kube-controller-manager").exists()
            plane = ControlPlane(api, folder, controllers=controllers, assets=assets)
            if controllers:
                _start_controllers(processes, assets, plane)
            yield plane
            api.close()
        finally:
            processes.kill()


class Processes:
    """Children with a log each. They always die with this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[tuple[subprocess.Popen[bytes], Path]] = []

    def start(self, *command: str | Path, env: Mapping[str, str] | None = None) -> None:
        log = self._folder / f"{Path(command[0]).name}.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                tied(command),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )
        self._running.append((process, log))

    def wait(self, ready: Any, what: str) -> None:
        """Waits until `ready()`; raises Unavailable with the log of a child that ends before."""
        deadline_s = time.monotonic() + START_S
        while not ready():
            for process, log in self._running:
                if process.poll() is not None:
                    raise Unavailable(f"{log.name} ends: {log.read_text()[-2000:]}")
            if time.monotonic() > deadline_s:
                raise Unavailable(f"{what} is not ready after {START_S:g} s; logs: {self._folder}")
            time.sleep(0.05)

    def kill(self) -> None:
        """Kills them at once, since none of their data is kept."""
        for process, _ in reversed(self._running):
            process.kill()
        for process, _ in self._running:
            process.wait()
        self._running.clear()


def _start_server(processes: Processes, assets: Path, folder: Path, data: Path) -> Api:
    etcd, peer, port = free_ports(3)
    url, peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"
    processes.start(
        assets / "etcd",
        "--name=tests",
        f"--data-dir={data}",
        "--unsafe-no-fsync",
        "--log-level=warn",
        f"--listen-client-urls={url}",
        f"--advertise-client-urls={url}",
        f"--listen-peer-urls={peer_url}",
        f"--initial-advertise-peer-urls={peer_url}",
        f"--initial-cluster=tests={peer_url}",
    )
    processes.wait(lambda: answers(f"{url}/health"), "etcd")
    tokens, certificates = folder / "tokens.csv", folder / "certificates"
    tokens.write_text(f'{ADMIN_TOKEN},admin,admin,"system:masters"\n')
    key = _key(certificates)
    policy = folder / "audit-policy.yaml"
    policy.write_text(AUDIT_POLICY)
    processes.start(
        assets / "kube-apiserver",
        f"--etcd-servers={url}",
        f"--cert-dir={certificates}",
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",
        f"--secure-port={port}",
        "--service-cluster-ip-range=10.0.0.0/16",
        "--allow-privileged=true",
        "--authorization-mode=RBAC",
        f"--token-auth-file={tokens}",
        f"--audit-policy-file={policy}",
        f"--audit-log-path={folder / 'audit.log'}",
        f"--service-account-issuer=https://127.0.0.1:{port}",
        f"--service-account-signing-key-file={key}",
        f"--service-account-key-file={key}",
    )
    configuration = client.Configuration()
    configuration.host = f"https://127.0.0.1:{port}"
    configuration.ssl_ca_cert = str(certificates / "apiserver.crt")
    configuration.api_key["authorization"] = ADMIN_TOKEN
    configuration.api_key_prefix["authorization"] = "Bearer"
    processes.wait(Path(configuration.ssl_ca_cert).exists, "kube-apiserver")
    api = Api(configuration)
    processes.wait(lambda: _ready(api), "kube-apiserver")
    return api


def _start_controllers(processes: Processes, assets: Path, plane: ControlPlane) -> None:
    (port,) = free_ports(1)
    certificates = plane.folder / "certificates"
    processes.start(
        assets / "kube-controller-manager",
        f"--kubeconfig={plane.kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        f"--secure-port={port}",
        f"--cert-dir={plane.folder / 'controllers'}",
        f"--service-account-private-key-file={_key(certificates)}",
        f"--root-ca-file={certificates / 'apiserver.crt'}",
        "--horizontal-pod-autoscaler-sync-period=1s",
    )


def _key(certificates: Path) -> Path:
    """Returns the key that signs tokens. The API server makes it first, for its own certificate."""
    return certificates / "apiserver.key"


def _ready(api: Api) -> bool:
    try:
        return bool(api.call("GET", "/readyz") == "ok")
    except (Refused, OSError, client.ApiException) as _:
        return False
    except Exception as error:  # urllib3 has no common class with the others
        if type(error).__module__.startswith("urllib3"):
            return False
        raise


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Returns a port chosen by the kernel; another process may still take it before its use."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def _memory() -> str | None:
    """Returns a folder in memory where possible."""
    shared = Path("/dev/shm")
    return str(shared) if os.access(shared, os.W_OK) else None


def tied(command: Sequence[str | Path]) -> list[str]:
    """Runs the command as a child that is killed when the thread that starts it ends."""
    return ending_with_this([str(word) for word in command], signal.SIGKILL)


def _configuration(kubeconfig: Path) -> client.Configuration:
    configuration = client.Configuration()
    config.load_kube_config(
        config_file=str(kubeconfig), client_configuration=configuration, persist_config=False
    )
    return configuration


def _user(configuration: client.Configuration) -> dict[str, Any]:
    """Returns the credential of a configuration, as a kubeconfig states it."""
    if configuration.cert_file:
        return {
            "client-certificate-data": b64encode(
                Path(configuration.cert_file).read_bytes()
            ).decode(),
            "client-key-data": b64encode(Path(configuration.key_file).read_bytes()).decode(),
        }
    header = configuration.get_api_key_with_prefix("BearerToken", alias="authorization") or ""
    return {"token": header.split()[-1]}
