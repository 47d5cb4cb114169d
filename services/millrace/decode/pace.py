"""How fast a decode instance generates, as its heartbeats tell."""

from __future__ import annotations


class TokenPace:
    """The mean time from token to token of what runs, from one reading to the next."""

    def __init__(self) -> None:
        self._last_s: float | None = None  # when the last step ended; None: nothing runs
        self._sum_s = 0.0
        self._gaps = 0

    def stepped(self, now_s: float) -> None:
        """A step has given every running sequence a token."""
        if self._last_s is not None:
            self._sum_s += now_s - self._last_s
            self._gaps += 1
        self._last_s = now_s

    def paused(self) -> None:
        """Nothing runs: the next step follows no token."""
        self._last_s = None

    def take_s(self) -> float:
        """Seconds; 0 when no token followed another since the last call."""
        mean_s = self._sum_s / self._gaps if self._gaps else 0.0
        self._sum_s, self._gaps = 0.0, 0
        return mean_s
