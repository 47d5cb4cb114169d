"""Which numbers the attempts of earlier schedulers may have."""

from __future__ import annotations

import time

from millrace.core.epochs import attempts_before


def test_a_scheduler_that_leads_later_has_larger_numbers_which_messages_can_carry() -> None:
    epoch = int(time.time() * 1000)
    assert attempts_before(epoch) < attempts_before(epoch + 5000)
    assert 0 < attempts_before(epoch) < 2**32  # uint32 in messages
