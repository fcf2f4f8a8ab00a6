"""Architectures that are not computed: named by their sign in every format, with the way out."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gpt.checkpoint.digest import base_digest
from gpt.errors import CheckpointError
from gpt.formats.mappings.hybrid_args import config_from_args
from gpt.formats.mappings.hybrid_layers import parse_pattern
from gpt.formats.mappings.megatron_args import MegatronArgs, WeightShapes
from gpt.formats.mappings.megatron_names import refuse_unsupported_part
from gpt.formats.mappings.nemo_args import config_from_nemo1, config_from_transformer
from gpt.formats.mappings.nemo_yaml import NemoConfig
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints.hf_models import edit_json, model_of

MLA = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}
INDEXER = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
}
MAMBA = {"mamba_d_conv": 4, "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_heads": 128}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}

# Excerpts of the config.json of releases, the sign in the error, and the name of the architecture.
HF_CONFIGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "DeepSeek-V3": (
        {"model_type": "deepseek_v3", "quantization_config": FP8, **MLA},
        "kv_lora_rank is 512",
        "multi-head latent attention",
    ),
    "DeepSeek-V2-Lite": (
        {"model_type": "deepseek_v2", **MLA, "q_lora_rank": None},
        "kv_lora_rank is 512",
        "multi-head latent attention",
    ),
    "Kimi-K2": ({"model_type": "kimi_k2", **MLA}, "kv_lora_rank is 512", "latent attention"),
    "GLM-4.7-Flash": (
        {"model_type": "glm4_moe_lite", **MLA, "q_lora_rank": 768},
        "kv_lora_rank is 512",
        "multi-head latent attention",
    ),
    "DeepSeek-V3.2": (
        {"model_type": "deepseek_v32", **MLA, **INDEXER},
        "index_topk is 2048",
        "DeepSeek sparse attention",
    ),
    "DeepSeek-V4": (
        {
            "model_type": "deepseek_v4",
            "q_lora_rank": 1024,
            "compress_rates": {"compressed_sparse_attention": 4},
            "hc_mult": 4,
        },
        "compress_rates is ",
        "DeepSeek sparse attention",
    ),
    "GLM-5": (
        {"model_type": "glm_moe_dsa", **MLA, **INDEXER, "layer_types": ["indexed_attention"] * 4},
        "index_topk is 2048",
        "DeepSeek sparse attention",
    ),
    "Qwen3-Next": (
        {"model_type": "qwen3_next", "full_attention_interval": 4, **DELTA_NET},
        "linear_conv_kernel_dim is 4",
        "linear attention",
    ),
    "Qwen3.5": (
        {
            "model_type": "qwen3_5",
            "text_config": {
                "model_type": "qwen3_5_text",
                "layer_types": ["linear_attention"] * 3 + ["full_attention"],
                **DELTA_NET,
            },
        },
        "text_config.linear_conv_kernel_dim is 4",
        "Gated Delta Net",
    ),
    "Kimi-Linear": (
        {
            "model_type": "kimi_linear",
            "linear_attn_config": {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7]},
            **MLA,
        },
        "linear_attn_config is ",
        "KDA",
    ),
    "MiniMax-M1": (
        {"model_type": "minimax_m1", "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]},
        "model_type is 'minimax_m1'",
        "lightning attention",
    ),
    "linear attention under another family's name": (
        {"model_type": "llama", "layer_types": ["linear_attention", "full_attention"]},
        "layer_types has 'linear_attention'",
        "linear attention",
    ),
    "Nemotron-H": (
        {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": "M-M-M-M*-M-M-",
            "mamba_num_heads": 128,
            "ssm_state_size": 128,
        },
        "mamba_num_heads is 128",
        "Mamba",
    ),
    "Nemotron-H, saved by transformers 5": (
        {
            "model_type": "nemotron_h",
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "mamba_num_heads": 128,
        },
        "mamba_num_heads is 128",
        "Mamba",
    ),
    "Granite-4.0-H": (
        {
            "model_type": "granitemoehybrid",
            "layer_types": ["mamba"] * 3 + ["attention"],
            **MAMBA,
        },
        "mamba_d_state is 128",
        "Mamba",
    ),
    "Falcon-H1": (
        {"model_type": "falcon_h1", "mamba_d_ssm": 1536, **MAMBA},
        "mamba_d_state is 128",
        "Mamba",
    ),
    "Bamba": ({"model_type": "bamba", **MAMBA}, "mamba_d_state is 128", "Mamba"),
    "Jamba": (
        {"model_type": "jamba", "attn_layer_period": 8, "mamba_d_state": 16},
        "mamba_d_state is 16",
        "Mamba",
    ),
    "Falcon-Mamba": ({"model_type": "falcon_mamba"}, "model_type is 'falcon_mamba'", "Mamba"),
    "Llama 4": (
        {
            "model_type": "llama4",
            "text_config": {
                "model_type": "llama4_text",
                "attention_chunk_size": 8192,
                "attn_temperature_tuning": 4,
                "use_qk_norm": True,
            },
        },
        "text_config.attention_chunk_size is 8192",
        "Llama 4",
    ),
    "Gemma 3n": (
        {
            "model_type": "gemma3n",
            "text_config": {
                "model_type": "gemma3n_text",
                "hidden_size_per_layer_input": 256,
                "num_kv_shared_layers": 15,
                "final_logit_softcapping": 30.0,
            },
        },
        "text_config.hidden_size_per_layer_input is 256",
        "Gemma 3n",
    ),
    "Gemma 4": (
        {
            "model_type": "gemma4_text",
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "final_logit_softcapping": None,
        },
        "model_type is 'gemma4_text'",
        "Gemma 4",
    ),
    "Gemma 2": (
        {
            "model_type": "gemma2",
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        "attn_logit_softcapping is 50.0",
        "softcaps",
    ),
    "Gemma 2, by its defaults": ({"model_type": "gemma2"}, "model_type is 'gemma2'", "softcaps"),
    "T5": (
        {"model_type": "t5", "is_encoder_decoder": True, "d_kv": 64},
        "is_encoder_decoder is True",
        "T5",
    ),
    "BERT": (
        {"model_type": "bert", "type_vocab_size": 2},
        "model_type is 'bert'",
        "bidirectional encoder, as of BERT",
    ),
    "Llama-Nemotron": (
        {
            "model_type": "nemotron-nas",
            "block_configs": [{"attention": {"n_heads_in_group": 8}, "ffn": {"ffn_mult": 2.6}}],
        },
        "block_configs is ",
        "neural architecture search",
    ),
    "a Llama with other layers": (
        {"model_type": "llama", "per_layer_config": {"05": {"intermediate_size": 512}}},
        "per_layer_config is ",
        "neural architecture search",
    ),
}


def check_refusal(message: str, sign: str, name: str) -> None:
    """The error has the sign, the name and the way out in one sentence."""
    assert sign in message and name in message.partition(sign)[2]
    way_out = message.partition("which Preamble does not support; ")[2]
    assert way_out.startswith(("serve the model with ", "run the model with "))
    assert ", or give " in way_out
    assert "\n" not in message and len(message) < 600


@pytest.mark.parametrize("release", HF_CONFIGS)
def test_hugging_face_configs_are_refused_by_name(release: str, tmp_path: Path) -> None:
    record, sign, name = HF_CONFIGS[release]
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    message = str(refusal.value)
    assert message.startswith(f"{tmp_path / 'config.json'}: {sign}")
    check_refusal(message, sign, name)


def test_keys_that_are_off_are_no_signs(tmp_path: Path) -> None:
    model_of("qwen2").save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "copy")
    off: dict[str, Any] = {
        "kv_lora_rank": None,
        "index_topk": None,
        "is_encoder_decoder": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "num_kv_shared_layers": 0,
        "per_layer_config": {},
        "hybrid_override_pattern": "*-*-*-",
        "text_config": None,
    }
    edit_json(tmp_path / "copy/config.json", lambda record: record.update(off))
    checkpoints = [open_checkpoint(tmp_path / name) for name in ("plain", "copy")]
    assert base_digest(checkpoints[0]) == base_digest(checkpoints[1])


def test_a_hybrid_family_without_mamba_layers_is_not_called_mamba(tmp_path: Path) -> None:
    record = {"model_type": "granitemoehybrid", "layer_types": ["attention"] * 4, **MAMBA}
    (tmp_path / "config.json").write_text(json.dumps(record))
    with pytest.raises(CheckpointError, match="model_type 'granitemoehybrid' is not supported"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("words", [["full_attention", "swa"], ["attention"], ["moe"]])
def test_unknown_layer_types_are_refused_in_families_that_do_not_read_them(
    words: list[str], tmp_path: Path
) -> None:
    model_of("llama, multi-head").save_pretrained(tmp_path)
    edit_json(tmp_path / "config.json", lambda record: record.update(layer_types=words))
    with pytest.raises(CheckpointError, match=f"layer_types has '{words[-1]}', which Preamble"):
        open_checkpoint(tmp_path)


NO_WEIGHTS = WeightShapes({}, 2, legacy=False)

# Megatron args, the sign in the error, and the name of the architecture.
ARGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "MLA": (
        {"multi_latent_attention": True, "kv_lora_rank": 512, "q_lora_rank": 1536},
        "multi_latent_attention is True",
        "multi-head latent attention",
    ),
    "DSA": (
        {"experimental_attention_variant": "dsa", "multi_latent_attention": True},
        "experimental_attention_variant is 'dsa'",
        "DeepSeek sparse attention",
    ),
    "gated delta net": (
        {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": 4},
        "linear_attention_freq is 4",
        "Gated Delta Net",
    ),
    "another variant": (
        {"experimental_attention_variant": "gdn2"},
        "experimental_attention_variant is 'gdn2'",
        "Gated Delta Net",
    ),
    "Llama 4": ({"qk_l2_norm": True, "no_rope_freq": 4}, "qk_l2_norm is True", "Llama 4"),
    "Gemma 2": (
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        "attn_logit_softcapping is 50.0",
        "softcaps",
    ),
    "a final softcap": (
        {"attn_logit_softcapping": None, "final_logit_softcapping": 30.0},
        "final_logit_softcapping is 30.0",
        "softcaps",
    ),
    "NAS by a path": (
        {"heterogeneous_layers_config_path": "/ckpt/block_configs.json"},
        "heterogeneous_layers_config_path is '/ckpt/block_configs.json'",
        "neural architecture search",
    ),
    "NAS by a text": (
        {"heterogeneous_layers_config_encoded_json": '{"block_configs": []}'},
        "heterogeneous_layers_config_encoded_json is ",
        "neural architecture search",
    ),
}


@pytest.mark.parametrize("case", ARGS)
def test_megatron_args_are_refused_by_name(case: str) -> None:
    changes, sign, name = ARGS[case]
    args = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, **changes}
    with pytest.raises(CheckpointError) as refusal:
        config_from_args(MegatronArgs(args, "iter_0000100"), NO_WEIGHTS)
    check_refusal(str(refusal.value), f"iter_0000100: args.{sign}", name)


@pytest.mark.parametrize("case", ARGS)
def test_nemo_fields_are_refused_by_name(case: str) -> None:
    changes, sign, name = ARGS[case]
    nemo2 = {"_target_": "nemo.collections.llm.gpt.model.base.GPTConfig", "num_layers": 2}
    nemo1 = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    for record, convert in ((nemo2, config_from_transformer), (nemo1, config_from_nemo1)):
        with pytest.raises(CheckpointError) as refusal:
            convert(NemoConfig({**record, **changes}, "model.yaml"), NO_WEIGHTS)
        check_refusal(str(refusal.value), f"model.yaml: {sign}", name)


@pytest.mark.parametrize(
    ("class_name", "name"),
    [
        ("nemo.collections.llm.gpt.model.deepseek.DeepSeekV3Config", "latent attention"),
        ("megatron.bridge.models.deepseek.deepseek_provider.DeepSeekV2ModelProvider", "latent"),
        ("megatron.bridge.models.kimi.kimi_provider.KimiK2Provider", "latent attention"),
        ("megatron.bridge.models.deepseek.deepseek_provider.DeepSeekV32ModelProvider", "sparse"),
        ("megatron.bridge.models.qwen.qwen_provider.Qwen3NextModelProvider", "Gated Delta Net"),
        ("nemo.collections.llm.gpt.model.ssm.BaseMambaConfig130M", "Mamba"),
        ("nemo.collections.llm.gpt.model.llama4.Llama4Experts16Config", "Llama 4"),
        ("nemo.collections.llm.gpt.model.gemma2.Gemma2Config9B", "softcaps"),
        ("megatron.bridge.models.gemma.gemma4_provider.Gemma4ModelProvider", "Gemma 4"),
        ("nemo.collections.llm.t5.model.t5.T5Config220M", "an encoder-decoder, such as T5"),
        ("nemo.collections.llm.bert.model.bert.BertConfig", "BERT"),
        ("megatron.bridge.models.llama_nemotron.LlamaNemotronHeterogeneousProvider", "search"),
    ],
)
def test_nemo_classes_are_refused_by_name(class_name: str, name: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        config_from_transformer(NemoConfig({"_target_": class_name}, "model.yaml"), NO_WEIGHTS)
    check_refusal(str(refusal.value), f"model.yaml: _target_ is {class_name[-60:]}", name)


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        ("target", "nemo.collections.nlp.models.language_modeling.MegatronT5Model", "T5"),
        ("target", "nemo.collections.nlp.models.language_modeling.MegatronBertModel", "BERT"),
        ("target", "nemo.collections.nlp.models.language_modeling.MegatronMambaModel", "Mamba"),
        ("name", "megatron_t5", "T5"),
    ],
)
def test_nemo_1_models_are_refused_by_name(field: str, value: str, name: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        config_from_nemo1(NemoConfig({field: value}, "model_config.yaml"), NO_WEIGHTS)
    check_refusal(str(refusal.value), f"model_config.yaml: {field} is {value[-60:]}", name)


@pytest.mark.parametrize(
    ("symbol", "name"),
    [
        ("M", "Mamba"),
        ("G", "Gated Delta Net"),
        ("D", "DeepSeek sparse attention"),
        ("+", "multi-head latent attention"),
    ],
)
def test_layer_symbols_are_refused_by_name(symbol: str, name: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        parse_pattern(f"*-{symbol}-", "args.hybrid_layer_pattern")
    check_refusal(str(refusal.value), f"is '*-{symbol}-'; {symbol} is ", name)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("decoder.layers.0.self_attention.linear_kv_down_proj.weight", "latent attention"),
        ("decoder.layers.0.self_attention.linear_q_proj.weight", "latent attention"),
        ("decoder.layers.0.self_attention.core_attention.indexer.linear_wk.weight", "sparse"),
        ("decoder.layers.0.mixer.A_log", "Mamba"),
        ("decoder.layers.0.self_attention.in_proj.weight", "Gated Delta Net"),
        ("decoder.layers.0.cross_attention.linear_kv.weight", "T5"),
        ("language_model.encoder.layers.0.inter_attention.query.weight", "T5"),
        ("encoder.layers.0.self_attention.linear_qkv.weight", "BERT or T5"),
        ("lm_head.dense.weight", "BERT"),
        ("language_model.pooler.dense.weight", "BERT"),
    ],
)
def test_megatron_tensors_are_refused_by_name(key: str, name: str) -> None:
    with pytest.raises(CheckpointError) as refusal:
        refuse_unsupported_part(key, "mp_rank_00/model_optim_rng.pt")
    check_refusal(str(refusal.value), f"model_optim_rng.pt: it has the tensor {key}", name)


# Families whose configuration class in transformers, without any argument, has a sign.
TRANSFORMERS_TYPES = {
    "DeepSeek sparse attention": ("deepseek_v32", "deepseek_v4", "glm_moe_dsa"),
    "Mamba": ("nemotron_h", "granitemoehybrid", "falcon_h1", "bamba", "jamba", "zamba2", "mamba2"),
    "linear attention": (
        *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"),
        *("minimax", "olmo_hybrid"),
    ),
    "latent attention": ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash"),
    "Llama 4": ("llama4", "llama4_text"),
    "Gemma 3n": ("gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    "softcaps": ("gemma2",),
    "an encoder-decoder": ("t5", "mt5", "bart", "t5gemma"),
    "bidirectional encoder": ("bert", "roberta", "modernbert"),
}


@pytest.mark.slow  # Imports all configuration classes.
@pytest.mark.parametrize("name", TRANSFORMERS_TYPES)
def test_configs_of_transformers_are_refused_by_name(name: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    for model_type in TRANSFORMERS_TYPES[name]:
        AutoConfig.for_model(model_type).save_pretrained(tmp_path)
        with pytest.raises(CheckpointError, match=f"a sign of .*{name}"):
            open_checkpoint(tmp_path)
