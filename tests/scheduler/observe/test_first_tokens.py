"""The scheduler's metrics of first tokens: objectives and predictions."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.core.request import Request, Slo
from millrace.core.scheduler.effects import Place, Record, Refuse
from millrace.core.scheduler.events import Submitted
from millrace.scheduler.observe.first_tokens import FirstTokens
from millrace.telemetry.metrics import Registry
from support.core_events import Bench, instance


class Followed(Bench):
    """A machine whose effects are reported to the metrics, as in the loop."""

    def __init__(self, context: int = 4096) -> None:
        self.registry = Registry()
        self.first_tokens = FirstTokens(self.registry)
        pages = context // 16
        super().__init__(
            instance("p0", context=context, pages=pages),
            instance("d0", context=2 * context, pages=2 * pages),
        )

    def step(self, event):
        if isinstance(event, Submitted):
            self.first_tokens.submitted(event.request)
        found = super().step(event)
        for effect in found:
            match effect:
                case Place():
                    self.first_tokens.placed(effect, self.now_s)
                case Record():
                    self.first_tokens.recorded(effect, self.now_s)
                case Refuse():
                    self.first_tokens.refused(effect.request_id)
        return found

    def send(self, name: str, slo: Slo, prompt: int = 100) -> None:
        """Submits a request with 0.1 s of predicted prefill."""
        request = Request(
            id=name,
            proxy_id="x",
            prompt_tokens=prompt,
            max_new_tokens=8,
            slo=slo,
            arrival_s=self.now_s,
        )
        self.step(Submitted(request=request))

    def value(self, name: str, **labels: str) -> float | None:
        for family in text_string_to_metric_families(self.registry.render()[0].decode()):
            for sample in family.samples:
                if (sample.name, sample.labels) == (name, labels):
                    return sample.value
        return None

    def slo(self, slo_class: str, met: str) -> float | None:
        return self.value("millrace_scheduler_slo_requests_total", slo_class=slo_class, met=met)


RATIO = "millrace_scheduler_predicted_ttft_ratio"
PREDICTED = "millrace_scheduler_predicted_ttft_seconds"


@pytest.mark.parametrize("first", ["computed", "decoding", "finished"])
@pytest.mark.parametrize("took_s, met", [(0.25, "true"), (0.75, "false")])
def test_the_first_token_meets_or_misses_whoever_tells_of_it(first, took_s, met):
    one = Followed()
    one.send("r", Slo(ttft_s=0.5, class_name="chat"))
    one.chunk_started("p0", "r")
    one.now_s += took_s
    getattr(one, first)("d0" if first != "computed" else "p0", "r")
    one.now_s += 5  # the rest is decode's
    if first != "finished":
        one.finished("d0", "r")
    assert one.slo("chat", met) == 1
    assert one.slo("chat", "false" if met == "true" else "true") is None
    assert one.value(f"{RATIO}_sum", prompt="1k") == pytest.approx(0.1 / took_s)
    assert one.value(f"{RATIO}_count", prompt="1k") == 1
    assert one.value(f"{PREDICTED}_sum", prompt="1k") == pytest.approx(0.1)
    assert one.first_tokens.expected_s("r") is None


def test_without_an_objective_only_the_prediction_counts():
    one = Followed()
    one.send("r", Slo(tbt_s=0.1))
    one.now_s += 0.1
    one.serve("r")
    assert one.slo("default", "true") is None and one.slo("default", "false") is None
    assert one.value(f"{RATIO}_sum", prompt="1k") == pytest.approx(1.0)


def test_a_failure_misses_and_a_cancelled_request_counts_as_neither():
    one = Followed()
    one.send("failed", Slo(ttft_s=5))
    one.failed("p0", "failed", retryable=False)
    one.send("left", Slo(ttft_s=5))
    one.cancel("left")
    assert one.slo("default", "false") == 1 and one.slo("default", "true") is None
    assert one.value(f"{RATIO}_count", prompt="1k") is None
    assert [one.first_tokens.expected_s(name) for name in ("failed", "left")] == [None, None]


def test_a_refused_request_is_not_counted():
    one = Followed()
    one.send("huge", Slo(ttft_s=5), prompt=5000)
    assert one.slo("default", "false") is None


def test_a_request_that_is_placed_again_is_predicted_anew_and_its_wait_is_not_forgotten():
    one = Followed()
    one.send("r", Slo(ttft_s=1.0))
    one.now_s += 2.0
    one.failed("p0", "r")
    one.released("p0", "r")
    one.released("d0", "r")  # then it can be placed again
    placed_s = one.now_s
    one.now_s += 0.4
    one.computed("p0", "r")
    assert one.slo("default", "false") == 1
    assert one.value(f"{RATIO}_sum", prompt="1k") == pytest.approx(0.1 / (one.now_s - placed_s))


@pytest.mark.parametrize(
    "tokens, prompt", [(1, "1k"), (1024, "1k"), (1025, "16k"), (131_072, "128k"), (131_073, "more")]
)
def test_predictions_are_counted_by_the_length_of_the_prompt(tokens, prompt):
    one = Followed(context=1 << 20)
    one.send("r", Slo(), prompt=tokens)
    one.now_s += tokens * 2e-3
    one.serve("r")
    assert one.value(f"{RATIO}_sum", prompt=prompt) == pytest.approx(0.5)
