"""What a process need not have installed."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["millrace.proxy.main", "millrace.scheduler.main"])
def test_gateway_and_scheduler_never_import_torch(module: str) -> None:
    probe = f"import sys; sys.modules['torch'] = None; import {module}"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
