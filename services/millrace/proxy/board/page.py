"""The page of the board: one file without links, which vite builds from the folder `board`.

The page holds no data. It reads the events from the gateway, or from the page itself where a
recording is put in (`millrace board FILE`).
"""

from __future__ import annotations

import base64
import re
from functools import cache
from hashlib import sha256
from pathlib import Path

PAGE = Path(__file__).with_name("page.html")

#: Where a recording stands in the page: an empty element in the page that a gateway serves.
_SLOT = re.compile(r'(<script type="application/jsonl" id="recording">)(</script>)')
_INLINE = re.compile(r"<script(?: [^>]*)?>(.*?)</script>", re.DOTALL)


@cache
def page() -> str:
    """Returns the page without a recording."""
    return PAGE.read_text(encoding="utf-8")


@cache
def content_security_policy() -> str:
    """Returns the value of the header that lets the page's own scripts run, and no other."""
    scripts = " ".join(f"'sha256-{_digest(text)}'" for text in _INLINE.findall(page()) if text)
    return (
        f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def with_recording(lines: str) -> str:
    """Returns the page with a recording, as one file that needs no server."""
    safe = lines.replace("<", "\\u003c")  # inside JSON's strings alone: no tag can end the element
    return _SLOT.sub(lambda slot: f"{slot[1]}\n{safe}{slot[2]}", page(), count=1)


def _digest(text: str) -> str:
    return base64.b64encode(sha256(text.encode()).digest()).decode()
