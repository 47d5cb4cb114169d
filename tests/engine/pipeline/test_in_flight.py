"""The reports of later stages, in the order in which their caller hears of them."""

from __future__ import annotations

import random

from millrace.engine.pipeline.in_flight import InFlight
from millrace.engine.pipeline.messages import Answer, Command, LayerDone, Through


class Stages:
    """Two later stages, which hear nothing."""

    count = 2

    def send(self, command: Command, stage: int | None = None) -> None:
        pass

    def close(self) -> None:
        pass


def test_layers_are_told_in_order_though_stages_on_other_hosts_report_as_they_come() -> None:
    of_stages = [[2, 3], [4, 5, 6]]
    rng = random.Random(3)
    for _ in range(50):
        told: list[int] = []
        in_flight = InFlight(Stages())
        entry = in_flight.begin("r", told.append, range(2, 7))
        left = [iter(layers) for layers in of_stages]
        order = [stage for stage, layers in enumerate(of_stages) for _ in layers]
        rng.shuffle(order)
        reports: list[Answer] = [LayerDone(entry.number, next(left[stage])) for stage in order]
        reports.insert(rng.randrange(len(reports) + 1), Through(entry.number))
        for report in reports:
            assert not entry.through.wait(0)
            in_flight.receive(report)
        assert entry.through.wait(0)
        assert told == [2, 3, 4, 5, 6]
        in_flight.end(entry)
        in_flight.check_integrity()
