"""How long a test waits for what must happen: only a hang takes as long, on the slowest machine.

A timeout of what is tested, which a test wants never to be over, is longer than this.
"""

from __future__ import annotations

HANG_S = 120.0
