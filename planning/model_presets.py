"""Model presets: GPTConfigs of published models by name, for plans without a checkpoint.

The GPT-3 presets are the sizes of the published Megatron and NeMo runs. The sizes of GPT-OSS, Gemma
3, Mixtral and Qwen3 are those of their config.json; the reader of Hugging Face checkpoints adds
what is the same for all models of a family. This module reads no files.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.registry import FAMILIES
from gpt.settings import short_repr, suggest_nearest

# The fields in which the LLaMA architecture differs from GPT-3.
LLAMA_FIELDS: Mapping[str, object] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "silu",
    "gated": True,
    "qkv_bias": False,
    "proj_bias": False,
    "mlp_bias": False,
    "untie_embeddings_and_output_weights": True,
}


def _gpt3(layers: int, hidden: int, heads: int) -> GPTConfig:
    return GPTConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        vocab_size=51200,
        max_position_embeddings=2048,
        dtype="bfloat16",
    )


def _llama(layers: int, hidden: int, heads: int, groups: int, **sizes: int) -> GPTConfig:
    record = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "dtype": "bfloat16",
        **sizes,
        **LLAMA_FIELDS,
    }
    return GPTConfig.from_dict(record)


def _hugging_face(model_type: str, **fields: object) -> GPTConfig:
    family = FAMILIES[model_type]
    record = ConfigJson({**family.defaults, **fields}, Path(f"preset {model_type}"))
    return family.to_gpt_config(record).with_fields(dtype="bfloat16")


def _gpt_oss(layers: int, experts: int) -> GPTConfig:
    return _hugging_face(
        "gpt_oss",
        num_hidden_layers=layers,
        hidden_size=2880,
        intermediate_size=2880,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=64,
        num_local_experts=experts,
        sliding_window=128,
        vocab_size=201088,
        max_position_embeddings=131072,
    )


def _gemma3(layers: int, hidden: int, ffn: int, heads: int, groups: int, **more: int) -> GPTConfig:
    return _hugging_face(
        "gemma3_text",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        sliding_window=1024,
        vocab_size=262208,
        max_position_embeddings=131072,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
        **more,
    )


def _qwen3_moe(layers: int, hidden: int, heads: int, expert_width: int) -> GPTConfig:
    return _hugging_face(
        "qwen3_moe",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_attention_heads=heads,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=expert_width,
        norm_topk_prob=True,
        rope_theta=1_000_000.0,
        vocab_size=151936,
        max_position_embeddings=40960,
    )


def _mixtral(layers: int, hidden: int, ffn: int, heads: int, **more: object) -> GPTConfig:
    return _hugging_face(
        "mixtral",
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_attention_heads=heads,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
        rope_theta=1_000_000.0,
        **more,
    )


@cache
def presets() -> Mapping[str, GPTConfig]:
    llama2_sizes = {"vocab_size": 32000, "max_position_embeddings": 4096}
    llama3_sizes = {"vocab_size": 128256, "max_position_embeddings": 8192}
    return {
        "gpt3-5b": _gpt3(24, 4096, 32),
        "gpt3-20b": _gpt3(44, 6144, 48),
        "gpt3-22b": _gpt3(48, 6144, 64),
        "gpt3-40b": _gpt3(48, 8192, 64),
        "gpt3-175b": _gpt3(96, 12288, 96),
        "gpt3-530b": _gpt3(105, 20480, 128),
        "gpt3-1t": _gpt3(128, 25600, 160),
        "llama2-7b": _llama(32, 4096, 32, 32, ffn_hidden_size=11008, **llama2_sizes),
        "llama2-13b": _llama(40, 5120, 40, 40, ffn_hidden_size=13824, **llama2_sizes),
        "llama2-70b": _llama(80, 8192, 64, 8, ffn_hidden_size=28672, **llama2_sizes),
        "llama3-8b": _llama(32, 4096, 32, 8, ffn_hidden_size=14336, **llama3_sizes),
        "llama3-70b": _llama(80, 8192, 64, 8, ffn_hidden_size=28672, **llama3_sizes),
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "mixtral-8x7b": _mixtral(
            32, 4096, 14336, 32, vocab_size=32000, max_position_embeddings=32768
        ),
        "mixtral-8x22b": _mixtral(
            56, 6144, 16384, 48, vocab_size=32768, max_position_embeddings=65536
        ),
        "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 768),
        "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 1536),
        "gemma3-4b": _gemma3(34, 2560, 10240, 8, 4),
        "gemma3-12b": _gemma3(48, 3840, 15360, 16, 8),
        "gemma3-27b": _gemma3(62, 5376, 21504, 32, 16, head_dim=128, query_pre_attn_scalar=168),
    }


def preset(name: str) -> GPTConfig | None:
    """Return the preset with this name, or None if there is none. Case is ignored.

    A GPT-3 preset can also be named by its size, such as 175B.
    """
    normalized_name = name.lower().replace("_", "-").replace(" ", "-")
    normalized_name = normalized_name.replace("gpt-3", "gpt3").replace("gemma-3", "gemma3")
    configs = presets()
    return configs.get(normalized_name) or configs.get(
        f"gpt3-{normalized_name.removeprefix('gpt-')}"
    )


def find_preset(name: str) -> GPTConfig:
    """Return the preset with this name; raise ConfigError if no preset has the name."""
    config = preset(name)
    if config is None:
        sizes = [
            preset_name.removeprefix("gpt3-")
            for preset_name in presets()
            if preset_name.startswith("gpt3-")
        ]
        raise ConfigError(
            f"{short_repr(name)} is neither a preset nor the path of a checkpoint; "
            f"{suggest_nearest(name.lower(), [*presets(), *sizes])}"
        )
    return config
