"""A plugin of pytest: of all collected tests, runs those of one of several processes.

The environment variable MILLRACE_SHARD says which: 2/8 is the third of eight.
"""

from __future__ import annotations

import os
from typing import Any, Final

VARIABLE: Final = "MILLRACE_SHARD"


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keeps every n-th test, so that neighbours, which take as long, come to different shards."""
    index, count = map(int, os.environ[VARIABLE].split("/"))
    items[:] = items[index::count]
