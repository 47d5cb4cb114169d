"""Dashboards and alerts use only metrics that the code makes."""

import itertools
import json
import re

import pytest
import yaml

from support.chart import CHART, ROOT, find, profile


def declared() -> set[str]:
    """Returns names of metrics in the code. An f-string is filled with the file's other words."""
    names: set[str] = set()
    for folder in ("services", "operator"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            words = {"prefill", "decode", "mixed", "kvp", *re.findall(r'"([a-z0-9_]+)"', text)}
            names |= {word for word in words if word.startswith("millrace_")}
            for template in re.findall(r'f"(millrace_[a-z0-9_{}.]+)"', text):
                parts = re.split(r"\{[^}]+\}", template)
                for filling in itertools.product(words, repeat=len(parts) - 1):
                    names.add("".join(map("".join, zip(parts, [*filling, ""], strict=True))))
    return names


DECLARED = declared()
NAMES = sorted(path.stem for path in CHART.glob("dashboards/*.json"))


def used(text: str) -> set[str]:
    """Returns the names of metrics in PromQL; a histogram's by its base."""
    names = set(re.findall(r"\bmillrace_[a-z0-9_]+", text))
    names -= {"millrace_dev_service", "millrace_dev_pool"}  # labels of the PodMonitor
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def every_panel(name: str) -> list[dict]:
    """Rows and panels of a dashboard, with those inside closed rows."""
    panels = json.loads((CHART / f"dashboards/{name}.json").read_text())["panels"]
    return [one for panel in panels for one in (panel, *panel.get("panels", ()))]


@pytest.mark.parametrize("name", NAMES)
def test_dashboards_show_metrics_that_there_are(name: str) -> None:
    ids = [panel["id"] for panel in every_panel(name)]
    panels = [panel for panel in every_panel(name) if panel["type"] != "row"]
    assert panels and len(ids) == len(set(ids))
    for panel in panels:
        for target in panel["targets"]:
            assert used(target["expr"]) and used(target["expr"]) <= DECLARED, panel["title"]


def test_alerts_watch_metrics_that_there_are() -> None:
    rule = find(profile("everything"), "PrometheusRule", "llm")
    rules = [rule for group in rule["spec"]["groups"] for rule in group["rules"]]
    alerts = [rule for rule in rules if "alert" in rule]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    for alert in alerts:
        asked = set(re.findall(r"\bslo_class:[a-z0-9_:]+", alert["expr"]))
        assert asked <= recorded
        assert asked or (used(alert["expr"]) and used(alert["expr"]) <= DECLARED), alert["alert"]
        assert alert["annotations"]["summary"] and alert["labels"]["severity"]
    assert len({alert["alert"] for alert in alerts}) == len(alerts) >= 8


def test_the_rules_of_objectives_use_the_budget() -> None:
    """Windows and factors of Google's SRE workbook, chapter 5: a long window and a short one."""
    rule = find(profile("everything"), "PrometheusRule", "llm")
    (group,) = [one for one in rule["spec"]["groups"] if one["name"] == "millrace-slo"]
    attainment = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]["alerts"]
    counters = {
        "ttft": "millrace_scheduler_slo_requests_total",
        "tbt": "millrace_proxy_slo_requests_total",
        "e2e": "millrace_proxy_slo_requests_total",
    }
    windows = {}
    for one in group["rules"]:
        text = one.get("record") or one["expr"]
        name, *others = set(re.findall(r"slo_class:millrace_(\w+)_missed:ratio_rate", text))
        assert not others
        if "record" in one:
            window = text.rpartition("ratio_rate")[2]
            assert one["expr"].count(f"[{window}]") == 2
            assert one["expr"].count(counters[name]) == 2
            assert one["expr"].count(f'objective="{name}"') == (0 if name == "ttft" else 2)
            assert one["expr"].count('met="false"') == 1
            continue
        budget = 1 - attainment[f"{name}Attainment"]
        parts = re.findall(r"ratio_rate(\w+)\{[^}]*\} > ([0-9.]+)", one["expr"])
        windows[one["alert"]] = [(window, round(float(at) / budget, 6)) for window, at in parts]
    factors = {
        "BurnsFast": [("1h", 14.4), ("5m", 14.4)],
        "Burns": [("6h", 6.0), ("30m", 6.0)],
        "BurnsSlowly": [("3d", 1.0), ("6h", 1.0)],
    }
    assert windows == {
        f"Millrace{name}Budget{burn}": found
        for name in ("Ttft", "Tbt", "E2e")
        for burn, found in factors.items()
    }


def test_prometheus_can_read_every_query() -> None:
    reason = "promql-parser (a dependency of the extra dev) reads the queries"
    parser = pytest.importorskip("promql_parser", reason=reason)
    rule = find(profile("everything"), "PrometheusRule", "llm")
    queries = [one["expr"] for group in rule["spec"]["groups"] for one in group["rules"]]
    for panel in itertools.chain.from_iterable(map(every_panel, NAMES)):
        queries += [target["expr"] for target in panel.get("targets", ())]
    assert len(queries) > 200
    for query in queries:
        plain = query.replace("$__rate_interval", "5m").replace("$__range", "1h")
        parser.parse(re.sub(r"\$\{?(\w+)(:\w+)?\}?", r"\1", plain))  # raises ValueError


def test_dashboards_arrive_as_they_are() -> None:
    maps = [o for o in profile("everything") if "-dashboard-" in o["metadata"]["name"]]
    for found in maps:
        ((name, text),) = found["data"].items()
        assert text == (CHART / "dashboards" / name).read_text()
    assert len(maps) == len(list(CHART.glob("dashboards/*.json")))
