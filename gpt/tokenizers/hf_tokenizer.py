"""A tokenizer of the `tokenizers` library: one JSON file, or GPT-2's vocabulary and merges.

Encoding is the library's. Decoding is ours (`gpt/tokenizers/detokenizer.py`), so the file's decoder
is read as one of a few known ways, and refused by name if it is another. The library would turn
"</s>" in a user's text into the control token in two ways; both are off unless `special=True`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import tokenizers

from gpt.errors import CheckpointError
from gpt.tokenizers.detokenizer import BYTEWISE, MARK, Decoding, Joining, Piece
from gpt.tokenizers.special_tokens import BEGIN, END, Control, Named, checked, spelled, stop_ids

# How the pieces of a tokenizer.json are written. "letters": GPT-2's letter for each byte. "marks":
# spaces as marks. "fallback": so, and tokens named <0x..> are bytes. "words": spaces in between.
Style = Literal["letters", "marks", "fallback", "words"]


class JsonTokenizer(Decoding):
    """What the library keeps in one JSON file; GPT-2 BPE is read as one such."""

    def __init__(self, record: dict[str, Any], where: Path, kind: str, named: Named) -> None:
        super().__init__()
        self.kind = kind
        library = _library(record, where)
        self._style, self.joining = _joining(record.get("decoder"), where)
        tokens = record.get("added_tokens") or []
        ordinary = [t for t in tokens if t["content"] in named.special and not t["special"]]
        for token in ordinary:  # The files beside it know better.
            token["special"] = True
        library = _library(record, where) if ordinary else library
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        self._libraries = {(False, False): library}  # By (special, started).
        added = library.get_added_tokens_decoder().items()
        self._hidden = {i for i, token in added if token.special}
        self.controls: Mapping[str, Control] = {
            token.content: Control(i, token.special, token.lstrip, token.rstrip)
            for i, token in added
            if token.content.strip()  # Runs of spaces are added by some, and are only text.
        }
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        begin, end = ((named.bos,), (named.eos,)) if named.bos or named.eos else (BEGIN, END)
        ends = (vocabulary[text] for text in end if text in vocabulary)
        self.stop_ids = stop_ids(next(ends, None), named)
        self.eos_id = next(iter(self.stop_ids), None)
        begins = (vocabulary[text] for text in begin if text in vocabulary)
        self.bos_id = next(begins, named.bos_id)
        first = library.encode("a", add_special_tokens=True).ids[:1]
        adds_bos = first == [self.bos_id] if named.adds_bos is None else named.adds_bos
        self.adds_bos = adds_bos and self.bos_id is not None
        # Text can be unknown; that is no control. BPE names the token, Unigram its number.
        model = record["model"]
        unknown = {model.get("unk_id"), vocabulary.get(model.get("unk_token"))}
        guarded = self._hidden - (unknown - {self.bos_id, self.eos_id})
        self._guarded = {i: token for token, i in vocabulary.items() if i in guarded}

    def _with(self, special: bool, started: bool) -> tokenizers.Tokenizer:
        if (special, started) not in self._libraries:
            # The library keeps such options in the object, so each pair of them has its own.
            record = json.loads(self._libraries[False, False].to_str())
            if started:
                for part in ("normalizer", "pre_tokenizer"):
                    record[part] = _without_prefix(record[part])
            library = tokenizers.Tokenizer.from_str(json.dumps(record))
            library.encode_special_tokens = not special
            self._libraries[special, started] = library
        return self._libraries[special, started]

    def encode(self, text: str, *, special: bool = False, started: bool = False) -> list[int]:
        library = self._with(special, started)
        ids: list[int] = library.encode(checked(text), add_special_tokens=False).ids
        if special or self._guarded.keys().isdisjoint(ids):
            return ids
        inside = self._with(special=False, started=True)
        return spelled(
            ids, self._guarded, lambda letter: inside.encode(letter, add_special_tokens=False).ids
        )

    def spelling(self, token_id: int) -> str:
        known = 0 <= token_id < self.vocab_size
        return self._libraries[False, False].id_to_token(token_id) or "" if known else ""

    def _look_up(self, token_id: int) -> Piece:
        known = 0 <= token_id < self.vocab_size and token_id not in self._hidden
        token: str | None = self._libraries[False, False].id_to_token(token_id) if known else None
        if token is None:
            return None
        if self._style == "letters":
            if all(letter in _BYTES for letter in token):
                return bytes(_BYTES[letter] for letter in token)
            return token.encode()  # An added token is written as itself.
        if self._style == "fallback" and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self._style == "words":
            return " " + token
        return token if self.joining.marked else token.replace(MARK, " ")


def _library(record: Mapping[str, Any], where: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(record))
    except Exception as error:  # The library raises bare Exceptions, whatever is wrong.
        raise CheckpointError(
            f"{where} is not a tokenizer that can be read ({error}); copy it again from the "
            "model's source"
        ) from None


def _byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: printable ones are themselves, the others follow U+0100."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _byte_letters()
_MARKS_TO_SPACES = {"type": "Replace", "pattern": {"String": MARK}, "content": " "}
_STRIP_ONE = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _joining(decoder: Any, where: Path) -> tuple[Style, Joining]:
    """What the `decoder` of a tokenizer.json means for pieces; what is not known is refused."""
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    kinds = [step.get("type") for step in steps]
    if not steps:
        return "words", Joining("text")
    if kinds == ["ByteLevel"]:
        return "letters", Joining("keep")
    if kinds == ["Metaspace"] and steps[0].get("replacement") == MARK:
        scheme = steps[0].get("prepend_scheme", "always")
        never = scheme == "never" or steps[0].get("add_prefix_space") is False
        return "marks", Joining("keep" if never else "token")
    stripped = steps[-1] == _STRIP_ONE
    middle = kinds[1 : -1 if stripped else None]
    if steps[0] == _MARKS_TO_SPACES and middle in (["Fuse"], ["ByteFallback", "Fuse"]):
        # The library replaces a whole run of byte tokens if any of it is wrong. That cannot be
        # streamed, so here, as in sentencepiece itself, only the wrong bytes are replaced.
        style: Style = "fallback" if "ByteFallback" in kinds else "marks"
        return style, Joining("text" if stripped else "keep", BYTEWISE)
    raise CheckpointError(
        f"{where} decodes by {' + '.join(map(str, kinds))}; known are ByteLevel, Metaspace and "
        "sentencepiece's Replace + ByteFallback + Fuse + Strip: give the model's sentencepiece "
        "file or vocab.json and merges.txt instead"
    )


def _without_prefix(part: Any) -> Any:
    """A normalizer or pre-tokenizer that puts no space before the text."""
    if not isinstance(part, dict):
        return None
    match part["type"]:
        case "Prepend":
            return None
        case "Metaspace":
            return {**part, "prepend_scheme": "never", "add_prefix_space": False}
        case "ByteLevel":
            return {**part, "add_prefix_space": False}
        case "Sequence":
            key = "normalizers" if "normalizers" in part else "pretokenizers"
            steps = [_without_prefix(step) for step in part[key]]
            return {**part, key: [step for step in steps if step is not None]}
    return part


def gpt2_tokenizer(vocabulary: Path, merges: Path, named: Named) -> JsonTokenizer:
    try:
        bpe = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # The library raises bare Exceptions, whatever is wrong.
        raise CheckpointError(
            f"{vocabulary} and {merges.name} are not a BPE vocabulary and its merges ({error}); "
            "copy both again from the same source"
        ) from None
    library = tokenizers.Tokenizer(bpe)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    special = {END[0], *named.special}  # Only those in the vocabulary: no id may be added.
    library.add_special_tokens([t for t in sorted(special) if library.token_to_id(t) is not None])
    # Megatron and NeMo begin and end texts with the same token, where nothing says otherwise.
    named = replace(named, bos=named.bos or END[0], eos=named.eos or END[0])
    return JsonTokenizer(json.loads(library.to_str()), vocabulary, "gpt2", named)
