"""Checkpoint in Hugging Face's format, in bf16, out of a GGUF file with quantized weights.

    python dequantize.py GGUF_FILE FOLDER

Transformers, with the package gguf, dequantizes the weights. The program imports no module of the
repository, because it runs in an environment of its own.
"""

import sys
from pathlib import Path
from typing import Any


def main(gguf_file: str, folder: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = Path(gguf_file).parent, Path(gguf_file).name
    models: Any = AutoModelForCausalLM  # Its methods have no types.
    dtype = torch.bfloat16
    dequantized = models.from_pretrained(source, gguf_file=name, dtype=dtype)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # Transformers does not save a model that it has read from a GGUF file.
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = models.from_config(config, dtype=dtype)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{folder}: {model.num_parameters():,} parameters in {str(dtype).split('.')[1]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
