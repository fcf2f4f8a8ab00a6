"""The models that are timed beside others' engines, with random weights, as all of them read it.

What a number is does not change how long it takes, so nothing has to be downloaded. A model is what
transformers builds from these settings; ours is read from the files that it saves.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Shape:
    """A network, by the names that transformers has for its settings."""

    title: str
    kind: str  # Of transformers' classes, a model and its config.
    settings: Mapping[str, Any]

    def random(self, dtype: str, **settings: float | None) -> Any:
        """Their model; `settings` are what is to be otherwise."""
        import transformers

        torch.manual_seed(0)
        model = getattr(transformers, self.kind)
        return (
            model(model.config_class(**{**self.settings, **settings}))
            .to(getattr(torch, dtype))
            .eval()
        )

    def write(self, folder: Path, **settings: float | None) -> None:
        talk: Any = import_module("transformers.utils.logging")
        talk.disable_progress_bar()
        self.random("bfloat16", **settings).save_pretrained(folder)


# Random weights end nothing, so no token may.
ENDLESS = {"bos_token_id": None, "eos_token_id": None}
GPT2 = Shape(
    "GPT-2 small (12 x 768, V 50304)",
    "GPT2LMHeadModel",
    {
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "vocab_size": 50304,
        "n_positions": 1024,
        **ENDLESS,
    },
)
# As its family's small ones are today: four heads share keys and values, the head is not tied.
LLAMA = Shape(
    "a Llama-shaped 350M (24 x 1024, 16 heads, 4 of KV, feed-forward 2816, V 32000)",
    "LlamaForCausalLM",
    {
        "num_hidden_layers": 24,
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **ENDLESS,
    },
)
