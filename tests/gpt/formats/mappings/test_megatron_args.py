"""Megatron arguments: every version maps to the same config, or is refused by name."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt.checkpoint.digest import base_digest
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import CheckpointError
from gpt.formats.megatron.reader import open_megatron
from tests.support.checkpoints.megatron_writer import DENSE, GATED, MIXED, ROTARY, Layout, saved

DEFAULTS = Layout(tp=2)
HISTORY: dict[str, tuple[GPTConfig, Layout, dict[str, Any]]] = {
    "epsilon of 0.4 to 0.15": (DENSE, DEFAULTS, {"layernorm_epsilon": None, "norm_epsilon": 1e-5}),
    "zero-centred norms since 0.16": (
        DENSE.with_fields(layernorm_zero_centered_gamma=True),
        DEFAULTS,
        {"apply_layernorm_1p": None, "layernorm_zero_centered_gamma": True},
    ),
    "groups before there were groups": (
        DENSE,
        DEFAULTS,
        {"group_query_attention": None, "num_query_groups": None},
    ),
    "groups as a converter writes them": (GATED, DEFAULTS, {"group_query_attention": None}),
    "one group by default": (
        DENSE,
        DEFAULTS,
        {"group_query_attention": None, "num_query_groups": 1},
    ),
    "rotary base before it was an argument": (
        GATED.with_fields(rotary_base=10000.0),
        DEFAULTS,
        {"rotary_base": None},
    ),
    "rotary positions of early 2023": (
        ROTARY,
        Layout(names="2021"),
        {"position_embedding_type": None, "use_rotary_position_embeddings": True},
    ),
    "base and pairs, which older classes ignore": (
        ROTARY,
        Layout(names="2023"),
        {"rotary_base": 5, "rotary_interleaved": True},
    ),
    "no biases, by the oldest name": (GATED, DEFAULTS, {"disable_bias_linear": True}),
    "erf": (DENSE.with_fields(activation="gelu"), DEFAULTS, {}),
    "the kernel that needs a bias": (
        GATED.with_fields(gated=False, activation="gelu"),
        DEFAULTS,
        {"bias_gelu_fusion": True},
    ),
    "OpenAI's form in older classes": (
        DENSE,
        Layout(names="2021"),
        {"bias_gelu_fusion": False, "openai_gelu": True},
    ),
    "torch's own GELU of 2020, before there was a kernel": (
        DENSE.with_fields(activation="gelu"),
        Layout(names="2020", version=None),
        {"bias_gelu_fusion": None, "openai_gelu": False},
    ),
    "OpenAI's form in 2020": (
        DENSE,
        Layout(names="2020", version=None),
        {"bias_gelu_fusion": None, "openai_gelu": True},
    ),
    "the tanh form of 2019, which had no name": (
        DENSE,
        Layout(names="2020", version=None),
        {"bias_gelu_fusion": None},
    ),
    "Transformer Engine's only GELU, in its own layers": (
        DENSE,
        Layout(names="full te"),
        {"transformer_impl": "transformer_engine", "bias_gelu_fusion": False},
    ),
    "what its first layers did not obey": (
        DENSE,
        Layout(names="full te"),
        {"transformer_impl": "transformer_engine", "squared_relu": True, "swiglu": True},
    ),
    "its function of its own in newer classes": (
        DENSE,
        DEFAULTS,
        {"use_te_activation_func": True, "bias_gelu_fusion": False},
    ),
    "all groups of experts": (
        MIXED,
        DEFAULTS,
        {"moe_router_num_groups": 2, "moe_router_group_topk": 2},
    ),
    "OpenAI's form, which newer classes ignore": (
        DENSE.with_fields(activation="gelu"),
        DEFAULTS,
        {"openai_gelu": True},
    ),
    "a window as text": (GATED, DEFAULTS, {"window_size": "(6, 0)"}),
    "split of 2020": (
        DENSE,
        DEFAULTS,
        {"tensor_model_parallel_size": None, "model_parallel_size": 2},
    ),
    "llama3 positions": (
        GATED.with_fields(rope_scaling=RopeScaling("llama3", 8.0)),
        DEFAULTS,
        {},
    ),
    "a tokenizer of plain numbers": (
        DENSE,
        DEFAULTS,
        {"tokenizer_type": "NullTokenizer", "vocab_size": DENSE.vocab_size - 1},
    ),
}


@pytest.mark.parametrize("case", HISTORY)
def test_args_of_all_versions_give_the_same_config(case: str, tmp_path: Path) -> None:
    config, layout, changes = HISTORY[case]
    if "disable_bias_linear" in changes:
        changes = {**changes, "add_bias_linear": None}
    source = saved(config, replace(layout, changes=changes), tmp_path)
    assert open_megatron(tmp_path).config == source.config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("multi_latent_attention", True),
        ("softmax_type", "off-by-one"),
        ("attention_output_gate", True),
        ("hybrid_override_pattern", "M*-"),
        ("apply_residual_connection_post_layernorm", True),
        ("position_embedding_type", "mrope"),
        ("qk_l2_norm", True),
        ("window_size", (6, 6)),
        ("spec", ["examples.custom", "layer"]),
    ],
)
def test_unsupported_field_is_refused_by_name(name: str, value: object, tmp_path: Path) -> None:
    saved(DENSE, Layout(changes={name: value}), tmp_path)
    with pytest.raises(CheckpointError, match=f"args.{name} is .*does not support"):
        open_megatron(tmp_path)


@pytest.mark.parametrize(("period", "window"), [(None, 7), (1, None)])
def test_a_period_of_one_layer_leaves_no_layer_with_a_window(
    period: int | None, window: int | None, tmp_path: Path
) -> None:
    changes = {"window_size": (6, 0), "window_attn_skip_freq": period}
    saved(DENSE, Layout(changes=changes), tmp_path)
    assert open_megatron(tmp_path).config.window_size == window


@pytest.mark.parametrize(
    ("changes", "windows", "ropes"),
    [
        ({"window_attn_skip_freq": 2}, (True, False, True, False), (True,) * 4),
        ({"window_attn_skip_freq": "[0, 0, 1, 0]"}, (False, False, True, False), (True,) * 4),
        ({"no_rope_freq": 4}, (True,) * 4, (True, True, True, False)),
        ({"no_rope_freq": [1, 0, 0, 1]}, (True,) * 4, (False, True, True, False)),
    ],
)
def test_windows_and_rotary_positions_of_some_layers_are_read(
    changes: dict[str, Any], windows: tuple[bool, ...], ropes: tuple[bool, ...], tmp_path: Path
) -> None:
    config = GATED.with_fields(window_size=7)
    saved(config, Layout(changes=changes), tmp_path)
    layers = open_megatron(tmp_path).config.layers
    assert tuple(layer.window_size == 7 for layer in layers) == windows
    assert tuple(layer.rope is not None for layer in layers) == ropes


@pytest.mark.parametrize("value", [[1, 0], [2, 0, 0, 0], "many", -1])
@pytest.mark.parametrize("name", ["window_attn_skip_freq", "no_rope_freq"])
def test_flags_of_other_layers_are_refused(name: str, value: object, tmp_path: Path) -> None:
    config = GATED.with_fields(window_size=7)
    saved(config, Layout(changes={name: value}), tmp_path)
    with pytest.raises(CheckpointError, match=rf"args\.{name} is .*; it must be a"):
        open_megatron(tmp_path)


def test_limited_routing_groups_are_refused(tmp_path: Path) -> None:
    changes = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}
    saved(MIXED, Layout(changes=changes), tmp_path)
    with pytest.raises(CheckpointError, match=r"args\.moe_router_group_topk is 2"):
        open_megatron(tmp_path)


@pytest.mark.parametrize("name", ["padded_vocab_size", "hidden_size", "softmax_type"])
def test_tensor_arguments_raise_one_sentence(name: str, tmp_path: Path) -> None:
    saved(DENSE, Layout(changes={name: torch.ones(3)}), tmp_path)
    with pytest.raises(CheckpointError, match=rf"args\.{name} is tensor"):
        open_megatron(tmp_path)


def test_norm_that_transformer_engine_layers_ignore_is_refused(tmp_path: Path) -> None:
    changes = {"transformer_impl": "transformer_engine", "apply_layernorm_1p": True}
    saved(DENSE, Layout(names="full te", changes=changes), tmp_path)
    with pytest.raises(CheckpointError, match=r"args\.apply_layernorm_1p is True"):
        open_megatron(tmp_path)


@pytest.mark.parametrize(
    ("changes", "ignored"),
    [
        ({"rotary_seq_len_interpolation_factor": 2}, "scaled by 2, .* used 1"),
        ({"use_rope_scaling": True, "rope_scaling_factor": 32.0}, "scaled by 32, .* used 8"),
    ],
)
def test_rope_scaling_of_uncertain_effect_is_noted(
    changes: dict[str, Any], ignored: str, tmp_path: Path
) -> None:
    saved(GATED, Layout(changes=changes), tmp_path)
    (note,) = open_megatron(tmp_path).notes
    assert re.search(ignored, note)
    checkpoint = open_megatron(tmp_path, {"rope_scaling": None})
    assert checkpoint.config == GATED and checkpoint.notes == ()


def test_files_without_arguments_require_the_head_count(tmp_path: Path) -> None:
    layout = Layout(names="2020", version=None, args=False, zipped=False, iteration=None)
    source = saved(DENSE, layout, tmp_path)
    with pytest.raises(CheckpointError, match="does not record num_attention_heads"):
        open_megatron(tmp_path)
    heads = {"num_attention_heads": DENSE.num_attention_heads}
    checkpoint = open_megatron(tmp_path, {**heads, "vocab_size": DENSE.vocab_size})
    assert checkpoint.config == source.config
    assert base_digest(checkpoint) == base_digest(source)
    assert any("vocabulary" in note for note in open_megatron(tmp_path, heads).notes)


def test_vocab_size_is_overridden_else_recorded_else_padded(tmp_path: Path) -> None:
    saved(DENSE, Layout(tp=2, changes={"vocab_size": None}), tmp_path)
    padded = open_megatron(tmp_path)
    assert (
        padded.config.vocab_size == 112
        and "vocab_size is 112, the number of embedding rows" in padded.notes[0]
    )
    overridden = open_megatron(tmp_path, {"vocab_size": 90})
    assert (
        overridden.read("embedding.word_embeddings.weight").shape == (90, 32)
        and not overridden.notes
    )
    with pytest.raises(CheckpointError, match="the embedding has only 112 rows"):
        open_megatron(tmp_path, {"vocab_size": 113})


def test_a_full_config_replaces_the_arguments(tmp_path: Path) -> None:
    source = saved(DENSE, Layout(tp=2, changes={"softmax_type": "learnable"}), tmp_path)
    assert open_megatron(tmp_path, source.config).config == source.config
