"""Runs images by docker, podman or buildah, on the host's network."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

TOOLS = ("docker", "podman", "buildah")


def limits() -> list[str]:
    """The process's own limits: engines raise them by default, which they may not be allowed to."""
    both = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC}
    return [f"--ulimit={name}={resource.getrlimit(one)[1]}" for name, one in both.items()]


@dataclass(frozen=True, slots=True)
class Runner:
    """One engine. With buildah there is a root of files and an environment, but no namespaces."""

    tool: str

    def command(self, image: str, *arguments: str, env: Mapping[str, str]) -> list[str]:
        """What starts the image's entry point in the foreground."""
        given = [f"--env={name}={value}" for name, value in env.items()]
        if self.tool != "buildah":
            own = ["--no-healthcheck", *limits()]
            return [self.tool, "run", "--rm", "--network=host", *own, *given, image, *arguments]
        made = subprocess.run(
            ["buildah", "from", image], check=True, capture_output=True, text=True
        )
        config = json.loads(
            subprocess.run(
                ["buildah", "inspect", made.stdout.strip()], check=True, capture_output=True
            ).stdout
        )["OCIv1"]["config"]
        run = ["buildah", "run", "--isolation=chroot", *given, made.stdout.strip(), "--"]
        return [*run, *config["Entrypoint"], *arguments]

    def refusal(self, image: str) -> str:
        """Why the image can't be run, empty where it can."""
        if shutil.which(self.tool) is None:
            return f"{self.tool} is not installed"
        names = [self.tool, "images", "--quiet", image]
        found = subprocess.run(names, capture_output=True, text=True)
        if found.returncode or not found.stdout.strip():
            return f"{self.tool} has no {image} ({found.stderr.strip() or 'make images builds it'})"
        try:
            command = self.command(image, "--help", env={})
        except subprocess.CalledProcessError as error:
            return f"{self.tool}: {error.stderr.strip()}"
        tried = subprocess.run(command, capture_output=True, text=True, timeout=240)
        said = tried.stderr.strip().splitlines() or [f"status {tried.returncode}"]
        return f"{self.tool}: {said[-1]}" if tried.returncode else ""

    def remove_leftovers(self) -> None:
        """Buildah keeps a container until it is told: those of Millrace's images go."""
        if self.tool != "buildah" or shutil.which("buildah") is None:
            return
        listed = subprocess.run(["buildah", "containers", "--json"], capture_output=True, text=True)
        for container in json.loads(listed.stdout or "null") or []:
            if "/millrace-" in container["imagename"]:
                subprocess.run(["buildah", "rm", container["id"]], capture_output=True)


def find_runner(image: str) -> tuple[Runner | None, list[str]]:
    """The first engine that runs the image, and why those before it don't.

    The environment variable BUILDER names the only one to try.
    """
    refusals = []
    wanted = os.environ.get("BUILDER")
    for tool in (wanted,) if wanted else TOOLS:
        runner = Runner(tool)
        if not (reason := runner.refusal(image)):
            return runner, refusals
        refusals.append(reason)
    return None, refusals
