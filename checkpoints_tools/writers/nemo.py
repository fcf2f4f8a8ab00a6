"""NeMo 1 `.nemo` writer: plans one tar of the config, tokenizer files and every rank's weights.

The tar has one `torch.save` archive per rank. The archive has the rank's tensors as in Megatron's
format, and each tensor name has NeMo's prefix. NeMo's config refers to the tokenizer if it can; all
other files of the tokenizer are in a folder that only Preamble reads. The names of the files for
NeMo are derived from their content, so two conversions of a model write the same bytes. The output
was not tested with NeMo itself.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from checkpoints_tools.layout.layout import Layout, ParallelSplit, stored_vocab_rows
from checkpoints_tools.layout.tar import NAME_BYTES_MAX, TarLayout
from checkpoints_tools.layout.tokenizer_files import plan_tokenizer_files
from checkpoints_tools.writers.megatron import rank_state_dicts
from checkpoints_tools.writers.nemo_config import check_supported, load_notes, model_config
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import CheckpointError
from gpt.formats.megatron.rank_files import RankCoordinates
from gpt.formats.nemo.archive import CONFIG_FILE
from gpt.formats.nemo.reader import (
    BPE_FILES,
    CARRIED_TOKENIZER_FOLDER,
    SENTENCEPIECE_FILES,
    WEIGHTS_FILE,
)
from gpt.parallel.vocabulary_padding import VOCABULARY_MULTIPLE
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer

FORMAT, NEMO_FILE = "nemo", "model.nemo"
TENSOR_PREFIX = "model."  # NeMo stores the Megatron model in its attribute `model`.
UNTESTED_NOTE = (
    "--to nemo was tested only with Preamble's reader, not with NeMo; if you can load "
    "megatron-dist, prefer --to megatron-dist"
)


@dataclass(frozen=True)
class _TokenizerBundle:
    """The tokenizer section of the config, and the tokenizer files by member name."""

    section: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    vocab_size: int = 0  # 0: unknown.
    notes: tuple[str, ...] = ()
    # All files of the tokenizer, if `files` does not contain all of them. Preamble's reader prefers
    # these, and NeMo ignores them.
    preamble_files: dict[str, bytes] = field(default_factory=dict)


def plan_layout(
    checkpoint: Checkpoint,
    split: ParallelSplit,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
) -> Layout:
    """Plan the target's files; `checkpoint` already has the target's dtype."""
    config = checkpoint.config
    check_supported(config, split)
    tokenizer = _bundle_tokenizer(checkpoint.tokenizer)
    model_section = model_config(
        config,
        split,
        vocabulary_multiple=vocabulary_multiple,
        tokenizer=tokenizer.section,
        tokenizer_vocab_size=tokenizer.vocab_size,
    )
    tar = TarLayout()
    tar.add_bytes(f"./{CONFIG_FILE}", yaml.safe_dump(model_section).encode())
    for name, content in tokenizer.files.items():
        tar.add_bytes(f"./{name}", content)
    for name, content in tokenizer.preamble_files.items():
        tar.add_bytes(f"./{CARRIED_TOKENIZER_FOLDER}/{name}", content)
    vocab_rows = stored_vocab_rows(config, split.tp, vocabulary_multiple)
    for rank, (state_dict,) in rank_state_dicts(checkpoint, split, vocab_rows):
        weights = {
            f"{TENSOR_PREFIX}{name}": placeholder for name, placeholder in state_dict.items()
        }
        tar.add_torch_archive(f"./{_rank_folder(rank, split)}{WEIGHTS_FILE}", weights)
    layout_notes = (UNTESTED_NOTE, *load_notes(config, split), *tokenizer.notes)
    return Layout(
        FORMAT,
        (tar.finish(NEMO_FILE),),
        notes=layout_notes,
        padded_vocab_size=vocab_rows,
        includes_tokenizer=True,
        is_single_file=True,
    )


def _rank_folder(rank: RankCoordinates, split: ParallelSplit) -> str:
    if split.pp > 1:
        return f"tp_rank_{rank.tensor:02}_pp_rank_{rank.stage:03}/"
    return f"mp_rank_{rank.tensor:02}/" if split.tp > 1 else ""


def _bundle_tokenizer(tokenizer: Path | None) -> _TokenizerBundle:
    """Bundle a SentencePiece model, or GPT-2's vocab.json and merges.txt.

    NeMo's config cannot refer to any other tokenizer, and a note says so. Other files of the
    tokenizer are stored too, so that a conversion to another format finds them.
    """
    section: dict[str, Any] = dict.fromkeys(("library", "type", *SENTENCEPIECE_FILES, *BPE_FILES))
    if tokenizer is None:
        return _TokenizerBundle(section)
    files = {
        file.path: b"".join(literal.content for literal in file.literals)
        for file in plan_tokenizer_files(tokenizer, Layout(FORMAT, ()))
    }
    names_fit = all(map(_fits_member_name, files))
    opened_tokenizer = _try_open(tokenizer)
    models = [name for name in files if name.endswith(".model")]
    sentencepiece = _try_open(tokenizer, "sentencepiece") if len(models) == 1 else None
    if sentencepiece and opened_tokenizer and _same_tokens(sentencepiece, opened_tokenizer):
        section |= {"library": "sentencepiece", "sentencepiece_legacy": False}
        chosen_files = {"model": models[0]}
    elif opened_tokenizer and opened_tokenizer.kind == "gpt2":
        section |= {"library": "megatron", "type": "GPT2BPETokenizer"}
        chosen_files = {
            key: next(name for name in files if name.endswith(suffix))
            for key, suffix in BPE_FILES.items()
        }
    else:
        reason = (
            f"{tokenizer} cannot be opened"
            if opened_tokenizer is None
            else "a .nemo can contain only a SentencePiece model or GPT-2's vocab.json and "
            f"merges.txt, and {tokenizer} is equivalent to neither"
        )
        note = (
            f"NeMo finds no tokenizer in the target, because {reason}; set model.tokenizer in NeMo "
            "when it loads the target"
        )
        return _TokenizerBundle(section, notes=(note,), preamble_files=files if names_fit else {})
    artifacts = {key: _artifact_name(name, files[name]) for key, name in chosen_files.items()}
    section |= {key: f"nemo:{artifact}" for key, artifact in artifacts.items()}
    bundled_files = {artifacts[key]: files[name] for key, name in chosen_files.items()}
    bos_notes = ("prompts of this model begin with a BOS token, which NeMo's config cannot record",)
    return _TokenizerBundle(
        section,
        bundled_files,
        opened_tokenizer.vocab_size,
        bos_notes if opened_tokenizer.adds_bos else (),
        files if names_fit and len(files) > len(chosen_files) else {},
    )


def _fits_member_name(name: str) -> bool:
    return name.isascii() and len(f"./{CARRIED_TOKENIZER_FOLDER}/{name}") <= NAME_BYTES_MAX


def _try_open(tokenizer: Path, kind: str | None = None) -> Tokenizer | None:
    try:
        return open_tokenizer(tokenizer, kind=kind)
    except CheckpointError:
        return None


def _same_tokens(sentencepiece: Tokenizer, reference: Tokenizer) -> bool:
    """Tell whether a SentencePiece model has the same tokens as `reference`, the tokenizer in use.

    If `reference` is SentencePiece too, both are the same file. Otherwise, `reference` is usually a
    tokenizer.json that was made from the SentencePiece model, and may have additional tokens.
    Special tokens are not compared, because `token_bytes` returns None for them.
    """
    if reference.kind == sentencepiece.kind:
        return True
    if reference.vocab_size != sentencepiece.vocab_size:
        return False
    pairs = (
        (sentencepiece.token_bytes(i), reference.token_bytes(i))
        for i in range(reference.vocab_size)
    )
    return all(left == right for left, right in pairs if left is not None and right is not None)


def _artifact_name(name: str, content: bytes) -> str:
    """Return the member name of a tokenizer file: a hash of its content, then its file name.

    NeMo itself uses a random prefix instead of the hash. A name that is too long or not ASCII is
    replaced by `tokenizer` and the file's suffix.
    """
    prefix = hashlib.sha256(content).hexdigest()[:32]
    name_bytes_max = NAME_BYTES_MAX - len(f"./{prefix}_")
    base_name = (
        name if name.isascii() and len(name) <= name_bytes_max else f"tokenizer{Path(name).suffix}"
    )
    return f"{prefix}_{base_name}"
