"""GPT-2 small with random weights, which every engine can read: the model of all timings.

What a number is does not change how long it takes, so nothing has to be downloaded.
"""

from typing import Any

import torch

LAYERS, HIDDEN, HEADS, VOCABULARY, CONTEXT = 12, 768, 12, 50304, 1024


def random_model(dtype: str, **network: float | None) -> Any:
    """GPT-2 small, in the form that every engine reads; `network` is what is to be otherwise."""
    import transformers

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "n_layer": LAYERS,
        "n_embd": HIDDEN,
        "n_head": HEADS,
        "vocab_size": VOCABULARY,
        "n_positions": CONTEXT,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.GPT2Config(**sizes | network)
    return transformers.GPT2LMHeadModel(config).to(getattr(torch, dtype)).eval()
