"""The operator as its own process, with rights, arguments and environment of the chart's pod."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import TracebackType

from support.control_plane import ControlPlane, answers, free_ports, tied
from support.custom_objects import CHART
from support.kube_api import eventually

START_S = 40.0
END_S = 20.0


class OperatorProcess:
    """An operator of the release `llm` in a namespace.

    Leaving the block ends it, if it still runs; its log must have no errors then.
    """

    def __init__(
        self, plane: ControlPlane, namespace: str, *, name: str = "operator-0", scheduler: str = ""
    ) -> None:
        """`scheduler` is the address of the schedulers, whose names have no meaning outside the
        cluster.
        """
        self._plane, self._namespace, self._name = plane, namespace, name
        self._scheduler = scheduler
        self._process: subprocess.Popen[bytes] | None = None
        (self._port,) = free_ports(1)
        self.log = plane.folder / f"{namespace}-{name}.log"

    def __enter__(self) -> OperatorProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self.kill()
            error.add_note(f"operator's log, {self.log}:\n{self.log.read_text()[-4000:]}")
            return
        if self.running():
            self.stop()
        self.check_log()

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Makes the environment as the kubelet would, except for the address and the pod's
        identity.
        """
        deployment = self._plane.api.get("apps/v1", "Deployment", self._namespace, "llm-operator")
        assert deployment is not None
        (container,) = deployment["spec"]["template"]["spec"]["containers"]
        fields = {"metadata.name": self._name, "metadata.namespace": self._namespace}
        given = {
            entry["name"]: entry.get("value") or fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container["env"]
        }
        if "MILLRACE_CRDS" in given:
            given["MILLRACE_CRDS"] = str(CHART / "crds")
        account = deployment["spec"]["template"]["spec"]["serviceAccountName"]
        kubeconfig = self._plane.service_account(self._namespace, account)
        command = [sys.executable, "-m", "millrace_operator", *container.get("args", [])]
        command += [f"--kubeconfig={kubeconfig}", f"--metrics-port={self._port}"]
        command.append("--log-format=text")
        if self._scheduler:
            command.append(f"--scheduler-address={self._scheduler}")
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MILLRACE_", "KUBE"))}
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                tied(command),
                env=clean | given,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )

    def leads(self) -> int:
        """Returns how often it has begun to lead."""
        return self.log.read_text().count(" leads\n")

    def wait_until_it_leads(self, times: int = 1) -> None:
        eventually(lambda: self.leads() >= times, START_S, what=f"{self._name} does not lead:")

    def ready(self) -> bool:
        """Returns the readiness probe's answer: it leads and watches, or waits for its turn."""
        return answers(f"http://127.0.0.1:{self._port}/ready")

    def stop(self) -> None:
        """Stops it by SIGTERM, as the kubelet does; it must end without an error."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(END_S) == 0, self.log.read_text()[-4000:]

    def kill(self) -> None:
        """Kills it, as a dying node does."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def check_log(self) -> None:
        """Checks that no right was missing, and that no unexpected error occurred.

        kopf also logs an error when it has to ask a second time.
        """
        text = self.log.read_text()
        for bad in ("forbidden: User", "Traceback", "error   operator millrace"):
            assert bad not in text, text[-4000:]
