"""Carries the messages of pipes over a stream of frames, at either end of the stream."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Final, NamedTuple

from millrace.core.errors import TransferError
from millrace.instance.stages.remote.codec import decode, encode

log = logging.getLogger(__name__)

#: The message of a channel that has ended.
ENDED: Final = b""


class Frame(NamedTuple):
    channel: int
    message: bytes


class Relay:
    """Reads and writes pipes on threads of its own: a channel that waits holds up no other."""

    def __init__(self, pipes: Sequence[Connection], send: Callable[[Frame], None]) -> None:
        """Takes over `pipes`, one for each channel. `send` gets what comes out of them, on any
        thread, at once.
        """
        self._pipes = tuple(pipes)
        self._send = send
        self._incoming: tuple[SimpleQueue[bytes], ...] = tuple(SimpleQueue() for _ in pipes)
        self._threads = [
            threading.Thread(target=work, args=(channel,), name=f"relay {channel}", daemon=True)
            for channel in range(len(pipes))
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def receive(self, frame: Frame) -> None:
        """Puts a frame of the stream into its pipe. Raises IndexError when there is no such
        channel.
        """
        self._incoming[frame.channel].put(frame.message)

    def end(self) -> None:
        """Ends all pipes after what has come: their other ends read on to that."""
        for incoming in self._incoming:
            incoming.put(ENDED)

    def close(self) -> None:
        """Ends all pipes, and closes them."""
        self.end()
        for thread in self._threads:
            thread.join()
        for pipe in self._pipes:
            pipe.close()

    def _read(self, channel: int) -> None:
        pipe = self._pipes[channel]
        try:
            while True:
                self._send(Frame(channel, encode(pipe.recv())))
        except (EOFError, OSError):
            pass  # the other end is gone, or the channel has ended
        except TypeError as error:
            log.error("channel %d ends: %s", channel, error)
        self._send(Frame(channel, ENDED))
        self._incoming[channel].put(ENDED)

    def _write(self, channel: int) -> None:
        pipe = self._pipes[channel]
        try:
            while (message := self._incoming[channel].get()) != ENDED:
                pipe.send(decode(message))
        except OSError:
            pass  # the other end is gone
        except TransferError as error:
            log.error("channel %d ends: %s", channel, error)
        _shut(pipe)


def _shut(pipe: Connection) -> None:
    """Ends a pipe for both ends at once. (A pipe that is closed while a thread reads it stays open
    until the thread has read something.)
    """
    with suppress(OSError), socket.socket(fileno=os.dup(pipe.fileno())) as both:
        both.shutdown(socket.SHUT_RDWR)
