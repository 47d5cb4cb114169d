"""The generated pages of docs/reference are what the code says."""

import re
from pathlib import Path

import pytest
from docs.reference.generate import CHART, MONITORING, PAGES, ROOT
from docs.reference.metrics_in_code import ROLES, metrics
from docs.reference.monitoring.queries import Queries

from millrace.proxy.metrics import ProxyMetrics

FOLDER = ROOT / "docs/reference"
WRITTEN_BY_HAND = {"api.md", "board.md"}


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current(name: str) -> None:
    assert (FOLDER / name).read_text() == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_the_same_on_every_machine(name: str) -> None:
    assert str(ROOT) not in (FOLDER / name).read_text()


@pytest.mark.parametrize("name", MONITORING)
def test_the_charts_monitoring_is_current(name: str) -> None:
    assert (CHART / name).read_text() == MONITORING[name](metrics(ROOT)), "run `make docs-pages`"


def test_every_dashboard_is_generated() -> None:
    made = {f"dashboards/{path.name}" for path in CHART.glob("dashboards/*")}
    assert made == {name for name in MONITORING if name.startswith("dashboards/")}


def test_every_metric_of_the_table_has_a_picture() -> None:
    text = (CHART / "dashboards/metrics.json").read_text()
    shown = set(re.findall(r"millrace_[a-z0-9_]+", text))
    for metric in metrics(ROOT):
        series = f"{metric.name}_bucket" if metric.kind == "histogram" else metric.name
        names = {series.replace("ROLE", role) for role in ROLES}
        assert names <= shown, metric.name


def test_a_query_that_no_metric_answers_is_refused() -> None:
    queries = Queries(metrics(ROOT), 'namespace="n"')
    with pytest.raises(ValueError, match="no metric is millrace_proxy_tft_seconds"):
        queries.quantile(0.5, "millrace_proxy_tft_seconds")
    with pytest.raises(ValueError, match="millrace_kv_free_pages is a gauge, no counter"):
        queries.rate("millrace_kv_free_pages")
    with pytest.raises(ValueError, match="millrace_proxy_ttft_seconds has no label role"):
        queries.quantile(0.5, "millrace_proxy_ttft_seconds", "role")
    with pytest.raises(ValueError, match="millrace_proxy_http_requests_total has no label met"):
        queries.checked('rate(millrace_proxy_http_requests_total{@,met="true"}[5m])')
    with pytest.raises(ValueError, match="no metric has the series millrace_proxy_nothing_total"):
        queries.checked("rate(millrace_proxy_nothing_total{@}[5m])")


def test_every_other_page_is_written_by_hand() -> None:
    assert {path.name for path in FOLDER.glob("*.md")} == set(PAGES) | WRITTEN_BY_HAND


def test_metrics_are_read_as_the_registry_has_them() -> None:
    text, _ = ProxyMetrics(dict).registry.render()
    served = re.findall(r"^# TYPE (millrace_\w+) (\w+)$", text.decode(), re.MULTILINE)
    found = {(one.name, one.kind) for one in metrics(ROOT) if one.name.startswith("millrace_proxy")}
    assert {(name, kind) for name, kind in served if not name.endswith("_created")} == found


def test_the_dashboards_and_alerts_ask_for_metrics_of_the_page() -> None:
    page = PAGES["metrics.md"]()
    page = "".join([page, *(page.replace("ROLE", role) for role in ROLES)])
    files = [*CHART.glob("dashboards/*.json"), CHART / "templates/alerts.yaml"]
    asked = {name for path in files for name in _metrics_in(path)}
    assert asked
    missing = {name for name in asked if f"`{name}`" not in page}
    assert not {name for name in missing if f"`{_base(name)}`" not in page}


def _metrics_in(path: Path) -> list[str]:
    """Names of series; `millrace_dev_service` and its like are labels, and
    `slo_class:millrace_...` are series of recording rules."""
    return re.findall(r"(?<!:)\bmillrace_(?!dev_)[a-z]+_[a-z0-9_]+", path.read_text())


def _base(series: str) -> str:
    """The name of the histogram whose series this is."""
    return re.sub(r"_(bucket|sum|count)$", "", series)
