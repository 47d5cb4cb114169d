"""The command: its options, its environment, its exit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millrace.core.errors import ConfigError, MillraceError
from millrace_operator.main import defaults_from, use_settings_of
from millrace_operator.spec import Defaults

IMAGES = {
    f"MILLRACE_IMAGE_{role}": f"millrace-{role.lower()}:1"
    for role in ("PROXY", "SCHEDULER", "PREFILL", "DECODE", "KVP")
}


def test_defaults_come_from_the_environment():
    more = {"MILLRACE_IMAGE_PULL_POLICY": "Always", "MILLRACE_REDIS_SECRET": "redis"}
    assert defaults_from({**IMAGES, **more}) == Defaults(
        images={role: f"millrace-{role}:1" for role in IMAGES_OF},
        pull_policy="Always",
        redis_secret="redis",
    )
    assert defaults_from(IMAGES).pull_policy == "IfNotPresent"
    with pytest.raises(MillraceError, match="lacks MILLRACE_IMAGE_DECODE, MILLRACE_IMAGE_KVP"):
        defaults_from({name: IMAGES[name] for name in list(IMAGES)[:3]})


IMAGES_OF = ("proxy", "scheduler", "prefill", "decode", "kvp")


def test_tls_is_given_whole_or_not_at_all():
    with pytest.raises(ConfigError, match=r"tls.*cert_file"):
        use_settings_of({"MILLRACE_TLS__CA_FILE": "ca"}, log_format="text", log_level="info")


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
