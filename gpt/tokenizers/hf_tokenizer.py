"""Hugging Face tokenizer: tokenizer.json, or GPT-2's vocab.json and merges.txt.

The `tokenizers` library encodes, and `gpt/tokenizers/detokenizer.py` decodes. The detokenizer
supports only some decoders of tokenizer.json, so other decoders are refused. The library could
encode "</s>" in user text as the control token in two ways, as a special token or by BPE merges;
both are prevented unless `allow_special=True`.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import tokenizers

from gpt.errors import CheckpointError
from gpt.tokenizers.detokenizer import (
    BYTEWISE_ERRORS,
    SPACE_MARK,
    DecodingRules,
    LeadingSpace,
    Piece,
    TokenizerBase,
)
from gpt.tokenizers.special_tokens import (
    BOS_CANDIDATES,
    EOS_CANDIDATES,
    ControlToken,
    DeclaredToken,
    SpecialTokens,
    check_unicode,
    collect_stop_ids,
    spell_out_guarded,
)

# How tokenizer.json writes pieces.
# "letters": one letter per byte, as in GPT-2.
# "marks": a space mark for each space.
# "fallback": like "marks", and a token <0x..> is a byte.
# "words": words; decoding joins them with spaces.
PieceStyle = Literal["letters", "marks", "fallback", "words"]


class HFTokenizer(TokenizerBase):
    """Tokenizer of a tokenizer.json; GPT-2's two files are first converted to a tokenizer.json."""

    def __init__(
        self, record: dict[str, Any], source: Path, kind: str, special_tokens: SpecialTokens
    ) -> None:
        super().__init__()
        self.kind = kind
        library = _parse_library(record, source)
        steps, self._replaced_texts = _split_replacement(record.get("decoder"))
        self._piece_style, rules = _parse_decoder(steps, source)
        if self._replaced_texts and rules.leading_space == "text":
            rules = replace(rules, leading_space="mark")  # No space of the token's text is removed.
        self.decoding_rules = rules
        added_tokens = record.get("added_tokens") or []
        # Config files beside tokenizer.json may declare more tokens, and more tokens as special.
        tokens_to_mark = [
            t for t in added_tokens if t["content"] in special_tokens.special and not t["special"]
        ]
        for token in tokens_to_mark:
            token["special"] = True
        if tokens_to_mark:
            library = _parse_library(record, source)
        _add_declared_tokens(library, special_tokens)
        library.no_truncation()
        library.no_padding()
        library.encode_special_tokens = True
        self._libraries = {(False, False): library}  # Keys: (allow_special, continues_text).
        added_by_id = library.get_added_tokens_decoder().items()
        self._special_ids = {i for i, token in added_by_id if token.special}
        self.control_tokens: Mapping[str, ControlToken] = {
            token.content: ControlToken(i, token.special, token.lstrip, token.rstrip)
            for i, token in added_by_id
            if token.content.strip()  # Added tokens of only spaces are not control tokens.
        }
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        bos_names, eos_names = (
            ((special_tokens.bos,), (special_tokens.eos,))
            if special_tokens.bos or special_tokens.eos
            else (BOS_CANDIDATES, EOS_CANDIDATES)
        )
        eos_ids = (vocabulary[text] for text in eos_names if text in vocabulary)
        self.stop_ids = collect_stop_ids(next(eos_ids, None), special_tokens)
        self.eos_id = next(iter(self.stop_ids), None)
        bos_ids = (vocabulary[text] for text in bos_names if text in vocabulary)
        self.bos_id = next(bos_ids, special_tokens.bos_id_below(self.vocab_size))
        self.prefix_ids, self.suffix_ids = _post_processor_ids(library)
        if special_tokens.adds_bos is not None:
            bos_id = self.bos_id if special_tokens.adds_bos else None
            self.prefix_ids = () if bos_id is None else (bos_id,)
        if special_tokens.adds_eos is False:
            self.suffix_ids = ()
        elif special_tokens.adds_eos and self.eos_id is not None and kind == "gpt2":
            self.suffix_ids = (self.eos_id,)  # transformers ignores it beside a tokenizer.json.
        self.adds_bos = self.bos_id is not None and self.prefix_ids[:1] == (self.bos_id,)
        # The unknown token is allowed in user text, unless it is also BOS or EOS. tokenizer.json
        # records the token's text for a BPE model, and the token's id for a Unigram model.
        model = record["model"]
        unknown_ids = {model.get("unk_id"), vocabulary.get(model.get("unk_token"))}
        guarded_ids = self._special_ids - (unknown_ids - {self.bos_id, self.eos_id})
        self._guarded_tokens = {i: token for token, i in vocabulary.items() if i in guarded_ids}

    def _library_variant(self, allow_special: bool, continues_text: bool) -> tokenizers.Tokenizer:
        if (allow_special, continues_text) not in self._libraries:
            # A library object stores its options, so each combination of options needs an object.
            record = json.loads(self._libraries[False, False].to_str())
            if continues_text:
                for component in ("normalizer", "pre_tokenizer"):
                    record[component] = _without_space_prefix(record[component])
            library = tokenizers.Tokenizer.from_str(json.dumps(record))
            library.encode_special_tokens = not allow_special
            self._libraries[allow_special, continues_text] = library
        return self._libraries[allow_special, continues_text]

    def copy_library(self) -> tokenizers.Tokenizer:
        """Return a tokenizer of the library that parses control tokens in texts."""
        return tokenizers.Tokenizer.from_str(self._libraries[False, False].to_str())

    def encode(
        self, text: str, *, allow_special: bool = False, continues_text: bool = False
    ) -> list[int]:
        library = self._library_variant(allow_special, continues_text)
        ids: list[int] = library.encode(check_unicode(text), add_special_tokens=False).ids
        if allow_special or self._guarded_tokens.keys().isdisjoint(ids):
            return ids
        continuation_library = self._library_variant(allow_special=False, continues_text=True)
        return spell_out_guarded(
            ids,
            self._guarded_tokens,
            lambda letter: continuation_library.encode(letter, add_special_tokens=False).ids,
        )

    def id_to_token(self, token_id: int) -> str:
        if not 0 <= token_id < self.vocab_size:
            return ""
        token: str | None = self._libraries[False, False].id_to_token(token_id)
        return token or ""

    def _decode_piece(self, token_id: int) -> Piece:
        is_text = 0 <= token_id < self.vocab_size and token_id not in self._special_ids
        token: str | None = self._libraries[False, False].id_to_token(token_id) if is_text else None
        if token is None:
            return None
        if token in self._replaced_texts:
            return self._replaced_texts[token]
        if self._piece_style == "letters":
            if all(letter in _BYTE_OF_LETTER for letter in token):
                return bytes(_BYTE_OF_LETTER[letter] for letter in token)
            return token.encode()  # The text of an added token is not written as byte letters.
        if self._piece_style == "fallback" and re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        if self._piece_style == "words":
            return " " + token
        return token if self.decoding_rules.keeps_space_marks else token.replace(SPACE_MARK, " ")


