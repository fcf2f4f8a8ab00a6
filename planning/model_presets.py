"""Models by the names that the field has for them: what a plan needs, where there is no checkpoint.

GPT-3's sizes as Megatron and NeMo train them, and the LLaMA sizes that tables are published for. A
checkpoint knows better what it is; this knows nothing of files.
"""

from collections.abc import Mapping
from functools import cache

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.settings import nearest, shown

# What is unlike GPT-3 in LLaMA's kind of network.
LLAMA: Mapping[str, object] = {
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
    return GPTConfig(layers, hidden, heads, 51200, 2048, dtype="bfloat16")


def _llama(layers: int, hidden: int, heads: int, groups: int, **sizes: int) -> GPTConfig:
    record = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": groups,
        "dtype": "bfloat16",
        **sizes,
        **LLAMA,
    }
    return GPTConfig.from_dict(record)


@cache
def presets() -> Mapping[str, GPTConfig]:
    second = {"vocab_size": 32000, "max_position_embeddings": 4096}
    third = {"vocab_size": 128256, "max_position_embeddings": 8192}
    return {
        "gpt3-5b": _gpt3(24, 4096, 32),
        "gpt3-20b": _gpt3(44, 6144, 48),
        "gpt3-22b": _gpt3(48, 6144, 64),
        "gpt3-40b": _gpt3(48, 8192, 64),
        "gpt3-175b": _gpt3(96, 12288, 96),
        "gpt3-530b": _gpt3(105, 20480, 128),
        "gpt3-1t": _gpt3(128, 25600, 160),
        "llama2-7b": _llama(32, 4096, 32, 32, ffn_hidden_size=11008, **second),
        "llama2-13b": _llama(40, 5120, 40, 40, ffn_hidden_size=13824, **second),
        "llama2-70b": _llama(80, 8192, 64, 8, ffn_hidden_size=28672, **second),
        "llama3-8b": _llama(32, 4096, 32, 8, ffn_hidden_size=14336, **third),
        "llama3-70b": _llama(80, 8192, 64, 8, ffn_hidden_size=28672, **third),
    }


def preset(name: str) -> GPTConfig | None:
    """By its name, however it is written; GPT-3's also by size alone, as 175B. None: no preset."""
    plain = name.lower().replace("_", "-").replace(" ", "-").replace("gpt-3", "gpt3")
    known = presets()
    return known.get(plain) or known.get(f"gpt3-{plain.removeprefix('gpt-')}")


def find_preset(name: str) -> GPTConfig:
    found = preset(name)
    if found is None:
        sizes = [one.removeprefix("gpt3-") for one in presets() if one.startswith("gpt3-")]
        raise ConfigError(
            f"no model {shown(name)} is known, nor is there a checkpoint of that path; "
            f"{nearest(name.lower(), [*presets(), *sizes])}"
        )
    return found
