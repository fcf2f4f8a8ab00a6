"""SentencePiece export: writes a sentencepiece model as a tokenizer of the `tokenizers` library.

The exported tokenizer gives the ids of `SentencePieceTokenizer`. BPE models become BPE with one
merge per way to join two pieces, in the order of the scores; Unigram models stay Unigram. A model
whose text normalization or vocabulary the library cannot reproduce exactly is refused. The caller
compares the encodings of both tokenizers.
"""

from collections.abc import Iterator

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from checkpoints_tools.layout.tokenizer_files import read_tokenizer_file
from checkpoints_tools.writers.sentencepiece_file import (
    PieceType,
    SentencePieceAlgorithm,
    SentencePieceFile,
    parse_sentencepiece_file,
)
from gpt.errors import CheckpointError
from gpt.tokenizers.detokenizer import SPACE_MARK
from gpt.tokenizers.hf_tokenizer import ALL_SPACES
from gpt.tokenizers.sentencepiece_tokenizer import SentencePieceTokenizer
from gpt.tokenizers.special_tokens import trie_pattern

# Stands for the unknown token while leading spaces are removed. Unicode reserves this character, so
# the pieces of a vocabulary do not contain it.
UNKNOWN_MARK = "\ufdd0"
# A text like the byte piece "<0x41>" is split after "<", because the library would match the byte
# piece, and sentencepiece does not.
BYTE_PIECE_START = "<(?=0x[0-9A-F]{2}>)"


def export_sentencepiece(tokenizer: SentencePieceTokenizer) -> tokenizers.Tokenizer:
    """Return the library's tokenizer; raise CheckpointError with the reason if it cannot exist."""
    file = parse_sentencepiece_file(read_tokenizer_file(tokenizer.path))
    if reason := _unsupported_trait(tokenizer, file):
        raise CheckpointError(reason)
    split_pieces = _split_pieces(tokenizer, file)
    library = tokenizers.Tokenizer(_export_model(file, bool(split_pieces)))
    library.normalizer = normalizers.Sequence(list(_normalizer_steps(file)))
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split_pieces:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(trie_pattern(split_pieces)), "isolated"))
    if _matches_byte_pieces(file, split_pieces):
        pattern = tokenizers.Regex(BYTE_PIECE_START)
        steps.append(pre_tokenizers.Split(pattern, "merged_with_previous"))
    if steps:
        library.pre_tokenizer = pre_tokenizers.Sequence(steps)
    library.decoder = decoders.Sequence(list(_decoder_steps(tokenizer, file)))
    library.add_tokens(list(_added_tokens(tokenizer, file)))
    return library


def _split_pieces(tokenizer: SentencePieceTokenizer, file: SentencePieceFile) -> set[str]:
    """Return the pieces that sentencepiece matches anywhere in a text, before all others."""
    return {
        piece.text
        for piece in file.pieces
        if piece.type is PieceType.USER_DEFINED and piece.text not in tokenizer.control_tokens
    }


def _matches_byte_pieces(file: SentencePieceFile, split_pieces: set[str]) -> bool:
    """Return whether the library's model could match a byte piece in a text."""
    is_unigram = file.algorithm is SentencePieceAlgorithm.UNIGRAM
    return file.byte_fallback and (is_unigram or bool(split_pieces))


def _unsupported_trait(tokenizer: SentencePieceTokenizer, file: SentencePieceFile) -> str:
    """Return why tokenizer.json cannot express the model; empty if nothing is known to prevent it.

    The character maps of sentencepiece replace the longest match, and the `Precompiled` normalizer
    of the library does not, so texts with combining marks would get other ids.
    """
    if file.algorithm not in (SentencePieceAlgorithm.UNIGRAM, SentencePieceAlgorithm.BPE):
        return f"it is a {file.algorithm.name.lower()} model"
    if file.maps_characters or file.maps_decoded_characters:
        return "it normalizes text by a character map (such as nmt_nfkc)"
    if file.whitespace_is_suffix or not file.escapes_whitespace:
        return "it does not write spaces as space marks before words"
    if any(piece.type is PieceType.UNUSED for piece in file.pieces):
        return "it has unused pieces"
    if file.adds_dummy_prefix and not tokenizer.spaces_each_text and tokenizer.control_tokens:
        return 'its tokenizer_config.json says "legacy": false'
    texts = [piece.text for piece in file.pieces if piece.type is PieceType.NORMAL]
    letters = {text for text in texts if len(text) == 1}
    if not letters.issuperset("".join(texts)):
        return "some of its characters are only parts of longer pieces"
    if _matches_byte_pieces(file, _split_pieces(tokenizer, file)) and "<0" in " ".join(texts):
        return 'some of its pieces contain "<0", like its byte pieces'
    if any(UNKNOWN_MARK in text for text in texts):
        return f"its vocabulary has the noncharacter U+{ord(UNKNOWN_MARK):X}"
    return ""


