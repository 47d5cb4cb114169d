"""Sets how often a transport's thread polls: new work does not wake the thread."""

from __future__ import annotations

from typing import Final

POLL_FIRST_S: Final = 50e-6
POLL_MOST_S: Final = 500e-6
IDLE_POLL_S: Final = 1.0
#: UCX moves the bytes of our writes inside our polls, so none is slept over until a write has
#: seen no progress for this long: then it waits for its peer, not for us.
SPIN_S: Final = 2e-3
#: After a command the thread keeps polling this long: notifications and connections to peers are
#: sent on while it polls, and nothing says when they are.
LINGER_S: Final = 0.05
#: While other threads make progress, this one leaves them the agent and the interpreter.
ATTENDED_S: Final = 1e-3


class PollPace:
    """Times in seconds of one clock."""

    def __init__(self, now_s: float) -> None:
        self._pause_s = POLL_FIRST_S
        self._worked_s = now_s

    def next_s(self, now_s: float, *, worked: bool, is_writing: bool, is_listening: bool) -> float:
        """How long to wait for the next look; 0: not at all. `worked`: there was something."""
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
