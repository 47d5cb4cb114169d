"""Every link in the tracked Markdown files leads to a file and a heading that exist. No network."""

import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(\s*<?([^)<>\s]+)>?(?:\s+\"[^\"]*\")?\s*\)")
HTML_LINK = re.compile(r"<(?:a|img)\s[^>]*?(?:href|src)=\"([^\"]+)\"")
HTML_ANCHOR = re.compile(r"<[a-z]+\s[^>]*?(?:id|name)=\"([^\"]+)\"")
SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:")


def _pages() -> list[str]:
    git = shutil.which("git")
    names = []
    if git is not None:  # lists nothing in an unpacked archive
        command = [git, "ls-files", "*.md"]
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    names = names or [str(p.relative_to(ROOT)) for p in ROOT.glob("docs/**/*.md")]
    return [name for name in names if (ROOT / name).exists()]


def _prose(text: str) -> Iterator[str]:
    """The lines outside fenced code."""
    fence = ""
    for line in text.splitlines():
        mark = FENCE.match(line)
        if mark and not fence:
            fence = mark[1]
        elif mark and mark[1].startswith(fence):
            fence = ""
        elif not fence:
            yield line


@cache
def _links(path: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", "\n".join(_prose(path.read_text(encoding="utf-8"))))
    return LINK.findall(text) + HTML_LINK.findall(text)


@cache
def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings as GitHub names them, and those that HTML gives."""
    found: set[str] = set()
    lines = list(_prose(path.read_text(encoding="utf-8")))
    for line in lines:
        found.update(HTML_ANCHOR.findall(line))
        if heading := re.match(r"#{1,6}\s+(.*?)\s*#*$", line):
            slug = name = slug_of(heading[1])
            repeats = 0
            while slug in found:
                repeats += 1
                slug = f"{name}-{repeats}"
            found.add(slug)
    return found


def slug_of(heading: str) -> str:
    """GitHub's anchor: links' texts alone, lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


@pytest.mark.parametrize("name", _pages())
def test_links_resolve(name: str) -> None:
    page = ROOT / name
    broken = []
    for link in _links(page):
        if SCHEME.match(link):
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_relative_to(ROOT) or not target.exists():
            broken.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{link}: no such heading")
    assert not broken, f"{name}:\n" + "\n".join(broken)


@pytest.mark.parametrize(
    ("heading", "slug"),
    [
        ("When something dies", "when-something-dies"),
        ("On this machine: `millrace up --autoscale`", "on-this-machine-millrace-up---autoscale"),
        ("A [link](page.md) in it", "a-link-in-it"),
    ],
)
def test_anchors_are_named_as_github_names_them(heading: str, slug: str) -> None:
    assert slug_of(heading) == slug
