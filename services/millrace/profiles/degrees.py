"""Estimates SP degrees without measurements from the times of one instance, by the ring model."""

from __future__ import annotations

from dataclasses import replace

from millrace.core.cost.latency import Latency
from millrace.profiles import load_profile
from millrace.profiles.calibration import ring
from millrace.profiles.eq_1 import rounded

#: The profile with the values that one machine can't measure: the ring, KV parallelism, links.
REFERENCE = "llama3-8b-a100-tp1"


def estimated(one: Latency, layers: int) -> dict[int, Latency]:
    """Estimates degrees 2 to 128 of a model of `layers` layers, with devices of its own per
    instance.

    Compute is divided by the degree; each step of the ring costs as much as in `REFERENCE`.
    """
    reference = load_profile(REFERENCE)
    return {
        sp: replace(ring(one, sp, layers, reference.ring_step_s), c=rounded(one.c / sp))
        for sp in reference.prefill.degrees[1:]
    }
