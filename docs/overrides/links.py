"""A hook of mkdocs for links that leave docs/, to code or to the README.

On GitHub such a link works as it stands. In the site it leads to the repository where `repo_url` is
set, and is plain text where it is not. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.links")
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(((?:\.\./)+[^)#\s]*)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of one page."""
    docs = Path(config.docs_dir)
    folder = (docs / page.file.src_uri).parent

    def rewrite(link: re.Match[str]) -> str:
        text, path, anchor = link[1], unquote(link[2]), link[3] or ""
        target = (folder / path).resolve()
        if target.is_relative_to(docs):
            return link[0]
        if not target.exists():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        if not config.repo_url:
            return text
        kind = "tree" if target.is_dir() else "blob"
        inside = target.relative_to(docs.parent).as_posix()
        return f"[{text}]({config.repo_url.rstrip('/')}/{kind}/main/{inside}{anchor})"

    return LINK.sub(rewrite, markdown)
