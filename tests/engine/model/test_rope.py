from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from millrace.core.errors import ModelError
from millrace.engine.model.rope import Rotary, inverse_frequencies
from millrace.engine.model.rope_config import parse_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.5},
    LLAMA3,
    {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 512},
    YARN,
    {**YARN, "truncate": False},
    {**YARN, "attention_factor": 1.3},
    {**YARN, "beta_fast": 64.0, "beta_slow": 2.0},
    {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1},
    {**YARN, "original_max_position_embeddings": 16},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("theta", "head_dim"), [(10000.0, 64), (500000.0, 128), (1e6, 80)])
def test_frequencies_and_scale_are_those_of_transformers(
    scaling: dict[str, Any], theta: float, head_dim: int
) -> None:
    raw = {"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 131072}
    parameters = {**scaling, "rope_theta": theta}
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=131072, rope_parameters=parameters
    )
    expected, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    for given in (raw, {"rope_parameters": parameters, "max_position_embeddings": 131072}):
        rope = parse_rope(given, "config.json", default_theta=10000.0)
        torch.testing.assert_close(inverse_frequencies(rope, head_dim), expected, rtol=2e-6, atol=0)
        assert rope.attention_factor == pytest.approx(factor)


def test_rotary_gives_float32_cosines_and_sines_times_the_attention_factor() -> None:
    rope = parse_rope({"rope_scaling": {**YARN, "attention_factor": 1.5}}, "c", default_theta=1e4)
    positions = torch.tensor([0, 3, 100_000])
    cos, sin = Rotary(rope, 16, "cpu")(positions)
    angles = positions.double()[:, None] * inverse_frequencies(rope, 16).double()
    assert cos.dtype == sin.dtype == torch.float32
    torch.testing.assert_close(cos.double(), 1.5 * angles.cos(), atol=0.01, rtol=0)
    torch.testing.assert_close(cos[0], torch.full((8,), 1.5))
    torch.testing.assert_close(cos**2 + sin**2, torch.full((3, 8), 2.25))


def test_old_and_absent_forms() -> None:
    assert parse_rope({}, "c", default_theta=5.0).theta == 5.0
    assert parse_rope({"rope_scaling": None, "rope_theta": 7}, "c", default_theta=5.0).theta == 7.0
    old = parse_rope({"rope_scaling": {"type": "linear", "factor": 2}}, "c", default_theta=5.0)
    assert (old.kind, old.factor) == ("linear", 2.0)
    implied = {
        "rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 100},
        "max_position_embeddings": 400,
    }
    assert parse_rope(implied, "c", default_theta=1e4).factor == 4.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is None; it must be a number above 0"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1}}, "factor is -1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'"),
        ({"rope_theta": -3}, "rope_theta is -3"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor is None"),
        ({"rope_scaling": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor is 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "differ by layer type"),
        ({"rope_scaling": [1]}, "rope_scaling must be a JSON object"),
    ],
)
def test_what_is_not_served_is_refused_with_the_place_and_field(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse_rope({"max_position_embeddings": 64, **config}, "m/config.json", default_theta=1e4)
    assert str(caught.value).startswith("m/config.json: ")