def _add_declared_tokens(library: tokenizers.Tokenizer, special_tokens: SpecialTokens) -> None:
    """Add the tokens that config files declare and tokenizer.json lacks, as transformers does.

    A token that would get another id than the declared one is left out: a token without an id in
    the files has no row in the model.
    """
    added_texts = {token.content for token in library.get_added_tokens_decoder().values()}
    next_id = max(library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    tokens: list[tokenizers.AddedToken] = []
    for token in special_tokens.declared:
        is_new = library.token_to_id(token.content) is None
        if token.content in added_texts or (is_new and token.id != next_id):
            continue
        next_id += is_new
        tokens.append(
            tokenizers.AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized,
                special=token.special,
            )
        )
    library.add_tokens(tokens)


def _post_processor_ids(library: tokenizers.Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ids that the post-processor adds before and after a text, such as BOS and EOS."""
    text_ids = library.encode("a", add_special_tokens=False).ids
    ids = library.encode("a", add_special_tokens=True).ids
    for start in range(len(ids) - len(text_ids) + 1):
        end = start + len(text_ids)
        if ids[start:end] == text_ids:
            return tuple(ids[:start]), tuple(ids[end:])
    return (), ()


def _parse_library(record: Mapping[str, Any], source: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(record))
    except Exception as error:  # The library raises the class Exception for all errors.
        raise CheckpointError(
            f"{source} is not a readable tokenizer ({error}); copy it again from the model's source"
        ) from None


def _byte_letters() -> dict[str, int]:
    """Return the byte of each GPT-2 letter.

    The letter of a printable byte is the character with the same code. The other bytes have the
    letters from U+0100 on.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(unprintable)}


_BYTE_OF_LETTER = _byte_letters()
ALL_SPACES = 1 << 20  # `Strip` with this number removes all leading spaces of any text.
_MARKS_TO_SPACES = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}


