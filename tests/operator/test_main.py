"""The command: its options, its environment, its exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from millrace.core.errors import ConfigError, MillraceError
from millrace_operator.environment import defaults_from, use_settings_of
from millrace_operator.spec import Defaults

IMAGES = {
    f"MILLRACE_IMAGE_{role}": f"millrace-{role.lower()}:1"
    for role in ("PROXY", "SCHEDULER", "PREFILL", "DECODE", "KVP")
}


def test_defaults_come_from_the_environment():
    more = {"MILLRACE_IMAGE_PULL_POLICY": "Always", "MILLRACE_REDIS_SECRET": "redis"}
    more |= {"MILLRACE_TLS_SECRET": "tls", "MILLRACE_REDIS_PER_SERVICE": "true"}
    assert defaults_from({**IMAGES, **more}) == Defaults(
        images={role: f"millrace-{role}:1" for role in IMAGES_OF},
        pull_policy="Always",
        redis_secret="redis",
        redis_per_service=True,
        tls_secret="tls",
    )
    assert defaults_from(IMAGES).pull_policy == "IfNotPresent"
    with pytest.raises(MillraceError, match="lacks MILLRACE_IMAGE_DECODE, MILLRACE_IMAGE_KVP"):
        defaults_from({name: IMAGES[name] for name in list(IMAGES)[:3]})


IMAGES_OF = ("proxy", "scheduler", "prefill", "decode", "kvp")


def test_tls_is_given_whole_or_not_at_all():
    with pytest.raises(ConfigError, match=r"tls.*cert_file"):
        use_settings_of({"MILLRACE_TLS__CA_FILE": "ca"}, log_format="text", log_level="info")


#: Runs the command and prints its status and what it imported, after its own output.
_PROGRAM = """
import json, sys
from millrace_operator.main import main
try:
    main()
except SystemExit as ended:
    print(json.dumps([ended.code, sorted(sys.modules)]))
"""


def test_help_imports_only_options():
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, "--help"], capture_output=True, text=True, check=True
    )
    *shown, last = ran.stdout.splitlines()
    status, modules = json.loads(last)
    assert status == 0 and any("--lease-namespace" in line for line in shown)
    banned = {"aiohttp", "asyncio", "grpc", "kopf", "kubernetes", "pydantic", "rich", "yaml"}
    assert not banned & set(modules)
    assert len(modules) <= 240  # the interpreter and typer import 150


def test_without_a_cluster_it_says_so_in_a_line():
    command = [sys.executable, "-m", "millrace_operator", "--kubeconfig", "/nowhere"]
    done = subprocess.run(
        [*command, "--log-format", "text"],
        capture_output=True,
        text=True,
        env={**os.environ, **IMAGES},
    )
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "no access to a Kubernetes cluster" in done.stderr
