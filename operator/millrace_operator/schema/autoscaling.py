"""The section `autoscaling` of each kind of pool."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from millrace_operator.schema.record import Decimal, Record, doc, keyed_list, rule, section

#: Default targets, by signal.
PREFILL_TARGETS = {"backlogSeconds": "4", "utilization": "0.8", "ttftSloRatio": "0.8"}
DECODE_TARGETS = {"kvUtilization": "0.8", "tbtSloRatio": "0.9"}

PREFILL_SIGNALS = (
    "backlogSeconds: predicted seconds of waiting and running prefill, per instance. "
    "utilization: predicted seconds of prefill that arrive per second, per instance. "
    "ttftSloRatio: time to first token over its objective, of the worst class."
)
DECODE_SIGNALS = (
    "kvUtilization: share of KV slots in use. tbtSloRatio: time between tokens over its "
    "objective, of the worst class. Role mixed also has the signals of prefill. "
)
SIGNALS = "Signals that scale the pool; the signal that asks for the most instances counts."

MinReplicas = Annotated[int, Field(ge=0, le=1000, description="Smallest number of instances.")]
MaxReplicas = Annotated[int, Field(ge=1, le=1000, description="Largest number of instances.")]
ScalesToZero = Annotated[
    bool,
    Field(
        description="True: an idle pool goes to zero; the next request waits at the gateway and "
        "starts it."
    ),
]
Period = Annotated[int, Field(ge=1, le=3600, description="Period of maxStep, s.")]


def _window(way: str, default: int) -> Any:  # noqa: ANN401
    text = f"Time for which the signals must agree before the pool is scaled {way}, s."
    return doc(text, default, ge=0, le=3600)


def _step(way: str, default: int) -> Any:  # noqa: ANN401
    text = f"Most instances by which the pool is scaled {way} within periodSeconds."
    return doc(text, default, ge=1, le=64)


def _tolerance(way: str, default: int) -> Any:  # noqa: ANN401
    text = f"Deviation from its target up to which a signal does not scale the pool {way}, %."
    return doc(text, default, ge=0, le=50)


class PrefillScaleUp(Record):
    """Limits for scaling the pool up."""

    stabilization_window_seconds: int = _window("up", 0)
    max_step: int = _step("up", 2)
    period_seconds: Period = 15
    tolerance_percent: int = _tolerance("up", 10)


class DecodeScaleUp(PrefillScaleUp):
    """Limits for scaling the pool up."""

    stabilization_window_seconds: int = _window("up", 15)
    max_step: int = _step("up", 4)


class ScaleDown(Record):
    """Limits for scaling the pool down."""

    stabilization_window_seconds: int = _window("down", 300)
    max_step: int = _step("down", 1)
    period_seconds: Period = 60
    tolerance_percent: int = _tolerance("down", 20)


class KvpScaleUp(Record):
    """Limits for scaling the pool up."""

    stabilization_window_seconds: int = _window("up", 0)
    max_step: int = _step("up", 4)
    period_seconds: Period = 15
    tolerance_percent: ClassVar[int] = 0


class KvpScaleDown(Record):
    """Limits for scaling the pool down."""

    stabilization_window_seconds: int = _window("down", 600)
    max_step: int = _step("down", 2)
    period_seconds: Period = 60
    tolerance_percent: ClassVar[int] = 0


Direction = PrefillScaleUp | ScaleDown | KvpScaleUp | KvpScaleDown


class ScaleToZero(Record):
    """Scaling of an idle pool to zero instances."""

    enabled: ScalesToZero = False
    idle_seconds: int = doc(
        "Time without a request before the pool goes to zero, s.", 600, ge=30, le=86400
    )


class KvpScaleToZero(ScaleToZero):
    """Scaling of an idle pool to zero instances."""

    enabled: ScalesToZero = True


class Signal(Record):
    """One signal and its target."""

    rules = (
        rule(
            "self.name == 'backlogSeconds' ? double(self.target) >= 0.001 : "
            "double(self.target) >= 0.05 && double(self.target) <= 1.0",
            "target is between 0.05 and 1, that of backlogSeconds at least 0.001",
        ),
    )
    name: str
    target: Decimal = doc("Target value per instance, as a decimal number in quotes.")


class PrefillSignal(Signal):
    """One signal and its target."""

    name: Literal["backlogSeconds", "utilization", "ttftSloRatio"] = doc(PREFILL_SIGNALS)


class DecodeSignal(Signal):
    """One signal and its target."""

    name: Literal[
        "kvUtilization", "tbtSloRatio", "backlogSeconds", "utilization", "ttftSloRatio"
    ] = doc(DECODE_SIGNALS + PREFILL_SIGNALS)


def _listed(targets: dict[str, str]) -> str:
    return ", ".join(f"{name} {target}" for name, target in targets.items())


class Autoscaling(Record):
    """The number of instances of the pool."""

    rules = (
        rule("self.minReplicas <= self.maxReplicas", "minReplicas must be <= maxReplicas"),
        rule(
            "self.minReplicas > 0 || self.scaleToZero.enabled",
            "minReplicas 0 needs scaleToZero.enabled",
        ),
    )
    mode: Literal["Internal", "External", "Off"] = doc(
        "Internal: the operator sets the pool's replicas. External: an HPA, KEDA or a person "
        "sets them through the scale subresource. Off: a person sets them. In External and Off "
        "the operator only writes a recommendation to the status.",
        "Internal",
    )
    min_replicas: MinReplicas
    max_replicas: MaxReplicas
    interval_seconds: int = doc("Time between two readings of the signals, s.", 5, ge=1, le=300)
    metrics_stale_seconds: int = doc("Age above which signals do not scale, s.", 30, ge=5, le=600)

    @classmethod
    def spelt_out(cls) -> dict[str, Any]:
        """Returns the defaults of the fields that the rules read."""
        read: dict[str, Any] = {
            "min_replicas": True,
            "max_replicas": True,
            "scale_to_zero": {"enabled"},
        }
        return cls.model_validate({}).model_dump(by_alias=True, include=read)


class PrefillAutoscaling(Autoscaling):
    """The number of instances of the pool."""

    min_replicas: MinReplicas = 1
    max_replicas: MaxReplicas = 8
    scale_up: PrefillScaleUp = section()
    scale_down: ScaleDown = section()
    scale_to_zero: ScaleToZero = section()
    metrics: tuple[PrefillSignal, ...] = keyed_list(
        SIGNALS,
        "name",
        len(PREFILL_TARGETS),
        [{"name": name, "target": target} for name, target in PREFILL_TARGETS.items()],
        min_length=1,
    )


class DecodeAutoscaling(Autoscaling):
    """The number of instances of the pool."""

    min_replicas: MinReplicas = 1
    max_replicas: MaxReplicas = 16
    scale_up: DecodeScaleUp = section()
    scale_down: ScaleDown = section()
    scale_to_zero: ScaleToZero = section()
    metrics: tuple[DecodeSignal, ...] | None = keyed_list(
        # The operator knows the default, which depends on the role.
        f"{SIGNALS} Default: {_listed(DECODE_TARGETS)}; of role mixed also "
        f"{_listed(PREFILL_TARGETS)}.",
        "name",
        len(DECODE_TARGETS | PREFILL_TARGETS),
        None,
        min_length=1,
    )


class KvpAutoscaling(Autoscaling):
    """The number of instances of the pool."""

    min_replicas: MinReplicas = 0
    max_replicas: MaxReplicas = 32
    scale_up: KvpScaleUp = section()
    scale_down: KvpScaleDown = section()
    scale_to_zero: KvpScaleToZero = section()
    metrics: ClassVar[tuple[Signal, ...]] = ()
