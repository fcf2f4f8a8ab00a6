"""Tokenizer info: the description of a tokenizer that clients of vLLM's /tokenizer_info read.

It has the keys of a tokenizer_config.json: the class, the named special tokens, the chat template.
It is built from what the tokenizer does, not copied from a file, so it contains no paths.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpt.tokenizers.chat_template import ChatTemplate, token_names, tokenizer_folder
from gpt.tokenizers.special_tokens import read_json
from gpt.tokenizers.tokenizer import Tokenizer

# The transformers class of each kind, if the files name none.
DEFAULT_CLASSES: Mapping[str, str] = {
    "tokenizer.json": "PreTrainedTokenizerFast",
    "gpt2": "GPT2Tokenizer",
    "sentencepiece": "LlamaTokenizer",
    "null": "NullTokenizer",
}


def describe_tokenizer(
    tokenizer: Tokenizer,
    tokenizer_path: Path | None,
    template: ChatTemplate | None,
    context_tokens_max: int,
) -> dict[str, Any]:
    """Return the description. `template`: the template that the server uses."""
    folder = tokenizer_folder(tokenizer_path)
    file = None if folder is None else folder / "tokenizer_config.json"
    config = read_json(file) if file is not None and file.is_file() else {}
    named_class = config.get("tokenizer_class")
    eos_id = tokenizer.eos_id
    info: dict[str, Any] = {
        "tokenizer_class": named_class
        if isinstance(named_class, str)
        else DEFAULT_CLASSES[tokenizer.kind],
        "model_max_length": context_tokens_max,
        **token_names(tokenizer_path, tokenizer),
        "add_bos_token": tokenizer.adds_bos,
        "add_eos_token": eos_id is not None and tokenizer.suffix_ids[-1:] == (eos_id,),
    }
    if template is not None:
        info["chat_template"] = template.text
    return info
