"""Model presets: GPTConfigs of GPT-3 and LLaMA sizes by name, for plans without a checkpoint.

The GPT-3 presets are the sizes of the published Megatron and NeMo runs. This module reads no files.
"""

from collections.abc import Mapping
from functools import cache

from gpt.config import GPTConfig
from gpt.errors import ConfigError
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
    }


def preset(name: str) -> GPTConfig | None:
    """Return the preset with this name, or None if there is none. Case is ignored.

    A GPT-3 preset can also be named by its size, such as 175B.
    """
    normalized_name = name.lower().replace("_", "-").replace(" ", "-").replace("gpt-3", "gpt3")
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
