"""Dashboards and alerts use only metrics that the code makes."""

import itertools
import json
import re

import pytest

from support.chart import CHART, ROOT, find, profile


def declared() -> set[str]:
    """Returns names of metrics in the code. An f-string is filled with the file's other words."""
    names: set[str] = set()
    for folder in ("services", "operator"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            words = {"prefill", "decode", "mixed", *re.findall(r'"([a-z0-9_]+)"', text)}
            names |= {word for word in words if word.startswith("millrace_")}
            for template in re.findall(r'f"(millrace_[a-z0-9_{}.]+)"', text):
                parts = re.split(r"\{[^}]+\}", template)
                for filling in itertools.product(words, repeat=len(parts) - 1):
                    names.add("".join(map("".join, zip(parts, [*filling, ""], strict=True))))
    return names


DECLARED = declared()


def used(text: str) -> set[str]:
    """Returns the names of metrics in PromQL; a histogram's by its base."""
    names = set(re.findall(r"\bmillrace_[a-z0-9_]+", text))
    names -= {"millrace_dev_service", "millrace_dev_pool"}  # labels of the PodMonitor
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


@pytest.mark.parametrize("name", ["serving", "operator"])
def test_dashboards_show_metrics_that_there_are(name: str) -> None:
    dashboard = json.loads((CHART / f"dashboards/{name}.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert panels and len(ids) == len(set(ids))
    for panel in panels:
        for target in panel["targets"]:
            assert used(target["expr"]) and used(target["expr"]) <= DECLARED, panel["title"]


def test_alerts_watch_metrics_that_there_are() -> None:
    rule = find(profile("everything"), "PrometheusRule", "llm")
    alerts = [alert for group in rule["spec"]["groups"] for alert in group["rules"]]
    for alert in alerts:
        assert used(alert["expr"]) and used(alert["expr"]) <= DECLARED, alert["alert"]
        assert alert["annotations"]["summary"] and alert["labels"]["severity"]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 8


def test_dashboards_arrive_as_they_are() -> None:
    maps = [o for o in profile("everything") if "-dashboard-" in o["metadata"]["name"]]
    for found in maps:
        ((name, text),) = found["data"].items()
        assert text == (CHART / "dashboards" / name).read_text()
    assert len(maps) == len(list(CHART.glob("dashboards/*.json")))
