"""Tokenizer files of a target: plans copies in the directory where readers find the tokenizer.

The files are small, so the layout contains them as literal bytes. If the tokenizer is a directory,
only the files whose names match `TOKENIZER_PATTERNS` are copied.
"""

from fnmatch import fnmatch
from pathlib import Path

from checkpoints_tools.layout.layout import Layout, TargetFile, literal_file
from gpt.checkpoint.logical_tensor import TOKENIZER_FILE_SUFFIXES, find_tokenizer
from gpt.errors import CheckpointError

# Names of the files that are copied from a tokenizer's directory.
TOKENIZER_PATTERNS = (
    "*tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "null.json",
    "*vocab.json",
    "*merges.txt",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template.json",
    "generation_config.json",  # Its end-of-text ids are the model's stop tokens.
)
# Files beside a tokenizer's file that `open_tokenizer` and the chat template need too.
COMPANION_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
TOKENIZER_BYTES_MAX = 256 << 20
# Tokenizer directory by format, relative to the directory with the weights. In the formats that are
# not listed, the tokenizer files are in the directory with the weights.
TOKENIZER_FOLDERS = {"native": "tokenizer", "megatron": "tokenizer", "torch_dist": "tokenizer"}


def plan_tokenizer_files(tokenizer: Path, layout: Layout) -> list[TargetFile]:
    """Plan the tokenizer's files as files of `layout`."""
    if not (tokenizer.is_dir() or tokenizer.is_file()):
        problem = "is neither a file nor a directory" if tokenizer.exists() else "does not exist"
        raise CheckpointError(
            f"the tokenizer {tokenizer} {problem}; give an existing file or directory with "
            "--tokenizer"
        )
    parents = [layout.folder, TOKENIZER_FOLDERS.get(layout.format, "")]
    folder = "".join(f"{parent}/" for parent in parents if parent)
    sources = _source_files(tokenizer)
    return [literal_file(f"{folder}{file.name}", read_tokenizer_file(file)) for file in sources]


def _source_files(tokenizer: Path) -> list[Path]:
    """Return the files of a tokenizer; refuse an incomplete tokenizer."""
    files = [tokenizer]
    if tokenizer.is_dir():
        files = [
            file
            for file in sorted(tokenizer.iterdir())
            if any(fnmatch(file.name, name) for name in TOKENIZER_PATTERNS) and file.is_file()
        ]
        if find_tokenizer(tokenizer) is None and not any(map(_is_tiktoken, files)):
            raise CheckpointError(
                f"the tokenizer directory {tokenizer} has no file whose name ends in "
                f"{', '.join(TOKENIZER_FILE_SUFFIXES)}; give another tokenizer with --tokenizer"
            )
    merges_files = [
        file.with_name(file.name.replace("vocab.json", "merges.txt"))
        for file in files
        if file.name.endswith("vocab.json")
    ]
    is_self_contained = any(
        file.name == "tokenizer.json" or file.suffix == ".model" for file in files
    )
    merges_present = list(tokenizer.glob("*merges.txt")) if tokenizer.is_dir() else []
    for file in merges_files:
        if not (is_self_contained or merges_present or file.is_file()):
            raise CheckpointError(
                f"the tokenizer {tokenizer} has no {file.name} beside its vocab.json; copy both "
                "BPE files, or give another tokenizer with --tokenizer"
            )
    if tokenizer.is_dir():
        return files
    companions = [tokenizer.with_name(name) for name in COMPANION_FILES]
    return [*files, *merges_files, *(file for file in companions if file.is_file())]


def _is_tiktoken(file: Path) -> bool:
    """Tell whether a file is a tiktoken vocabulary.

    Such a file is copied for other programs; Preamble cannot read it.
    """
    return file.suffix == ".tiktoken"


def read_tokenizer_file(file: Path) -> bytes:
    """Read a file of a tokenizer; refuse a file that is too large to be one."""
    try:
        size = file.stat().st_size
        if size <= TOKENIZER_BYTES_MAX:
            return file.read_bytes()
    except OSError as error:
        raise CheckpointError(
            f"the tokenizer file {error.filename} cannot be read ({error.strerror}); copy it "
            "again, or give another tokenizer with --tokenizer"
        ) from None
    raise CheckpointError(
        f"the tokenizer file {file} has {size:,} bytes, which is too large for a tokenizer "
        f"file (at most {TOKENIZER_BYTES_MAX:,}); give --tokenizer a path that contains only "
        "the tokenizer"
    )
