"""Network addresses as text."""

import pytest

from millrace.wire.address import with_port


@pytest.mark.parametrize(
    ("address", "completed"),
    [
        ("10.0.0.5", "10.0.0.5:7000"),
        ("fd00::5", "[fd00::5]:7000"),
        ("fd00::7000", "[fd00::7000]:7000"),
        ("scheduler-0.svc", "scheduler-0.svc:7000"),
        ("10.0.0.5:80", "10.0.0.5:80"),
        ("[fd00::5]:80", "[fd00::5]:80"),
        ("scheduler-0.svc:80", "scheduler-0.svc:80"),
    ],
)
def test_a_host_gets_the_port_that_it_lacks(address: str, completed: str) -> None:
    assert with_port(address, 7000) == completed
