"""Notifications, metadata and the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.errors import TransferError
from millrace.transfer.push.messages import TO_RECEIVER, TO_SENDER, Kind, Message, WrittenRange
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace.transfer.transport.peers import PeerMetadata, ProcessIdentity
from millrace.transfer.transport.regions import Memory

u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
messages = st.builds(
    Message,
    kind=st.sampled_from(Kind),
    request_id=st.text(max_size=40),
    lease=u32,
    generation=u64,
    slot=u32,
    parts=st.lists(
        st.builds(
            WrittenRange,
            chunk=u32,
            layer=st.integers(0, 2**16 - 1),
            start_token=u32,
            num_tokens=u32,
            nbytes=u64,
            checksum=u32,
        ),
        max_size=5,
    ).map(tuple),
)


@given(messages)
def test_messages_come_back_as_they_were(message):
    assert Message.decode(message.encode()) == message


@given(st.binary(max_size=60))
def test_any_bytes_are_a_message_or_an_error(payload):
    try:
        assert Message.decode(payload).encode() == payload
    except TransferError as error:
        assert "not a KV notification" in str(error)


def test_channels_tell_the_directions_apart():
    to_receiver = {Kind.WRITTEN, Kind.ALIVE, Kind.DONE, Kind.DRAINED}
    for kind in Kind:
        assert kind.channel == (TO_RECEIVER if kind in to_receiver else TO_SENDER)
    assert TO_RECEIVER != TO_SENDER


def test_metadata_comes_back_as_it_was():
    made = PeerMetadata(
        name="a",
        regions=(Memory(1, 2), Memory(3, 4, device=0)),
        process=ProcessIdentity.mine(),
        connection=b"\x00\xff",
    )
    assert PeerMetadata.decode(made.encode()) == made


@given(st.binary(max_size=40))
def test_any_other_bytes_are_refused(data):
    with pytest.raises(TransferError, match="metadata"):
        PeerMetadata.decode(data)


def test_a_process_is_known_dead_only_when_it_is():
    mine = ProcessIdentity.mine()
    assert not mine.has_ended(mine)
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
        other = ProcessIdentity(mine.host, mine.namespace, child.pid, started)
        assert not other.has_ended(mine)
        os.kill(child.pid, signal.SIGSTOP)
        assert not other.has_ended(mine)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert other.has_ended(mine)  # its parent has not reaped it yet
    finally:
        child.kill()
        child.communicate()
    assert other.has_ended(mine)
    recycled = ProcessIdentity(mine.host, mine.namespace, mine.pid, "1")
    assert recycled.has_ended(mine)
    elsewhere = ProcessIdentity("another machine", mine.namespace, 1, "1")
    assert not elsewhere.has_ended(mine)
    assert not ProcessIdentity("", "", 1, "1").has_ended(mine)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_loopback_stays_on_loopback(host):
    found = transport_environment(host)
    assert (found["UCX_NET_DEVICES"], found["UCX_MEM_MMAP_HOOK_MODE"]) == ("lo", "none")


@pytest.mark.parametrize("host", ["10.0.0.3", "decode-0.millrace.svc"])
def test_elsewhere_ucx_picks_its_devices(host):
    assert {"NIXL_LOG_LEVEL", "UCX_LOG_LEVEL"} == transport_environment(host).keys()
