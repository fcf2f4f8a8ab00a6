"""FP8 linear: the layers that are quantized."""

from gpt.linear.fp8_linear import fp8_layers
from gpt.model.loading import load_model
from tests.support.models import CLASSIC, build, lively


def test_the_first_and_the_last_layer_are_never_fp8() -> None:
    def fp8_layers_of_stage(layers: range, hidden_min: int = 0) -> list[int]:
        model = load_model(lively(CLASSIC), build(CLASSIC).mesh, layers=layers)
        return list(fp8_layers(model, hidden_min))

    assert fp8_layers_of_stage(range(5)) == [1, 2, 3]
    assert fp8_layers_of_stage(range(2)) == [1]
    assert fp8_layers_of_stage(range(2, 4)) == [2, 3]
    assert fp8_layers_of_stage(range(4, 5)) == []
    assert fp8_layers_of_stage(range(5), hidden_min=33) == []
