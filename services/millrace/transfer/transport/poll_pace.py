"""Sets how often a transport's thread polls: new work does not wake the thread."""

from __future__ import annotations

from typing import Final

POLL_FIRST_S: Final = 50e-6
POLL_MOST_S: Final = 500e-6
IDLE_POLL_S: Final = 1.0
#: Seconds without progress of a write after which the thread sleeps between polls. UCX moves the
#: bytes of our writes inside our polls; a write that stands still waits for its peer.
SPIN_S: Final = 2e-3
#: Seconds of polling after a command: UCX sends notifications and connection requests while it
#: polls, and no event says when they are sent.
LINGER_S: Final = 0.05
#: Seconds for which the thread leaves agent and interpreter to other threads that poll.
ATTENDED_S: Final = 1e-3


class PollPace:
    """Sets the pause between polls. Times are in seconds of one clock."""

    def __init__(self, now_s: float) -> None:
        self._pause_s = POLL_FIRST_S
        self._worked_s = now_s

    def next_s(self, now_s: float, *, worked: bool, is_writing: bool, is_listening: bool) -> float:
        """Returns the seconds to wait for the next poll; 0 for no wait. `worked`: the poll found
        work. `is_writing`: polls move the bytes of a write. `is_listening`: something may come, or
        end by itself.
        """
        if worked:
            self._worked_s, self._pause_s = now_s, POLL_FIRST_S
        quiet_s = now_s - self._worked_s
        if is_writing and quiet_s < SPIN_S:
            return 0.0
        if is_writing or is_listening or quiet_s < LINGER_S:
            pause_s = self._pause_s
            self._pause_s = min(1.5 * pause_s, POLL_MOST_S)
            return pause_s
        return IDLE_POLL_S
