"""HybridModel args: they give the config of a GPT, or are refused by name."""

from typing import Any

import pytest

from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_args import config_from_args
from gpt.formats.mappings.hybrid_layers import gpt_name, hybrid_name
from gpt.formats.mappings.megatron_args import MegatronArgs, WeightShapes, complete_fields
from gpt.parallel.weight_sharding import parameter_specs
from tests.support.checkpoints.megatron_writer import (
    DENSE,
    GATED,
    MIXED,
    Layout,
    args_of,
    hybrid_pattern,
)
from tests.support.models import lively


def open_args(config: GPTConfig, changes: dict[str, Any]) -> tuple[GPTConfig, dict[str, str]]:
    """The config and the notes of a HybridModel's args with changes."""
    shapes = {name: [spec.shape] for name, spec in parameter_specs(config).items()}
    source = lively(config)
    embedding = {name: source.read(name) for name in ("embedding.word_embeddings.weight",)}
    args = {**args_of(config, embedding, Layout(hybrid=True)), **changes}
    weights = WeightShapes(shapes, config.num_layers, False, hybrid_pattern(config))
    partial_config = config_from_args(MegatronArgs(args, "FILE"), weights)
    fields = complete_fields(partial_config, {}, "FILE")
    return GPTConfig.from_dict(fields), partial_config.notes


def test_names_of_a_gpt_and_of_a_hybrid_model_are_inverse() -> None:
    names = list(parameter_specs(MIXED))
    hybrid_names = [hybrid_name(name) for name in names]
    assert len(set(hybrid_names)) == len(names)
    assert "decoder.layers.6.self_attention.linear_qkv.weight" in hybrid_names
    assert "decoder.layers.5.pre_mlp_layernorm.weight" in hybrid_names
    assert "decoder.final_norm.weight" in hybrid_names
    restored = [gpt_name(name).replace("final_norm", "final_layernorm") for name in hybrid_names]
    assert restored == names


PATTERN = hybrid_pattern(DENSE)
# Each with the same model: changes of the args, and words of the only note, if there is one.
HISTORY: dict[str, tuple[dict[str, Any], str]] = {
    "segments": ({"hybrid_layer_pattern": "*-*|-||*-*-"}, ""),
    "the former name": ({"hybrid_layer_pattern": None, "hybrid_override_pattern": PATTERN}, ""),
    "both names": ({"hybrid_override_pattern": PATTERN}, ""),
    "ratios of the former name": (
        {
            "hybrid_layer_pattern": None,
            "hybrid_override_pattern": PATTERN,
            "hybrid_attention_ratio": 0.5,
        },
        "",
    ),
    "no number of layers": ({"num_layers": None}, ""),
    "no spec": ({"spec": None}, ""),
    "the former spec": (
        {"spec": ["megatron.core.models.mamba.mamba_layer_specs", "mamba_stack_spec"]},
        "",
    ),
    "prediction heads": (
        {"hybrid_layer_pattern": f"{PATTERN}/*-/*-", "mtp_num_layers": 2},
        "multi-token prediction",
    ),
    "prediction heads of another kind": (
        {"hybrid_layer_pattern": f"{PATTERN}/MM"},
        "multi-token prediction",
    ),
    "prediction heads by their former names": (
        {"mtp_hybrid_override_pattern": "*-", "mtp_num_layers": 1},
        "multi-token prediction",
    ),
    "an end of prediction heads alone": ({"hybrid_layer_pattern": f"{PATTERN}/"}, ""),
    # `E` alone makes experts.
    "a frequency of experts": ({"moe_layer_freq": [1, 0] * 4}, ""),
}


@pytest.mark.parametrize("case", HISTORY)
def test_args_of_all_versions_give_the_same_config(case: str) -> None:
    changes, noted = HISTORY[case]
    config, notes = open_args(DENSE, changes)
    assert config == DENSE
    assert len(notes) == bool(noted)
    assert noted in "".join(notes.values())


# Windows of the args (3 tokens before the current one), and the window of the model. Megatron
# counts the layers of a HybridModel from 1, so its attention has odd numbers.
WINDOWS: dict[str, tuple[object, int | None]] = {
    "each layer": (None, 4),
    "a period of even numbers": (2, 4),
    "a longer period of even numbers": ("4", 4),
    "a period of one": (1, None),
    "a list": ([1, 0] * 4, 4),
    "a list without attention": ([0, 1] * 4, None),
}


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_are_those_of_the_attention_layers(case: str) -> None:
    frequency, window = WINDOWS[case]
    changes = {"window_size": (3, 0), "window_attn_skip_freq": frequency}
    assert open_args(DENSE, changes)[0].window_size == window


