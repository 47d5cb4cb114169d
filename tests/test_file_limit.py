"""The limit of open files: raised as far as the process may, and shared with clients."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millrace.file_limit import most_clients

_RAISE = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
from millrace.file_limit import raise_file_limit
print(raise_file_limit(), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("hard", [100, 2000])
def test_a_process_takes_what_it_may_have(hard: int) -> None:
    command = [sys.executable, "-c", _RAISE.format(hard=hard)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said == f"{hard} ({hard}, {hard})\n"


@pytest.mark.parametrize(("files", "clients"), [(1024, 768), (65536, 65280), (256, 128)])
def test_clients_leave_files_to_the_services_behind(files: int, clients: int) -> None:
    assert most_clients(files) == clients
