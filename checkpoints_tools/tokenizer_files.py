"""A tokenizer's files, taken along to where the target's reader looks for them.

They are small, so they are texts of a layout like any other: planned, checked, in the manifest. Of
a directory that has weights too, only what can be a tokenizer's goes along.
"""

from pathlib import Path

from checkpoints_tools.layout import File, Layout, text_file

# Of a tokenizer's directory, what is copied: never weights that lie beside it.
SUFFIXES = (".json", ".model", ".txt", ".jinja", ".tiktoken")
NOT_TOKENIZER = (
    *("config.json", "preamble.json", "metadata.json", "integrity.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json"),
    *("latest_checkpointed_iteration.txt", "adapter_config.json"),
)
# Where each format keeps them, seen from the directory with the weights.
FOLDERS = {"native": "tokenizer", "megatron": "tokenizer", "torch_dist": "tokenizer"}


def tokenizer_files(tokenizer: Path, layout: Layout) -> list[File]:
    sources = [tokenizer]
    if tokenizer.name.endswith("vocab.json"):
        sources.append(tokenizer.with_name(tokenizer.name.replace("vocab.json", "merges.txt")))
    if tokenizer.is_dir():
        sources = [
            file
            for file in sorted(tokenizer.iterdir())
            if file.suffix in SUFFIXES and file.name not in NOT_TOKENIZER and file.is_file()
        ]
    places = [layout.folder, FOLDERS.get(layout.format, "")]
    folder = "".join(f"{place}/" for place in places if place)
    return [text_file(f"{folder}{file.name}", file.read_bytes()) for file in sources]
