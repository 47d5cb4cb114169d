"""A host of later stages, as on another machine."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil


class StageHost:
    """`millrace stage` in a process of its own."""

    def __init__(self, folder: Path) -> None:
        ready, told = os.pipe()
        os.set_inheritable(told, True)
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "millrace", "stage", "--model", str(folder)),
                *("--ready-fd", str(told), "--set", "engine.device=cpu"),
                *("--set", "engine.threads=2"),
            ],
            pass_fds=[told],
        )
        os.close(told)
        with os.fdopen(ready) as news:
            found = re.search(r"\d+", news.readline())
        assert found is not None, "it did not start"
        self.address = f"127.0.0.1:{found.group()}"

    def stage(self) -> psutil.Process:
        """The stage's process: the host's grandchild, by its fork server."""
        host = psutil.Process(self.process.pid)
        servers = [one for one in host.children() if one.children()]
        (found,) = [child for server in servers for child in server.children()]
        return found

    def end(self) -> int:
        self.process.terminate()
        return self.process.wait()