@pytest.mark.parametrize(
    ("frequency", "windows"),
    [([1, 0, 0, 0] * 2, (True, False, True, False)), (3, (True, False, True, True))],
)
def test_windows_of_some_attention_layers_are_read(
    frequency: object, windows: tuple[bool, ...]
) -> None:
    changes = {"window_size": (3, 0), "window_attn_skip_freq": frequency}
    assert open_args(DENSE, changes)[0].window_layers == windows


def test_attention_layers_without_rotary_positions_are_read() -> None:
    config = open_args(GATED, {"no_rope_freq": [0, 0, 1, 0] * 2})[0]
    assert config.rope_layers == (True, False, True, False)


def test_a_period_without_rotary_positions_of_mlp_layers_has_no_effect() -> None:
    assert open_args(GATED, {"no_rope_freq": 4})[0] == GATED


# Changes of the args, and words of the error.
REFUSED_ARGS: dict[str, tuple[dict[str, Any], str]] = {
    "Mamba": ({"hybrid_layer_pattern": "M-*-*-*-"}, "is 'M-[*]-[*]-[*]-'; M is Mamba"),
    "gated delta net": ({"hybrid_layer_pattern": "G-*-*-*-"}, "G is linear attention"),
    "sparse attention": ({"hybrid_layer_pattern": "D-D-D-D-"}, "D is DeepSeek sparse attention"),
    "latent attention": (
        {"hybrid_override_pattern": "+-+-+-+-"},
        "[+] is multi-head latent attention",
    ),
    "an unknown symbol": ({"hybrid_layer_pattern": "*-*-*-*x"}, "'x' is not a layer symbol"),
    "a line end": ({"hybrid_layer_pattern": "*-*-\n*-*-"}, r"'\\n' is not a layer symbol"),
    "attention twice": ({"hybrid_layer_pattern": "**--*-*-"}, "layer 1 is [*] instead of - or E"),
    "MLP first": ({"hybrid_layer_pattern": "-*-*-*-*"}, "layer 0 is - instead of attention"),
    "attention last": ({"hybrid_layer_pattern": "*-*-*-*"}, "layer 6 has no MLP after it"),
    "no layers": ({"hybrid_layer_pattern": "|/*-"}, "there are none"),
    "more layers than the weights": (
        {"hybrid_layer_pattern": PATTERN + "*-", "num_layers": 10},
        "is '[*]-[*]-[*]-[*]-[*]-', but the layers of the weights are '[*]-[*]-[*]-[*]-'",
    ),
    "experts": ({"hybrid_layer_pattern": "*-*-*-*E"}, "but the layers of the weights are"),
    "no pattern": (
        {"hybrid_layer_pattern": None},
        "hybrid_layer_pattern is absent, but the layers",
    ),
    "another number of layers": ({"num_layers": 4}, "num_layers is 4, but the pattern .* 8 layers"),
    "two patterns": (
        {"hybrid_override_pattern": "*E*E*E*E"},
        "hybrid_layer_pattern is .*, but args.hybrid_override_pattern is",
    ),
    "a list": ({"hybrid_layer_pattern": [0, 1]}, "it must be a text of layer symbols"),
    "a huge pattern": ({"hybrid_layer_pattern": "*-" * 99999}, "199998 symbols, more than the"),
    "a long pattern": (
        {"hybrid_layer_pattern": "*-" * 999 + "*"},
        r"'([*]-){20}[.]{3}': layer 1998",
    ),
    "ratios": (
        {"hybrid_layer_pattern": None, "hybrid_attention_ratio": 0.5, "hybrid_mlp_ratio": 0.5},
        "hybrid_attention_ratio is 0.5, which Preamble does not support",
    ),
    "another spec": ({"spec": ["examples.custom", "stack"]}, "args.spec is .*does not support"),
    "windows of a GPT's layers": (
        {"window_size": (3, 0), "window_attn_skip_freq": [1, 0, 1, 0]},
        "it must be a whole number, or a list of 0 and 1 for the 8 layers",
    ),
    "interleaved positions": (
        {"position_embedding_type": "rope", "rotary_interleaved": True},
        "args.rotary_interleaved is True, which Preamble does not support",
    ),
    "scaled positions": (
        {"position_embedding_type": "rope", "use_rope_scaling": True},
        "does not record rope_scaling",
    ),
}


@pytest.mark.parametrize("case", REFUSED_ARGS)
def test_other_args_are_refused_by_name(case: str) -> None:
    changes, words = REFUSED_ARGS[case]
    with pytest.raises(CheckpointError, match=words) as raised:
        open_args(DENSE, changes)
    assert len(str(raised.value)) < 600