def _split_replacement(decoder: Any) -> tuple[list[Any], dict[str, str]]:
    """Return the inner steps of a `decoder`, and the text that its outer steps replace, by token.

    Our export of a sentencepiece model replaces the unknown token by a mark in the first step, and
    the mark by the unknown token's text in the last step. For other decoders the mapping is empty.
    """
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    if len(steps) < 3 or steps[0].get("type") != "Replace" or steps[-1].get("type") != "Replace":
        return steps, {}
    token = steps[0]["pattern"].get("String")
    if token is None or steps[-1]["pattern"].get("String") != steps[0]["content"]:
        return steps, {}
    return steps[1:-1], {token: steps[-1]["content"]}


def _parse_decoder(steps: list[Any], source: Path) -> tuple[PieceStyle, DecodingRules]:
    """Convert the decoder of a tokenizer.json to decoding rules; refuse unsupported decoders."""
    step_types = [step.get("type") for step in steps]
    if not steps:
        return "words", DecodingRules("text")
    if step_types == ["ByteLevel"]:
        return "letters", DecodingRules("keep")
    if step_types == ["Metaspace"] and steps[0].get("replacement") == SPACE_MARK:
        scheme = steps[0].get("prepend_scheme", "always")
        keeps_space = scheme == "never" or steps[0].get("add_prefix_space") is False
        return "marks", DecodingRules("keep" if keeps_space else "token")
    leading_space: LeadingSpace = "keep"
    last_step = {**steps[-1], "start": min(steps[-1].get("start", 0), ALL_SPACES)}
    if last_step == {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
        leading_space = "text"
    elif last_step == {"type": "Strip", "content": " ", "start": ALL_SPACES, "stop": 0}:
        leading_space = "marks"
    middle_types = step_types[1 : -1 if leading_space != "keep" else None]
    if steps[0] == _MARKS_TO_SPACES and middle_types in (["Fuse"], ["ByteFallback", "Fuse"]):
        # If one byte is invalid, the library replaces the bytes of all adjacent byte tokens. A
        # stream may have returned the earlier bytes already. Therefore the detokenizer replaces
        # only invalid bytes, as sentencepiece does.
        style: PieceStyle = "fallback" if "ByteFallback" in step_types else "marks"
        return style, DecodingRules(leading_space, BYTEWISE_ERRORS)
    raise CheckpointError(
        f"{source} has the decoder {' + '.join(map(str, step_types))}; supported decoders are "
        "ByteLevel, Metaspace and sentencepiece's Replace + ByteFallback + Fuse + Strip: give the "
        "model's sentencepiece file or vocab.json and merges.txt instead"
    )


def _without_space_prefix(component: Any) -> Any:
    """Return a normalizer or pre-tokenizer without the rule that adds a leading space."""
    if not isinstance(component, dict):
        return None
    match component["type"]:
        case "Prepend":
            return None
        case "Metaspace":
            return {**component, "prepend_scheme": "never", "add_prefix_space": False}
        case "ByteLevel":
            return {**component, "add_prefix_space": False}
        case "Sequence":
            key = "normalizers" if "normalizers" in component else "pretokenizers"
            steps = [_without_space_prefix(step) for step in component[key]]
            return {**component, key: [step for step in steps if step is not None]}
    return component


def gpt2_tokenizer(vocabulary: Path, merges: Path, special_tokens: SpecialTokens) -> HFTokenizer:
    try:
        bpe = tokenizers.models.BPE.from_file(str(vocabulary), str(merges))
    except Exception as error:  # The library raises the class Exception for all errors.
        raise CheckpointError(
            f"{vocabulary} and {merges.name} are not a BPE vocabulary and its merges ({error}); "
            "copy both again from the same source"
        ) from None
    library = tokenizers.Tokenizer(bpe)
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    # As in Megatron and NeMo, <|endoftext|> is both BOS and EOS by default, and always special.
    end_of_text = EOS_CANDIDATES[0]
    declared = special_tokens.declared
    if end_of_text not in special_tokens.special:
        other_tokens = (token for token in declared if token.content != end_of_text)
        declared = (*other_tokens, DeclaredToken(end_of_text))
    special_tokens = replace(
        special_tokens,
        bos=special_tokens.bos or end_of_text,
        eos=special_tokens.eos or end_of_text,
        declared=declared,
    )
    return HFTokenizer(json.loads(library.to_str()), vocabulary, "gpt2", special_tokens)
