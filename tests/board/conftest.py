"""A headless browser for the board's page; tests skip where there is none."""

from __future__ import annotations

import shutil

import pytest

#: Names of browsers that Playwright drives; its own download comes first.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        paths = [None, *filter(None, map(shutil.which, BROWSERS))]
        for path in paths:
            try:
                # Without a sandbox: containers where tests run as root allow none.
                started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
            except sync_api.Error:
                continue
            yield started
            started.close()
            return
    pytest.skip("no Chromium: apt-get install chromium, or `playwright install chromium`")
