"""The defects that `Machine.check_integrity` finds. `transcripts/` tests the machine's
behaviour."""

from __future__ import annotations

import pytest

from millrace.core.errors import IntegrityError
from support.core_events import Bench, instance


def test_check_integrity_finds_a_leak():
    bench = Bench(instance("p0"), instance("d0"))
    bench.submit("a")
    decode = bench.machine.cluster.instances["d0"]
    decode.virtual_pages += 1
    with pytest.raises(IntegrityError, match="d0: virtual pages: kept 9, counted 8"):
        bench.machine.check_integrity()
    decode.virtual_pages -= 1
    del bench.machine.cluster.instances["p0"].holdings["a"]
    with pytest.raises(IntegrityError, match="p0"):
        bench.machine.check_integrity()


def test_check_integrity_watches_over_those_that_leave():
    bench = Bench(instance("d0"))
    bench.machine.cluster.instances["d0"].leaving = True
    with pytest.raises(IntegrityError, match="d0: drains"):
        bench.machine.check_integrity()
