"""The board's page in a browser: what it shows of a run, by hand, by keyboard and in words."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest

from millrace.cli.commands.board import page_of, write_page
from millrace.core.board.events import Head
from millrace.core.board.files import BoardFile
from millrace.core.config import SchedulerConfig
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.scenario import Scenario, Traffic, Watch, simulate
from millrace.sim.workload.workload import SloClass
from support.deadlines import HANG_S
from support.live_stack import live_stack
from support.simulation import toy_profile

WAIT_MS = HANG_S * 1000
GUTTER = 76  # pixels before the rows
SHOWN = 1.03  # the whole run's window, in lengths of the run


def recording(path: Path) -> Path:
    scenario = Scenario(
        spec=SimSpec(
            profile=toy_profile(),
            prefill=4,
            decode=2,
            scheduler=SchedulerConfig(policy="edf", preemption="operator"),
        ),
        traffic=Traffic(
            mix="medha-mix",
            rate_rps=4.0,
            requests=60,
            max_input_tokens=60_000,
            slo_classes=(SloClass(name="short", ttft_s=0.5), SloClass(name="long", ttft_s=20.0)),
        ),
    )
    with BoardFile(path, Head(source="simulation", title="toy")) as file:
        simulate(scenario, Watch(board=file.write))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return recording(tmp_path_factory.mktemp("board") / "b.jsonl")


@pytest.fixture(scope="module")
def url(recorded):
    page = recorded.with_suffix(".html")
    write_page(page_of(recorded), page)
    return page.as_uri()


@pytest.fixture
def opened(browser, url):
    """The page with a recording; no script may have failed at the end."""
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    failures: list[str] = []
    page.on("pageerror", lambda error: failures.append(str(error)))
    page.on("console", lambda said: failures.append(said.text) if said.type == "error" else None)
    page.set_default_timeout(WAIT_MS)
    page.goto(url)
    page.wait_for_function("document.querySelector('#summary').textContent.includes('first')")
    yield page
    page.close()
    assert not failures


COLOURS = """(id) => {
  const canvas = document.getElementById(id);
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return new Set(new Uint32Array(data.buffer)).size;
}"""


def test_it_shows_the_whole_run_at_first(opened):
    assert "60 first tokens" in opened.inner_text("#summary")
    assert opened.title() == "toy - Millrace"
    assert opened.evaluate(COLOURS, "fleet") > 5 and opened.evaluate(COLOURS, "lines") > 5
    label = opened.get_attribute("#fleet", "aria-label")
    assert label.startswith("6 instances over time.") and "policy edf" in label


def test_a_replay_is_scrubbed_and_played(opened):
    opened.locator("#scrubber").fill("0")
    opened.wait_for_function("document.querySelector('#summary').textContent.startsWith('0.0 s')")
    assert "0 first tokens" in opened.inner_text("#summary")
    opened.select_option("label:has-text('Speed') select", "0.25")
    opened.click("#play")
    opened.locator("#play", has_text="Stop").wait_for()
    opened.select_option("label:has-text('Speed') select", "64")
    opened.wait_for_function("document.querySelector('#play').textContent === 'Play'")
    assert "60 first tokens" in opened.inner_text("#summary")


def test_a_request_is_chosen_by_keyboard_and_told_in_words(opened):
    opened.locator("#worst summary").press("Enter")
    first = opened.locator("#worst tbody button").first
    name = first.inner_text()
    first.press("Enter")
    details = opened.locator("#details")
    details.get_by_text(name, exact=True).wait_for()
    text = details.inner_text()
    assert "objective" in text and "chunk 0" in text and "KV at" in text


def test_a_filter_counts_its_class_alone(opened):
    opened.select_option("label:has-text('Class') select", "long")
    opened.wait_for_function("!document.querySelector('#summary').textContent.includes('60 first')")
    opened.locator("#worst summary").press("Enter")
    cells = opened.locator("#worst tbody td:nth-child(2)")
    cells.first.wait_for()
    classes = cells.all_inner_texts()
    assert classes and set(classes) == {"long"}


def told(tmp_path: Path, requests: dict[str, tuple[str, str]]) -> str:
    """The page of a run with one first token per request; `requests`: id -> key and instance."""
    lines: list[dict[str, object]] = [{"millrace_board": 1, "source": "simulation"}]
    instances = sorted({instance for _, instance in requests.values()})
    lines += [
        {"t": 0, "kind": "instance", "id": one, "role": "decode", "model": f"model-of-{one}"}
        for one in instances
    ]
    for at, (name, (tenant, instance)) in enumerate(requests.items(), 1):
        lines += [
            {"t": at, "kind": "arrived", "id": name, "tenant": tenant, "prompt_tokens": 9},
            {"t": at, "kind": "placed", "id": name, "kv_ids": [instance]},
            {"t": at + 0.1, "kind": "first_token", "id": name, "ttft_s": 0.1},
        ]
    path = tmp_path / "told.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_page(page_of(path), path.with_suffix(".html"))
    return path.with_suffix(".html").as_uri()


@pytest.mark.parametrize(
    ("label", "value", "left"),
    [("Key", "a", ["r1", "r3"]), ("Key", "b", ["r2"]), ("Model", "model-of-d1", ["r2", "r3"])],
)
def test_a_filter_by_key_or_model_leaves_its_requests(browser, tmp_path, label, value, left):
    requests = {"r1": ("a", "d0"), "r2": ("b", "d1"), "r3": ("a", "d1")}
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(told(tmp_path, requests))
    page.locator("#summary", has_text="3 first tokens").wait_for()
    page.select_option(f"label:has-text('{label}') select", value)
    page.locator("#summary", has_text=f" {len(left)} first tokens").wait_for()
    page.locator("#worst summary").press("Enter")
    page.locator("#worst tbody button").first.wait_for()
    assert sorted(page.locator("#worst tbody button").all_inner_texts()) == left
    page.close()


PICTURE = "document.getElementById('fleet').toDataURL()"


def test_keys_move_and_zoom_a_chart(opened):
    opened.focus("#fleet")
    whole = before = opened.evaluate(PICTURE)
    for key in ("+", "ArrowRight", "-"):
        opened.keyboard.press(key)
        opened.wait_for_function(f"(before) => {PICTURE} !== before", arg=before)
        before = opened.evaluate(PICTURE)
    opened.keyboard.press("Home")
    opened.wait_for_function(f"(whole) => {PICTURE} === whole", arg=whole)


def test_pointing_at_a_chunk_shows_its_request(opened, recorded):
    told = [json.loads(line) for line in recorded.read_text().splitlines()[1:]]
    runs = next(line for line in told if line["kind"] == "runs" and line["instances"] == ["p0"])
    stops = next(
        line
        for line in told
        if line["kind"] == "stops" and line["id"] == runs["id"] and line["t"] > runs["t"]
    )
    begin_s, end_s = told[0]["t"], told[-1]["t"]
    share = ((runs["t"] + stops["t"]) / 2 - begin_s) / ((end_s - begin_s) * SHOWN)
    box = opened.locator("#fleet").bounding_box()
    opened.mouse.move(box["x"] + GUTTER + share * (box["width"] - GUTTER), box["y"] + 30)
    details = opened.locator("#details")
    details.get_by_text(runs["id"], exact=True).wait_for()
    assert "Computed" in details.inner_text() and "prompt" in details.inner_text()


def test_every_control_has_a_name(opened):
    unnamed = opened.evaluate(
        """() => {
          const named = (one) =>
            one.closest("[role=img][aria-label]") ||
            one.labels?.length || one.textContent.trim() || one.ariaLabel;
          const all = [...document.querySelectorAll("button, input, select, canvas")];
          return all.filter((one) => !named(one)).map((one) => one.outerHTML);
        }"""
    )
    assert unnamed == []


def test_dark_and_light_differ(browser, url):
    grounds = set()
    for scheme in ("dark", "light"):
        page = browser.new_page(color_scheme=scheme)
        page.goto(url)
        grounds.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.close()
    assert len(grounds) == 2


def test_a_bad_recording_is_said_to_be_bad(browser, tmp_path):
    path = tmp_path / "b.html"
    good = tmp_path / "b.jsonl"
    good.write_text('{"millrace_board":1,"source":"live"}\n')
    write_page(page_of(good).replace('"millrace_board":1', '"millrace_board":9'), path)
    page = browser.new_page()
    page.goto(f"file://{path}")
    page.get_by_text("reads version 1").wait_for(timeout=WAIT_MS)
    page.close()


# ---- the gateway's page


class Served:
    """A stack of real processes, served in another thread: Playwright's calls block this one."""

    def __init__(self, *models: str, token: str) -> None:
        """The first model is named "tiny", the others "model-1" and so on."""
        self._model = models[0]
        self._more = [(model, f"model-{number}") for number, model in enumerate(models[1:], 1)]
        self._settings = [f"proxy.admin_token={token}"]
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        try:
            async with live_stack(self._model, more=self._more, settings=self._settings) as stack:
                self.url = stack.url
                self._ready.set()
                await self._stop.wait()
        finally:
            self._ready.set()

    def __enter__(self) -> Served:
        self._thread.start()
        assert self._ready.wait(3 * HANG_S) and self.url
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def test_a_live_stack_is_followed_and_its_policy_changed(browser):
    import httpx

    from millrace.shipped import SHIPPED_MODEL

    model = str(SHIPPED_MODEL)
    with Served(model, model, token="s3cret") as served:
        page = browser.new_page()
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{served.url}/board")
        page.get_by_label("Admin key").fill("wrong")
        page.get_by_role("button", name="Show").click()
        page.get_by_text("needs proxy.admin_token").wait_for()
        page.get_by_label("Admin key").fill("s3cret")
        page.get_by_role("button", name="Show").click()
        page.locator("#fleet[aria-label^='3 instances']").wait_for()
        body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 4}
        answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=HANG_S)
        assert answer.status_code == 200
        page.locator("#summary", has_text="1 first tokens").wait_for()
        page.locator("#worst summary").press("Enter")
        page.locator("#worst tbody button").first.press("Enter")
        page.get_by_role("button", name="Why?").click()
        page.locator("#details", has_text="Time until its first token").wait_for()
        page.locator("#waterfall", has_text="first_decode_step").wait_for()
        assert page.locator("#waterfall li", has_text="tokenise").count() == 1
        page.locator("#what-if [name=policy]").select_option("fcfs")
        page.get_by_role("button", name="Change").click()
        page.locator("#summary", has_text="policy fcfs").wait_for()
        page.locator("#what-if [name=rate]").fill("0.75")
        page.get_by_role("button", name="Change").click()
        page.locator("#summary", has_text="improvement rate 0.75").wait_for()
        page.get_by_label("Served model").select_option("model-1")
        page.locator("#summary", has_text="improvement rate 0.30").wait_for()
        page.locator("#summary", has_text=" 0 first tokens").wait_for()
        page.locator("#fleet[aria-label^='3 instances']").wait_for()
        page.locator("#what-if [name=policy]").select_option("edf")
        page.get_by_role("button", name="Change").click()
        page.locator("#summary", has_text="policy edf").wait_for()
        headers = {"authorization": "Bearer s3cret"}
        answer = httpx.get(f"{served.url}/admin/scheduler?model=tiny", headers=headers)
        assert answer.json()["policy"] == "fcfs"
        page.close()
