"""Settings for the whole suite: threads, folders, and where randomness comes from.

Every test starts with `random`, NumPy and torch seeded from `--seed` and the test's own id, so that
a failure comes again whatever ran before it. With the default seed, 0, Hypothesis tries the same
examples in every run; `--seed=random` explores. A failure names the seed that repeats it.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from millrace.cli.process import reach_this_machine_directly
from support.late_loop import DRAW, LateLoops

if TYPE_CHECKING:
    from support.redis_cluster import ClusterServers

# Tiny models gain nothing from a second thread, and on a busy machine they wait for it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
reach_this_machine_directly()
# Stacks of tests leave the user's measured profiles alone, and start as on a new machine.
os.environ.setdefault(
    "MILLRACE_ENGINE__PROFILE_CACHE",
    os.path.join(tempfile.gettempdir(), f"millrace-test-profiles-{os.getpid()}"),
)

# How long an example takes says something of the machine, never of what is tested.
settings.register_profile(
    "millrace",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.register_profile("millrace-fixed", settings.get_profile("millrace"), derandomize=True)
settings.load_profile("millrace-fixed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="of all randomness: a number, or `random`")
    parser.addoption("--late", action="store_true", help="event loops stall and hear late of I/O")
    parser.addoption("--rewrite", action="store_true", help="of transcripts: write what is so now")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Settles seed and loops. xdist's workers get the number with this process's other options."""
    if config.option.seed == "random":
        config.option.seed = str(random.SystemRandom().randrange(1, 1 << 32))
    if config.option.late:
        DRAW.seed(config.option.seed)
        asyncio.set_event_loop_policy(LateLoops())
    if config.option.seed != "0":
        settings.load_profile("millrace")
        if config.option.hypothesis_seed is None:
            config.option.hypothesis_seed = config.option.seed


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed}"


@pytest.fixture(scope="session")
def cluster() -> Iterator["ClusterServers"]:
    """A Redis Cluster with the users of the services, for tests that leave every server alive."""
    from support.redis_cluster import SHARED_PORT, redis_cluster

    with redis_cluster(SHARED_PORT) as servers:
        servers.add_users()
        yield servers


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seeds before the test's fixtures are made. Skips `gpu` tests where there is no device."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("torch finds no CUDA device")
    seed = zlib.crc32(f"{item.config.option.seed}:{item.nodeid}".encode())
    random.seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed)
    if loaded := sys.modules.get("torch"):
        loaded.manual_seed(seed)
        loaded.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # an engine may have set others


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"--seed={item.config.option.seed}"))
    return report


@pytest.fixture
def hears_hangup() -> Iterator[None]:
    """The test hears SIGHUP, which a suite that runs under nohup ignores."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
