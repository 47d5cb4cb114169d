"""The page's sources: their own tests, and that the committed page was built from them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from millrace.proxy.board.page import PAGE

SOURCES = Path(__file__).resolve().parents[2] / "board"


@pytest.fixture(scope="module")
def npx() -> str:
    found = shutil.which("npx")
    if found is None:
        pytest.skip("node is not installed")
    if not (SOURCES / "node_modules/.bin/vite").exists():
        pytest.skip("the page's libraries are not installed: cd board && npm ci")
    return found


def test_the_sources_pass_their_own_tests(npx):
    done = subprocess.run([npx, "vitest", "run"], cwd=SOURCES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_committed_page_is_built_from_the_sources(npx, tmp_path):
    command = [npx, "vite", "build", "--outDir", str(tmp_path)]
    done = subprocess.run(command, cwd=SOURCES, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "page.html").read_text() == PAGE.read_text(), "cd board && npm run build"
