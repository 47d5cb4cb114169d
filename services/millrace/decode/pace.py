"""Measures how fast a decode instance generates, for its heartbeats."""

from __future__ import annotations


class TokenPace:
    """The mean time between tokens of the running sequences, since the last `take_s`."""

    def __init__(self) -> None:
        self._last_s: float | None = None  # when the last step ended; None: nothing runs
        self._sum_s = 0.0
        self._gaps = 0

    def stepped(self, now_s: float) -> None:
        """Notes that a step gave every running sequence a token."""
        if self._last_s is not None:
            self._sum_s += now_s - self._last_s
            self._gaps += 1
        self._last_s = now_s

    def paused(self) -> None:
        """Notes that no sequence runs: the next step follows no token."""
        self._last_s = None

    def take_s(self) -> float:
        """Returns the mean in seconds; 0 if no token followed another since the last call."""
        mean_s = self._sum_s / self._gaps if self._gaps else 0.0
        self._sum_s, self._gaps = 0.0, 0
        return mean_s
