"""A tokenizer's files, taken along to where the target's reader looks for them.

They are small, so they are texts of a layout like any other: planned, checked, in the manifest. Of
a directory that has weights too, only what can be a tokenizer's goes along.
"""

from fnmatch import fnmatch
from pathlib import Path

from checkpoints_tools.layout.layout import File, Layout, text_file
from gpt.checkpoint.logical_tensor import TOKENIZER_FILES, find_tokenizer
from gpt.errors import CheckpointError

# Of a tokenizer's directory, what is copied: never what else lies beside it.
NAMES = (
    *("*tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "null.json"),
    *("*vocab.json", "*merges.txt", "*.model", "*.tiktoken", "*.jinja", "chat_template.json"),
)
BYTES_MAX = 256 << 20
# Where each format keeps them, seen from the directory with the weights.
FOLDERS = {"native": "tokenizer", "megatron": "tokenizer", "torch_dist": "tokenizer"}


def tokenizer_files(tokenizer: Path, layout: Layout) -> list[File]:
    if not (tokenizer.is_dir() or tokenizer.is_file()):
        what = "is no file" if tokenizer.exists() else "does not exist"
        raise CheckpointError(
            f"the tokenizer {tokenizer} {what}; give a file or a directory that does with "
            "--tokenizer"
        )
    places = [layout.folder, FOLDERS.get(layout.format, "")]
    folder = "".join(f"{place}/" for place in places if place)
    try:
        sources = _sources(tokenizer)
        return [text_file(f"{folder}{file.name}", _content(file)) for file in sources]
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer's {error.filename} cannot be read ({error.strerror}); copy it again, "
            "or give another with --tokenizer"
        ) from None


def _sources(tokenizer: Path) -> list[Path]:
    files = [tokenizer]
    if tokenizer.is_dir():
        files = [
            file
            for file in sorted(tokenizer.iterdir())
            if any(fnmatch(file.name, name) for name in NAMES) and file.is_file()
        ]
        if find_tokenizer(tokenizer) is None and not any(map(_is_foreign, files)):
            raise CheckpointError(
                f"the tokenizer {tokenizer} is a directory without one: looked for names that end "
                f"in {', '.join(TOKENIZER_FILES)}; give another with --tokenizer"
            )
    merges = [
        file.with_name(file.name.replace("vocab.json", "merges.txt"))
        for file in files
        if file.name.endswith("vocab.json")
    ]
    whole = any(file.name == "tokenizer.json" or file.suffix == ".model" for file in files)
    beside = list(tokenizer.glob("*merges.txt")) if tokenizer.is_dir() else []
    for file in merges:
        if not (whole or beside or file.is_file()):
            raise CheckpointError(
                f"the tokenizer {tokenizer} has no {file.name} beside its vocab.json; copy both "
                "files of the BPE, or give another with --tokenizer"
            )
    return files if tokenizer.is_dir() else files + merges


def _is_foreign(file: Path) -> bool:
    """Of a kind that is taken along, but not read here."""
    return file.suffix == ".tiktoken"


def _content(file: Path) -> bytes:
    size = file.stat().st_size
    if size > BYTES_MAX:
        raise CheckpointError(
            f"the tokenizer's {file} has {size:,} bytes, more than any has ({BYTES_MAX:,}); give "
            "the tokenizer itself with --tokenizer"
        )
    return file.read_bytes()
