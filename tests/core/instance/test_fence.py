"""Which leader's messages count."""

from __future__ import annotations

import pytest

from millrace.core.instance.fence import EpochFence


@pytest.mark.parametrize("first", [1, 999, 1_700_000_000_500])
def test_the_first_epoch_and_its_own_messages_count(first: int) -> None:
    fence = EpochFence()
    assert fence.admits(first) and fence.admits(first)
    assert fence.epoch == first


@pytest.mark.parametrize(
    ("epoch", "counts"),
    [
        (5_000, True),  # the next second
        (4_999, False),  # of the same second: the attempts of both have the same numbers
        (4_001, False),
        (3_999, False),
        (9_123, True),
    ],
)
def test_only_an_epoch_of_a_later_second_follows(epoch: int, counts: bool) -> None:
    fence = EpochFence()
    assert fence.admits(4_500)
    assert fence.admits(epoch) is counts
    assert fence.epoch == (epoch if counts else 4_500)
    assert fence.admits(4_500) is not counts
