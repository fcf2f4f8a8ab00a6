"""NeMo 1's `.nemo`, planned: one tar of a config, the tokenizer's files, and every rank's weights.

Ranks hold what Megatron's do, under a prefix of NeMo's, and are archives of `torch.save` inside the
tar. The tokenizer goes along if the config has a way to refer to it; artifacts are named by their
own content, so that the same model gives the same bytes. No NeMo was there to try it.
"""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from checkpoints_tools.layout.layout import VOCABULARY_MULTIPLE, Division, Layout, padded_vocabulary
from checkpoints_tools.layout.tar import NAME_BYTES_MAX, Tar
from checkpoints_tools.layout.tokenizer_files import tokenizer_files
from checkpoints_tools.writers.megatron import rank_models
from checkpoints_tools.writers.nemo_config import check, model_config, notes
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import CheckpointError
from gpt.formats.megatron.rank_files import Place
from gpt.formats.nemo.archive import CONFIG
from gpt.formats.nemo.reader import BPE, SENTENCEPIECE, WEIGHTS
from gpt.tokenizers.tokenizer import Tokenizer, open_tokenizer

FORMAT, FILE = "nemo", "model.nemo"
PREFIX = "model."  # Of tensors, where NeMo's own model is an attribute.
UNTRIED = (
    "no NeMo was at hand to load it: it was read back by Preamble only; where another format will "
    "do, prefer --to megatron-dist"
)


@dataclass(frozen=True)
class _Words:
    """The tokenizer as the config has it, and its files by the names of members."""

    section: dict[str, Any]
    files: dict[str, bytes] = field(default_factory=dict)
    tokens: int = 0
    notes: tuple[str, ...] = ()


def layout(
    checkpoint: Checkpoint,
    division: Division,
    *,
    vocabulary_multiple: int = VOCABULARY_MULTIPLE,
) -> Layout:
    """`checkpoint` is in the dtype that is to be stored."""
    config = checkpoint.config
    check(config, division)
    words = _words(checkpoint.tokenizer)
    record = model_config(
        config,
        division,
        vocabulary_multiple=vocabulary_multiple,
        tokenizer=words.section,
        tokens=words.tokens,
    )
    tar = Tar()
    tar.text(f"./{CONFIG}", yaml.safe_dump(record).encode())
    for name, content in words.files.items():
        tar.text(f"./{name}", content)
    rows = padded_vocabulary(config, division.tp, vocabulary_multiple)
    for place, (model,) in rank_models(checkpoint, division, rows):
        weights = {f"{PREFIX}{name}": promise for name, promise in model.items()}
        tar.archive(f"./{_folder(place, division)}{WEIGHTS}", weights)
    said = (UNTRIED, *notes(config, division), *words.notes)
    return Layout(FORMAT, (tar.close(FILE),), notes=said, vocabulary_rows=rows, alone=True)


def _folder(place: Place, division: Division) -> str:
    if division.pp > 1:
        return f"tp_rank_{place.tensor:02}_pp_rank_{place.stage:03}/"
    return f"mp_rank_{place.tensor:02}/" if division.tp > 1 else ""


def _words(tokenizer: Path | None) -> _Words:
    """Sentencepiece models and GPT-2's two files can be referred to; others stay outside."""
    section: dict[str, Any] = dict.fromkeys(("library", "type", *SENTENCEPIECE, *BPE))
    if tokenizer is None:
        return _Words(section)
    files = {
        file.path: b"".join(text.content for text in file.texts)
        for file in tokenizer_files(tokenizer, Layout(FORMAT, ()))
    }
    found = _opened(tokenizer)
    models = [name for name in files if name.endswith(".model")]
    pieces = _opened(tokenizer, "sentencepiece") if len(models) == 1 else None
    if pieces and found and _same_tokens(pieces, found):
        section |= {"library": "sentencepiece", "sentencepiece_legacy": False}
        chosen = {"model": models[0]}
    elif found and found.kind == "gpt2":
        section |= {"library": "megatron", "type": "GPT2BPETokenizer"}
        chosen = {
            key: next(name for name in files if name.endswith(ending))
            for key, ending in BPE.items()
        }
    else:
        note = (
            f"the tokenizer {tokenizer} is of a kind that a .nemo cannot refer to, so it is not "
            "inside: keep it beside, and name it to NeMo in model.tokenizer"
        )
        return _Words(section, notes=(note,))
    artifacts = {key: _artifact(name, files[name]) for key, name in chosen.items()}
    section |= {key: f"nemo:{artifact}" for key, artifact in artifacts.items()}
    inside = {artifacts[key]: files[name] for key, name in chosen.items()}
    lost = (
        "prompts of this model begin with a token of their own (BOS), which a .nemo cannot say",
    )
    return _Words(section, inside, found.vocab_size, lost if found.adds_bos else ())


def _opened(tokenizer: Path, kind: str | None = None) -> Tokenizer | None:
    try:
        return open_tokenizer(tokenizer, kind=kind)
    except CheckpointError:
        return None


def _same_tokens(model: Tokenizer, found: Tokenizer) -> bool:
    """Whether a sentencepiece model stands for the tokenizer.json beside it, token by token.

    Tokens may have been added to that later, and what one hides, the other may show.
    """
    if found.kind == model.kind or found.vocab_size != model.vocab_size:
        return found.kind == model.kind
    pairs = ((model.token_bytes(i), found.token_bytes(i)) for i in range(found.vocab_size))
    return all(left == right for left, right in pairs if left is not None and right is not None)


def _artifact(name: str, content: bytes) -> str:
    """NeMo draws a prefix at random; one from the content is as good, and always the same."""
    prefix = hashlib.sha256(content).hexdigest()[:32]
    room = NAME_BYTES_MAX - len(f"./{prefix}_")
    plain = name if name.isascii() and len(name) <= room else f"tokenizer{Path(name).suffix}"
    return f"{prefix}_{plain}"
