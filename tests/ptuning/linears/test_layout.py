"""Which linears the settings of a run select, in models with experts."""

import pytest

from gpt.errors import ConfigError
from ptuning.config import MethodConfig
from ptuning.linears.layout import LinearsLayout
from tests.support.models import CLASSIC, EXPERTS


def keys_of(*targets: str, layers: tuple[int, ...] = ()) -> list[str]:
    """The selected keys without `decoder.layers.`."""
    settings = MethodConfig("lora", rank=2, targets=targets, layers=layers)
    tensors = LinearsLayout.create([settings], EXPERTS).tensors
    return list(dict.fromkeys(tensor.key.split(".", 2)[2] for tensor in tensors))


def test_experts_are_no_default() -> None:
    attention = ["self_attention.linear_qkv", "self_attention.linear_proj"]
    dense = ["mlp.linear_fc1", "mlp.linear_fc2"]
    shared = ["mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2"]
    layers = [[*attention, *(dense if layer == 1 else shared)] for layer in range(4)]
    assert keys_of() == [f"{layer}.{name}" for layer in range(4) for name in layers[layer]]


def test_targets_select_the_linears_of_all_experts() -> None:
    experts = [f"2.mlp.experts.local_experts.{expert}" for expert in range(5)]
    assert keys_of("experts.linear_fc2", layers=(1, 2)) == [
        f"{name}.linear_fc2" for name in experts
    ]
    parts = ("experts.linear_fc1.gate", "linear_fc1.up", "experts.linear_fc1.up")
    assert keys_of(*parts, layers=(2,)) == [
        *(f"{name}.linear_fc1.{part}" for name in experts for part in ("gate", "up")),
        "2.mlp.shared_experts.linear_fc1.up",
    ]


def test_experts_that_a_model_or_its_layers_lack_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"select no linear of this model; choose other layers"):
        keys_of("experts.linear_fc1", layers=(1,))
    settings = MethodConfig("lora", targets=("experts.linear_fc1",))
    with pytest.raises(ConfigError, match=r"have no such linear; choose among: linear_fc1, linear"):
        LinearsLayout.create([settings], CLASSIC)
    with pytest.raises(ConfigError, match=r"not supported for the linears of experts"):
        MethodConfig("lora", targets=("experts.linear_fc1",), dropout=0.1)
    with pytest.raises(ConfigError, match=r"experts.linear_fc1 and its part experts.linear_fc1.up"):
        MethodConfig("lora", targets=("experts.linear_fc1", "experts.linear_fc1.up"))
