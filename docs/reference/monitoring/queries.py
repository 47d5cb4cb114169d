"""Builds PromQL of metrics that the code registers.

Names, labels and kinds are checked against the table of metrics (`metrics_in_code`): a query for a
metric or a label that does not exist, or a rate of a gauge, raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from docs.reference.metrics_in_code import ROLES, Metric

#: Labels that Prometheus adds: of the target, and of the PodMonitor.
_TARGET_LABELS = frozenset({"pod", "app_kubernetes_io_component", "le"})
_RATE = "$__rate_interval"

#: By the end of a name: the unit of a value, and of its rate.
_UNITS = (
    ("_seconds", "s", "short"),
    ("_bytes", "bytes", "Bps"),
    ("_requests", "short", "reqps"),
    ("_tokens", "short", "short"),
)


@dataclass(frozen=True, slots=True)
class Query:
    """One line of a panel. `unit` is Grafana's; `help` is the metric's, in the table."""

    expr: str
    legend: str
    unit: str = "short"
    help: str = ""


class Queries:
    """Builds queries, all with the same selector: of one namespace and service."""

    def __init__(self, metrics: Sequence[Metric], selector: str) -> None:
        self.selector = selector
        self.metrics: Mapping[str, Metric] = {one.name: one for one in _by_role(metrics)}

    def rate(self, name: str, *by: str, where: str = "", legend: str = "") -> Query:
        """Events per second of a counter."""
        series = self._series(name, "counter", by, where)
        expr = f"{_sum(by)}(rate({series}[{_RATE}]))"
        return self._query(name, expr, by, legend, is_rate=True)

    def increase(self, name: str, *by: str, legend: str = "") -> Query:
        """Events of a counter within the interval of the picture."""
        series = self._series(name, "counter", by, "")
        return self._query(name, f"{_sum(by)}(increase({series}[{_RATE}]))", by, legend)

    def now(self, name: str, *by: str, legend: str = "", most: bool = False) -> Query:
        """A gauge, summed over processes; or the most that one of them has."""
        series = self._series(name, "gauge", by, "")
        return self._query(name, f"{_sum(by, 'max' if most else 'sum')}({series})", by, legend)

    def each(self, name: str, legend: str) -> Query:
        """A gauge of each process."""
        return self._query(name, self._series(name, "gauge", (), ""), (), legend)

    def quantile(self, q: float, name: str, *by: str, legend: str = "") -> Query:
        """A quantile of a histogram."""
        self._series(name, "histogram", by, "")
        shown = legend or " ".join([f"p{q * 100:g}", *(f"{{{{{one}}}}}" for one in by)])
        series = f"rate({name}_bucket{{{self.selector}}}[{_RATE}])"
        expr = f"histogram_quantile({q:g}, sum by ({', '.join(['le', *by])}) ({series}))"
        return self._query(name, expr, by, shown)

    def quantiles(self, name: str, *by: str) -> list[Query]:
        return [self.quantile(q, name, *by) for q in (0.5, 0.99)]

    def sum_rate(self, name: str, *by: str) -> Query:
        """What the observations of a histogram add up to, per second."""
        self._series(name, "histogram", by, "")
        expr = f"{_sum(by)}(rate({name}_sum{{{self.selector}}}[{_RATE}]))"
        return self._query(name, expr, by, "", is_rate=True)

    def written(self, expr: str, legend: str, unit: str = "short") -> Query:
        """Any expression; `@` stands for the selector."""
        return Query(self.checked(expr), legend, unit)

    def checked(self, expr: str) -> str:
        """Returns the expression with the selector for `@`.

        Raises ValueError for a series that no metric has, and for labels that its metric has not.
        """
        for series, matchers in re.findall(r"(?<!:)\b(millrace_\w+)\{([^}]*)\}", expr):
            name = _metric_of(series, self.metrics)
            labels = re.findall(r"(\w+)(?:=~|!=|=)", matchers)
            self._check_labels(self.metrics[name], labels)
        return expr.replace("@", self.selector)

    def all_of(self, metric: Metric) -> list[Query]:
        """Everything that one metric of the table says, by its labels."""
        found: list[Query] = []
        for one in _by_role([metric]):
            legend = " ".join(f"{{{{{label}}}}}" for label in one.labels)
            if metric.name != one.name:
                legend = one.name.split("_")[1]
            if one.kind == "histogram":
                found += self.quantiles(one.name, *one.labels)
            elif one.kind == "counter":
                found.append(self.rate(one.name, *one.labels, legend=legend))
            else:
                found.append(self.now(one.name, *one.labels, legend=legend))
        return found

    def _series(self, name: str, kind: str, by: Sequence[str], where: str) -> str:
        metric = self.metrics.get(name)
        if metric is None:
            raise ValueError(f"no metric is {name}")
        if metric.kind != kind:
            raise ValueError(f"{name} is a {metric.kind}, no {kind}")
        self._check_labels(metric, by)
        return self.checked(f"{name}{{{','.join(filter(None, ('@', where)))}}}")

    def _check_labels(self, metric: Metric, labels: Sequence[str]) -> None:
        if unknown := set(labels) - set(metric.labels) - _TARGET_LABELS:
            raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}")

    def _query(
        self, name: str, expr: str, by: Sequence[str], legend: str, *, is_rate: bool = False
    ) -> Query:
        shown = legend or " ".join(f"{{{{{one}}}}}" for one in by)
        metric = self.metrics[name]
        return Query(expr, shown, _unit(metric, is_rate=is_rate), metric.help)


def _sum(by: Sequence[str], function: str = "sum") -> str:
    return f"{function} by ({', '.join(by)}) " if by else function


def _by_role(metrics: Sequence[Metric]) -> Iterator[Metric]:
    for one in metrics:
        if "_ROLE_" not in one.name:
            yield one
            continue
        for role in ROLES:
            yield Metric(one.name.replace("ROLE", role), one.kind, one.labels, one.help)


def _metric_of(series: str, metrics: Mapping[str, Metric]) -> str:
    for name in (series, re.sub(r"_(bucket|sum|count)$", "", series)):
        if name in metrics:
            return name
    raise ValueError(f"no metric has the series {series}")


def _unit(metric: Metric, *, is_rate: bool) -> str:
    name = metric.name.removesuffix("_total")
    for end, of_value, of_rate in _UNITS:
        if name.endswith(end):
            return of_rate if is_rate else of_value
    return "ops" if is_rate else "short"