def _export_model(file: SentencePieceFile, has_split_pieces: bool) -> models.Model:
    unknown_id = _unknown_id(file)
    if file.algorithm is SentencePieceAlgorithm.UNIGRAM:
        # The other pieces get the best score, so that they do not lower the unknown token's score,
        # which the library derives from the lowest score.
        return models.Unigram(
            [(p.text, p.score if p.type is PieceType.NORMAL else 0.0) for p in file.pieces],
            unk_id=unknown_id,
            byte_fallback=file.byte_fallback,
        )
    return models.BPE(
        {piece.text: i for i, piece in enumerate(file.pieces)},
        list(_merges(file)),
        unk_token=file.pieces[unknown_id].text,
        fuse_unk=True,
        byte_fallback=file.byte_fallback,
        # A split piece is a pre-token and a single token, although no merges lead to it.
        ignore_merges=has_split_pieces,
    )


def _unknown_id(file: SentencePieceFile) -> int:
    """Return the id of the unknown token, which every model has."""
    return next(i for i, piece in enumerate(file.pieces) if piece.type is PieceType.UNKNOWN)


def _merges(file: SentencePieceFile) -> Iterator[tuple[str, str]]:
    """Yield all merges of two pieces to a third, in the order in which sentencepiece merges."""
    normal_texts = {piece.text for piece in file.pieces if piece.type is PieceType.NORMAL}
    by_score = sorted(
        (piece for piece in file.pieces if piece.type is PieceType.NORMAL),
        key=lambda piece: -piece.score,
    )
    for piece in by_score:
        for end in range(1, len(piece.text)):
            left, right = piece.text[:end], piece.text[end:]
            if left in normal_texts and right in normal_texts:
                yield left, right


def _normalizer_steps(file: SentencePieceFile) -> Iterator[normalizers.Normalizer]:
    if file.removes_extra_whitespace:
        yield normalizers.Replace(tokenizers.Regex(r"\A +"), "")
        yield normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if file.adds_dummy_prefix:
        yield normalizers.Prepend(SPACE_MARK)
    yield normalizers.Replace(" ", SPACE_MARK)
    if file.removes_extra_whitespace:
        yield normalizers.Replace(tokenizers.Regex(rf"{SPACE_MARK}+\z"), "")


def _decoder_steps(
    tokenizer: SentencePieceTokenizer, file: SentencePieceFile
) -> Iterator[decoders.Decoder]:
    """Yield the steps that decode as sentencepiece does."""
    unknown_id = _unknown_id(file)
    unknown_text = tokenizer.piece(unknown_id)
    assert isinstance(unknown_text, str), "the unknown token is text"
    yield decoders.Replace(file.pieces[unknown_id].text, UNKNOWN_MARK)
    yield decoders.Replace(SPACE_MARK, " ")
    if file.byte_fallback:
        yield decoders.ByteFallback()
    yield decoders.Fuse()
    if tokenizer.decoding_rules.leading_space != "keep":
        removes_all = tokenizer.decoding_rules.leading_space == "marks"
        yield decoders.Strip(" ", ALL_SPACES if removes_all else 1, 0)
    yield decoders.Replace(UNKNOWN_MARK, unknown_text)


def _added_tokens(
    tokenizer: SentencePieceTokenizer, file: SentencePieceFile
) -> Iterator[tokenizers.AddedToken]:
    """Yield the tokens at which a text is split, in the order of their ids."""
    controls = tokenizer.control_tokens.items()
    for text, control in sorted(controls, key=lambda pair: pair[1].id):
        yield tokenizers.AddedToken(
            text,
            lstrip=control.lstrip,
            rstrip=control.rstrip,
            normalized=False,
            special=tokenizer.piece(control.id) is None,  # Decoding skips special tokens.
        )
    unknown = file.pieces[_unknown_id(file)].text
    yield tokenizers.AddedToken(unknown, normalized=False, special=False)
