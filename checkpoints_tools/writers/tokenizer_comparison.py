"""Tokenizer comparison: compares a tokenizer with its export, on fixed texts and its vocabulary.

The texts are chosen so that the known differences between tokenizer libraries show: spaces at every
place, control characters, combining marks, characters outside the vocabulary, and all control
tokens. They contain no random draws.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import tokenizers

from gpt.tokenizers.tokenizer import Tokenizer

# Of a larger vocabulary, at least this number of pieces is compared, at equal distances.
PIECES_MIN = 4096
CONTROL_TOKENS_MAX = 256
WORDS = ("the", "Hello", "a", "12", "don't", "Größe", "今日は", "мир", "بالعالم", ".", "()")
SEPARATORS = (" ", "  ", "   ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u3000", "\u2581", "\0", "")
CHARACTERS = (
    "e\u0301",
    "e\u0301\u0323",
    "a\u0308\u0304",
    "ﬁ",
    "①",
    "ｱﾞ",
    "각",
    "\u1100\u1161\u11a8",
    "مَرْحَبًا",
    "\u064e\u0651",
    "नमस्ते",
    "👩‍👩‍👧",
    "🇩🇪",
    "👍🏽",
    "\u200b",
    "\u200d",
    "\u202e",
    "\ufeff",
    "\ufffd",
    "\u0000",
    "\u007f",
    "\u0085",
    "\u2028",
    "𝔘",
    "<0x41>",
    "<0x0A>",
)


def compared_texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the texts: fixed ones, texts with control tokens, and texts of the vocabulary."""
    yield from ("", *SEPARATORS, *WORDS, *CHARACTERS, "a" * 2000, " " * 300, "the fox " * 50)
    for separator in SEPARATORS:
        yield f"{separator}the{separator}fox{separator}"
        yield separator.join(WORDS)
    for characters in CHARACTERS:
        yield f" {characters}the {characters} fox{characters} "
        yield characters * 3
    controls = sorted(tokenizer.control_tokens, key=lambda t: tokenizer.control_tokens[t].id)
    for text in islice(controls, CONTROL_TOKENS_MAX):
        yield from (text, text[1:], f"the{text}fox", f" the {text} fox ")
        yield f"{text}\n{text} {text}{text}the"
    yield from _vocabulary_texts(tokenizer)


def _vocabulary_texts(tokenizer: Tokenizer) -> Iterator[str]:
    step = max(1, tokenizer.vocab_size // PIECES_MIN)
    pieces: list[str] = []
    for token_id in range(0, tokenizer.vocab_size, step):
        content = tokenizer.token_bytes(token_id) or b""
        piece = content.decode(errors="ignore")
        if piece:
            pieces.append(piece)
            yield piece
    for start in range(0, len(pieces), 8):
        neighbors = pieces[start : start + 8]
        yield "".join(neighbors)
        yield " ".join(neighbors)


def find_difference(tokenizer: Tokenizer, exported: tokenizers.Tokenizer) -> str | None:
    """Describe the first difference of two tokenizers in ids or decoded texts; None if none.

    `exported` adds BOS and EOS to texts as transformers does by default.
    """
    for text in compared_texts(tokenizer):
        text_ids = tokenizer.encode(text, allow_special=True)
        ids = [*tokenizer.prefix_ids, *text_ids, *tokenizer.suffix_ids]
        exported_ids: list[int] = exported.encode(text).ids
        if exported_ids != ids:
            return (
                f"the text {text[:40]!r} would have the ids {_summary(exported_ids)} instead of "
                f"{_summary(ids)}"
            )
        exported_text = exported.decode(ids, skip_special_tokens=True)
        decoded_text = tokenizer.decode(ids)
        if exported_text != decoded_text:
            return (
                f"the ids {_summary(ids)} would decode to {exported_text[:40]!r} instead of "
                f"{decoded_text[:40]!r}"
            )
    return None


def _summary(ids: Sequence[int]) -> str:
    more = ", ..." if len(ids) > 8 else ""
    return f"[{', '.join(map(str, ids[:8]))}{more}]"
