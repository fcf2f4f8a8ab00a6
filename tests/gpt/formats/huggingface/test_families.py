"""config.json of Hugging Face families: spellings, defaults, and unsupported fields."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints.hf_models import (
    CASES,
    HEADED,
    LONGROPE,
    MINISTRAL_YARN,
    WINDOW,
    edit_json,
    model_of,
    random_model,
    sizes_of,
)

CONFIG = "config.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder where transformers saved a case. Do not write into it."""
    root = tmp_path_factory.mktemp("saved")

    def folder(case: str) -> Path:
        path = root / case.replace(", ", "-").replace(" ", "-")
        if not path.exists():
            model_of(case).save_pretrained(path)
        return path

    return folder


def to_version_4(record: dict[str, Any]) -> None:
    """config.json as transformers 4 wrote it."""
    rope = record.pop("rope_parameters", None)
    neox = record["model_type"] == "gpt_neox"
    if rope and "full_attention" in rope:
        record["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    if rope:
        record["rotary_emb_base" if neox else "rope_theta"] = rope.pop("rope_theta")
        if "partial_rotary_factor" in rope:
            percent = rope.pop("partial_rotary_factor")
            record["rotary_pct" if neox else "partial_rotary_factor"] = percent
        # Without rope_scaling, these families have another scaling.
        has_scaling = record["model_type"] in ("gpt_oss", "apertus", "ministral3")
        is_default = rope["rope_type"] == "default" and not has_scaling
        record["rope_scaling"] = None if is_default else rope
    record["torch_dtype"] = record.pop("dtype")
    by_layer = record["model_type"] == "gpt_oss" or len(set(record.get("layer_types", []))) > 1
    if not by_layer:
        record.pop("layer_types", None)


@pytest.mark.parametrize("case", CASES)
def test_configs_of_transformers_4_and_5_are_equal(
    case: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    folder = Path(shutil.copytree(saved(case), tmp_path / "old"))
    edit_json(folder / CONFIG, to_version_4)
    assert open_checkpoint(folder).config == open_checkpoint(saved(case)).config
    hf_configs = [AutoConfig.from_pretrained(path) for path in (folder, saved(case))]
    ropes = [getattr(their, "rope_parameters", None) for their in hf_configs]
    assert ropes[0] == ropes[1]


def test_oldest_spelling_of_rope_scaling_is_read(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    def change(record: dict[str, Any]) -> None:
        record.pop("rope_parameters")
        record.update(rope_theta=10000, rope_scaling={"type": "linear", "factor": 2})

    folder = Path(shutil.copytree(saved("llama, multi-head"), tmp_path / "llama"))
    edit_json(folder / CONFIG, change)
    config = open_checkpoint(folder).config
    assert config.rope_scaling is not None and config.rope_scaling.factor == 2.0
    assert config.rotary_base == 10000.0


def test_nemotron_without_query_groups_has_one_per_head(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved("nemotron"), tmp_path / "nemotron"))
    edit_json(folder / CONFIG, lambda record: record.pop("num_key_value_heads"))
    with pytest.raises(CheckpointError, match=r"k_proj.weight: found \(24, 48\), need \(48, 48\)"):
        open_checkpoint(folder)


OPTIONAL = {
    *("num_key_value_heads", "max_position_embeddings", "n_positions", "bos_token_id"),
    "eos_token_id",
}


@pytest.mark.parametrize("family", HEADED)
def test_family_defaults_apply_to_absent_fields(family: str, tmp_path: Path) -> None:
    required = {key: value for key, value in sizes_of(family).items() if key not in OPTIONAL}
    required["num_attention_heads" if family != "gpt2" else "n_head"] = 32
    required["hidden_size" if family != "gpt2" else "n_embd"] = 256
    if family == "nemotron":
        required["num_key_value_heads"] = 4  # Its class has no default, and its model needs one.
    explicit = tmp_path / "spoken"
    silent = tmp_path / "silent"
    random_model(family, required).save_pretrained(explicit)
    shutil.copytree(explicit, silent)
    (silent / CONFIG).write_text(json.dumps({"model_type": family, **required}))
    assert open_checkpoint(silent).config == open_checkpoint(explicit).config


# Fields of a config.json that the model does not support, or that are missing.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown architecture": (
        "llama, multi-head",
        {"model_type": "falcon"},
        "'falcon' is not supported; it must be one of apertus, bloom, gemma3_text, ",
    ),
    "no architecture": ("llama, multi-head", {"model_type": None}, "model_type 'None' is not"),
    "yarn with a text for a flag": (
        "llama, multi-head",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "truncate": "no",
            }
        },
        'truncate is "no"; it must be true or false',
    ),
    "an unknown type of layer": (
        "gemma3_text, windows in two layers of three",
        {"layer_types": ["full_attention", "chunked_attention", "sliding_attention"]},
        "layer_types has 'chunked_attention', a sign of the attention of Llama 4",
    ),
    "types of too few layers": (
        "gemma3_text, windows in two layers of three",
        {"layer_types": ["full_attention"]},
        "layer_types is .*; it must be a list of 3 names",
    ),
    "windows of no size": (
        "olmo3, windows in three layers of four, yarn",
        {"sliding_window": None},
        "sliding_window is null; it must be a whole number",
    ),
    "OPT with norms after the residual sums": (
        "opt",
        {"do_layer_norm_before": False},
        "do_layer_norm_before is false: this is OPT-350M or .*; take another size of OPT",
    ),
    "OPT with projected embeddings": (
        "opt",
        {"word_embed_proj_dim": 24},
        "word_embed_proj_dim is 24, which Preamble does not support; it must be 48",
    ),
    "BLOOM with residuals behind the norm": (
        "bloom",
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm is true, which Preamble does not support",
    ),
    "a soft cap": (
        "gemma3_text, windows in two layers of three",
        {"final_logit_softcapping": 30.0},
        "final_logit_softcapping is 30.0, a sign of logit softcaps",
    ),
    "layers without positions of another number": (
        "smollm3",
        {"no_rope_layers": [1, 0]},
        "no_rope_layers is .*; it must be 4 zeros and ones",
    ),
    "linear positions in Phi-3": (
        "phi3",
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
        "rope type 'linear' is not supported in Phi-3; it must be default or longrope",
    ),
    "longrope without factors": (
        "phi3",
        {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
        "short_factor is absent; it must be a list of numbers",
    ),
    "longrope with too few factors": (
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0],
                "long_factor": [1.0],
            }
        },
        "frequency_factors has 1 entries; it must have 6",
    ),
    "longrope with too few factors for long contexts": (
        "phi3, longrope, beyond the original length",
        {"rope_parameters": LONGROPE | {"long_factor": [2.0]}},
        "long_frequency_factors has 1 entries; it must have 6",
    ),
    "longrope without factors for long contexts": (
        "phi3, longrope, beyond the original length",
        {"rope_parameters": {key: LONGROPE[key] for key in LONGROPE if key != "long_factor"}},
        "rope_parameters.long_factor is absent; it must be a list of numbers",
    ),
    "longrope of no original length": (
        "phi3, longrope, beyond the original length",
        {"original_max_position_embeddings": 1},
        "original_max_position_embeddings is 1; it must be a whole number of at least 2",
    ),
    "attention scores without scale": (
        "granite, biases, tied",
        {"attention_multiplier": 0},
        "attention_multiplier is 0.0; it must be a number above 0",
    ),
    "outputs without effect": (
        "granite, biases, tied",
        {"residual_multiplier": 0.0},
        "residual_multiplier is 0.0; it must be above 0",
    ),
    "logits divided by zero": (
        "granitemoe",
        {"logits_scaling": 0.0},
        "logits_scaling is 0.0; it must be above 0",
    ),
    "a text for a factor": (
        "granite, biases, tied",
        {"embedding_multiplier": "twelve"},
        'embedding_multiplier is "twelve"; it must be a number',
    ),
    "xIELU in another family": (
        "llama, multi-head",
        {"hidden_act": "xielu"},
        'hidden_act is "xielu"; it must be one of gelu, ',
    ),
    "parameters of an activation that has none": (
        "apertus, biases, tied",
        {"hidden_act": "relu2"},
        "no parameter for 12 of the weights: model.layers.0.mlp.act_fn.alpha_n",
    ),
    "queries without a factor": (
        "ministral3, window",
        {"rope_parameters": {key: MINISTRAL_YARN[key] for key in ("rope_type", "rope_theta")}},
        "rope_parameters.llama_4_scaling_beta is absent; it must be a number",
    ),
    "queries that shrink": (
        "ministral3, window",
        {"rope_parameters": MINISTRAL_YARN | {"llama_4_scaling_beta": -0.1}},
        "rope_parameters.llama_4_scaling_beta is -0.1; it must be a number of at least 0",
    ),
    "queries scaled at every token": (
        "ministral3, window",
        {"rope_parameters": MINISTRAL_YARN | {"original_max_position_embeddings": 0}},
        "original_max_position_embeddings is 0; it must be a whole number of at least 1",
    ),
    "dynamic": (
        "qwen2",
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}},
        "rope type 'dynamic'",
    ),
    "positions by layer": (
        "qwen3, wide heads",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "is not one mapping for all layers",
    ),
    "partial positions": (
        "llama, multi-head",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, which Preamble does not support",
    ),
    "attention scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is true, which Preamble does not support",
    ),
    "cross attention": ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
    "unknown activation": ("gpt2", {"activation_function": "mish"}, 'is "mish"; it must be one of'),
    "quantized": (
        "llama, multi-head",
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config.quant_method is 'gptq'",
    ),
    "mixed windows by number": (
        "qwen2",
        {**WINDOW, "max_window_layers": 1, "layer_types": None},
        "max_window_layers is 1, so only some of the 3 layers",
    ),
    "mixed windows by name": (
        "qwen2",
        {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types mixes full_attention, sliding_attention",
    ),
    "a number for kinds of layers": (
        "qwen2",
        {**WINDOW, "layer_types": 0},
        "layer_types is 0; it must be a list of names",
    ),
    "numbers for kinds of layers": (
        "mixtral",
        {"layer_types": [[1]]},
        r"layer_types is \[\[1\]\]; it must be a list of names",
    ),
    "a number of 400 digits": (
        "llama, multi-head",
        {"rms_norm_eps": 10**400},
        "rms_norm_eps is 10{59}; it must be a finite number",
    ),
    "layers of 400 digits": (
        "mixtral",
        {"num_hidden_layers": 10**400},
        "num_hidden_layers is 10{59}; it must be a whole number from 0 to",
    ),
    "layers without number": (
        "mixtral",
        {"num_hidden_layers": 1 << 30},
        "num_hidden_layers is 1073741824; it must be a whole number from 0 to 65535",
    ),
    "no number": (
        "llama, multi-head",
        {"rms_norm_eps": float("nan")},
        "rms_norm_eps is NaN; it must be a finite number",
    ),
    "a missing field": ("llama, multi-head", {"hidden_size": None}, "hidden_size .*whole number"),
    "a text for a number": ("gpt2", {"n_head": "4"}, 'n_head is "4"; it must be a whole number'),
    "a number for a flag": ("llama, multi-head", {"mlp_bias": 1}, "mlp_bias is 1; .*true or false"),
    "heads that do not divide": (
        "llama, multi-head",
        {"num_key_value_heads": 3},
        "4 attention heads do not divide into 3",
    ),
    "another width": (
        "llama, multi-head",
        {"intermediate_size": 96},
        r"gate_proj.weight: found \(80, 48\), need \(96, 48\) for .*the weights disagree",
    ),
    "another vocabulary": (
        "gpt2",
        {"vocab_size": 90},
        r"wte.weight: found \(101, 48\), need \(90, 48\)",
    ),
    "more layers": (
        "llama, multi-head",
        {"num_hidden_layers": 4},
        "the weights lack 'model.layers.3.*download is incomplete",
    ),
    "fewer layers": (
        "llama, multi-head",
        {"num_hidden_layers": 2},
        "no parameter for 9 of the weights: model.layers.2.*outputs would be wrong",
    ),
    "heads of another width": (
        "qwen3, wide heads",
        {"head_dim": 24},
        r"q_proj.weight: found \(80, 48\), need \(96, 48\)",
    ),
    "tied, with a head of its own": (
        "llama, multi-head",
        {"tie_word_embeddings": True},
        "lm_head.weight is not equal to .*set tie_word_embeddings to false",
    ),
    "partial positions of a family that turns whole heads": (
        "starcoder2",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        "partial_rotary_factor is 0.5, which Preamble does not support",
    ),
    "an odd share of a head": (
        "gpt_neox, parallel residual",
        {"rope_parameters": None},
        "rotary_percent 0.25 of 12 channels gives 3 rotary channels; the number must be even",
    ),
    "no share of a head": (
        "nemotron",
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.0}},
        "rotary_percent is 0.0; it must be in",
    ),
    "a share that is no number": (
        "nemotron",
        {"rope_parameters": None, "partial_rotary_factor": "half"},
        'partial_rotary_factor is "half"; it must be a number',
    ),
    "heads of a width of their own": (
        "gpt_neox, parallel residual",
        {"head_dim": 16},
        "head_dim is 16, which Preamble does not support; it must be 12",
    ),
    "a word for a residual": (
        "gpt_neox, parallel residual",
        {"use_parallel_residual": "yes"},
        'use_parallel_residual is "yes"; it must be true or false',
    ),
    "positions that depend on the length": (
        "gpt_neox, parallel residual",
        {"rope_parameters": None, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope type 'dynamic' is not supported",
    ),
    "biases of an MLP that are not there": (
        "nemotron",
        {"mlp_bias": True},
        "the weights lack 'model.layers.0.mlp.up_proj.bias'",
    ),
    "biases that config.json does not have": (
        "starcoder2",
        {"use_bias": False},
        "no parameter for 18 of the weights: model.layers.0.mlp.c_fc.bias",
    ),
    "mixed windows of experts": (
        "mixtral",
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types mixes full_attention, sliding_attention",
    ),
    "more experts per token than experts": (
        "mixtral",
        {"num_experts_per_tok": 6},
        "moe_router_topk is 6, and num_experts is 5; in a model with experts, moe_router_topk must "
        "be from 1 to num_experts",
    ),
    "no experts": (
        "mixtral",
        {"num_local_experts": 0},
        "moe_router_topk is 2, and num_experts is 0",
    ),
    "more experts": (
        "mixtral",
        {"num_local_experts": 6},
        r"block_sparse_moe.gate.weight: found \(5, 48\), need \(6, 48\)",
    ),
    "wider experts": (
        "mixtral",
        {"intermediate_size": 96},
        r"experts.0.w1.weight: found \(80, 48\), need \(96, 48\)",
    ),
    "no layer with experts": (
        "qwen3_moe, renormalized, wide heads",
        {"decoder_sparse_step": 0},
        "decoder_sparse_step is 0; it must be a whole number of at least 1",
    ),
    "a number for dense layers": (
        "qwen2_moe, one dense layer",
        {"mlp_only_layers": 1},
        "mlp_only_layers is 1; it must be a list of layer numbers",
    ),
    "another dense layer": (
        "qwen2_moe, one dense layer",
        {"mlp_only_layers": [0]},
        "the weights lack 'model.layers.0.mlp.gate_proj.weight'",
    ),
    "windows of every other layer": (
        "qwen2_moe, one dense layer",
        {"use_sliding_window": True, "sliding_window": 9, "layer_types": None},
        "every other layer has sliding attention, which Preamble does not support",
    ),
    "groups of experts": (
        "glm4_moe",
        {"n_group": 5},
        "n_group is 5, which Preamble does not support; it must be 1",
    ),
    "several experts without normalization": (
        "glm4_moe",
        {"norm_topk_prob": False},
        "norm_topk_prob is false, which Preamble does not support; it must be true",
    ),
    "biases that are not there": (
        "llama, multi-head",
        {"attention_bias": True},
        "the weights lack 'model.layers.0.self_attn.q_proj.bias'",
    ),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_invalid_config_is_refused(
    fault: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    case, fields, message = REFUSED[fault]
    folder = Path(shutil.copytree(saved(case), tmp_path / "model"))
    edit_json(folder / CONFIG, lambda record: record.update(fields))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)
