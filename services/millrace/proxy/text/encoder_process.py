"""Tokenises long texts in a process beside the proxy.

The tokenizer's result becomes a list of Python integers, which holds the interpreter's lock for
some 50 ms with a million tokens, and its memory comes back to the system only when the process
ends. In the proxy, all other streams would pay for both.

A message is a length in bytes and so many bytes. The process gets one that says how many texts come
and whether special tokens are added, and one for each text. It answers with one for each: its ids,
int32. It ends at the end of its input.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt
import orjson
from tokenizers import Tokenizer

from millrace.container_limits import usable_cores

#: A process that has had nothing to do for so long ends, and its memory is free.
IDLE_S = 30.0
#: Threads of a process, which share the texts: others need the cores, too.
_MOST_THREADS = 4
_LENGTH_BYTES = 8

TokenArray = npt.NDArray[np.int32]


class EncoderProcess:
    """One process, started by the first text, and again by the next one after it has ended.

    The methods block and may be called on any thread.
    """

    def __init__(self, path: Path, idle_s: float = IDLE_S) -> None:
        """`path` is that of tokenizer.json."""
        self._path = path
        self._idle_s = idle_s
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._idle: threading.Timer | None = None

    @property
    def pid(self) -> int | None:
        """Returns the process id; None while there is no process."""
        process = self._process
        return None if process is None else process.pid

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[TokenArray]:
        """Returns each text's ids, int32 [tokens].

        Raises OSError when the process dies: the next one is new.
        """
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            try:
                process = self._process = self._process or _start(self._path)
                assert process.stdin is not None and process.stdout is not None
                head = orjson.dumps([len(texts), add_special_tokens])
                _write(process.stdin, [head, *(text.encode() for text in texts)])
                found = [_read(process.stdout) for _ in texts]
            except OSError:
                self._end()
                raise
            if any(ids is None for ids in found):
                self._end()
                raise BrokenPipeError("the tokenizer's process has ended")
            self._idle = threading.Timer(self._idle_s, self._rest)
            self._idle.daemon = True
            self._idle.start()
        return [np.frombuffer(ids, dtype=np.int32) for ids in found if ids is not None]

    def close(self) -> None:
        """Ends the process, in the middle of a text, too."""
        if (process := self._process) is not None:
            process.kill()
        with self._lock:
            if self._idle is not None:
                self._idle.cancel()
            self._end()

    def _rest(self) -> None:
        with self._lock:
            if self._idle is threading.current_thread():  # else it has worked again
                self._end()

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):  # the rest of a text can't be flushed
                if pipe is not None:
                    pipe.close()


def _start(path: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", __name__, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the proxy, which answers what it has begun
        env={"RAYON_NUM_THREADS": str(min(_MOST_THREADS, usable_cores())), **os.environ},
    )


def _write(pipe: IO[bytes], messages: Sequence[bytes]) -> None:
    for data in messages:
        pipe.write(len(data).to_bytes(_LENGTH_BYTES, "little"))
        pipe.write(data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes | None:
    """Returns the next message; None at the end of the input."""
    head = pipe.read(_LENGTH_BYTES)
    data = pipe.read(length := int.from_bytes(head, "little"))
    return data if len(head) == _LENGTH_BYTES and len(data) == length else None


def main(path: str) -> None:
    source, target = sys.stdin.buffer, sys.stdout.buffer
    tokenizer = Tokenizer.from_file(path)
    tokenizer.no_padding()
    tokenizer.no_truncation()
    try:
        while (head := _read(source)) is not None:
            many, special = orjson.loads(head)
            texts = [
                message.decode() for _ in range(many) if (message := _read(source)) is not None
            ]
            found = ids_of(tokenizer, texts, add_special_tokens=special)
            _write(target, [ids.tobytes() for ids in found])
    except BrokenPipeError:
        os._exit(1)  # the proxy is gone: nobody reads what the buffer still holds


def ids_of(
    tokenizer: Tokenizer, texts: Sequence[str], *, add_special_tokens: bool
) -> list[TokenArray]:
    """Returns each text's ids, int32 [tokens]."""
    # encode_batch_fast computes no offsets, which are most of the work.
    found = tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
    return [np.array(encoding.ids, dtype=np.int32) for encoding in found]


if __name__ == "__main__":
    main(sys.argv[1])
