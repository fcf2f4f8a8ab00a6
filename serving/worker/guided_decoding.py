"""Guided decoding: which tokens may come next so that a completion matches its guide.

`llguidance` (the extra `guided`) reads schemas, patterns and grammars and follows them; here is a
matcher for each slot that has a guide, over the bytes of our own tokenizers. A guide's end allows
the request's stop tokens and nothing else; before it they are forbidden. Knows no logits.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gpt.errors import RequestError
from gpt.tokenizers.tokenizer import Tokenizer
from serving.messages import Guide

if TYPE_CHECKING:
    import llguidance

# What a guide may be at most: its text, and what reading and following it may cost. Together they
# bound a check, the beginning of a sequence and the worst token of a hostile guide to some 0.3 s.
GUIDE_BYTES_MAX = 1 << 16
_SYMBOLS_MAX = {"json": 50_000, "choice": 50_000, "regex": 20_000, "grammar": 20_000}
_ITEMS_MAX = 20_000  # That a token may cost, of a grammar's rules; about 100 a millisecond.
_BRANCHES_MAX = 10_000  # So many choices, or names of a schema, may be open at once.
# Of patterns. What the library takes for one grows with the square of its length, so that a long
# one has to be refused, but a schema may have many short ones.
_LEXER_FUEL_MAX = {"json": 200_000, "choice": 200_000, "regex": 20_000, "grammar": 20_000}
_PATTERN_CHARS_MAX = 2_000
# Between the parts of JSON. Without a limit a model that likes spaces would never come to an end.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
_COMPILED_MAX = 64  # Guides that are kept ready for the next request with the same.


def check_guide(guide: Guide, stop_token_ids: Iterable[int]) -> None:
    """Refuse a guide that cannot be followed. `stop_token_ids`: those that the request will have.

    Takes up to about 0.2 s, most guides far less; needs no model.
    """
    field = f"guide.{guide.kind}"
    if guide.kind not in _WANTED:
        raise RequestError(
            f"guide is of kind {guide.kind!r}; known are: {', '.join(_WANTED)}", "guide"
        )
    size = len(guide.text.encode(errors="replace"))
    if not 0 < size <= GUIDE_BYTES_MAX:
        raise RequestError(f"{field} is {size} bytes; it needs 1 to {GUIDE_BYTES_MAX}", field)
    if not any(True for _ in stop_token_ids):
        raise RequestError(
            f"{field} needs a token that ends the text, and this model's tokenizer names none; "
            "give stop_token_ids",
            field,
        )
    wrong = _wrong(guide)
    if wrong and not wrong.startswith("WARNING"):
        raise _refusal(guide, wrong)


class Guides:
    """The guides of the slots that have one, each after the tokens that its sequence has made."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._followed: dict[int, _Followed] = {}
        self._compiled: OrderedDict[Guide, llguidance.LLMatcher] = OrderedDict()
        if tokenizer is not None:
            # It takes some 0.2 s, which no step should wait for.
            with suppress(RequestError):
                assert self._vocabulary

    def __contains__(self, slot: int) -> bool:
        return slot in self._followed

    def __len__(self) -> int:
        return len(self._followed)

    def begin(self, slot: int, guide: Guide, stops: Sequence[int], made: Sequence[int]) -> None:
        """The slot follows `guide` from now on; it has made `made` already."""
        known = self._tokenizer.stop_ids if self._tokenizer else ()
        ends = [i for i in stops or known if 0 <= i < self._vocab_size]
        matcher = None
        with suppress(RequestError):  # Admission refuses such a guide; here it only breaks.
            matcher = self._matcher(guide)
        self._followed[slot] = followed = _Followed(matcher, tuple(ends))
        for token in made:
            followed.push(token)

    def drop(self, slot: int) -> None:
        self._followed.pop(slot, None)

    def allowed(self, slots: Sequence[int]) -> NDArray[np.bool_]:
        """What each of these slots may draw next: a mask (slots, V)."""
        words = self._vocab_size // 32 + 1
        bits = np.zeros((len(slots), words), dtype=np.uint32)
        for row, slot in enumerate(slots):
            followed = self._followed[slot]
            if followed.over:
                bits[row, -1] = 1 << self._vocab_size % 32  # The end: a bit past the vocabulary.
            elif not followed.fill(bits[row]):
                bits[row] = 0
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        mask: NDArray[np.bool_] = flags[:, : self._vocab_size].view(np.bool_)
        ends = flags[:, self._vocab_size] != 0
        for row, slot in enumerate(slots):
            mask[row, list(self._followed[slot].stops)] = ends[row]
        return mask

    def push(self, slot: int, token: int) -> bool:
        """The slot has drawn a token. False: it can follow its guide no more."""
        return self._followed[slot].push(token)

    @cached_property
    def _vocabulary(self) -> "llguidance.LLTokenizer":
        library = _library()
        wrapper = library.TokenizerWrapper(_Bytes(self._tokenizer, self._vocab_size))
        vocabulary: llguidance.LLTokenizer = library.LLTokenizer(
            wrapper, n_vocab=self._vocab_size + 1
        )
        return vocabulary

    def _matcher(self, guide: Guide) -> "llguidance.LLMatcher":
        if guide not in self._compiled:
            self._compiled[guide] = _library().LLMatcher(
                self._vocabulary, _grammar(guide), log_level=0, limits=_limits(guide)
            )
            if len(self._compiled) > _COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(guide)
        return self._compiled[guide].deep_copy()


@dataclass
class _Followed:
    """One slot's matcher, and the tokens by which its sequence may end."""

    matcher: "llguidance.LLMatcher | None"  # None: the guide could not be read.
    stops: tuple[int, ...]
    over: bool = False  # A stop token was drawn.

    def fill(self, bits: NDArray[np.uint32]) -> bool:
        """The bits of what may come next: one for each token, and one more for the end.

        False: nothing may. The guide wants what no token can write, or was none to begin with.
        """
        if self.matcher is None:
            return False
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return not self.matcher.is_error()

    def push(self, token: int) -> bool:
        """Goes on after a token; False: it cannot."""
        if self.matcher is None or self.matcher.is_error():
            return False
        self.over = self.over or token in self.stops
        return self.over or self.matcher.consume_token(token)


class _Bytes:
    """What the library asks of a tokenizer: each id's bytes, and an id that ends a text.

    The end is an id of its own past the vocabulary, so that a request's own stop tokens can stand
    for it. Control tokens are no text and have no bytes.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self.tokens = [_bytes_of(tokenizer, i) for i in range(vocab_size)] + [b"<end of guide>"]

    def __call__(self, text: bytes) -> list[int]:
        return []  # How a text would be cut into tokens is the model's choice: see `_grammar`.


def _bytes_of(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    """A token's bytes inside a text. None begin with 0xFF, which is the library's own mark."""
    text = tokenizer.token_bytes(token_id) if tokenizer else None
    return b"" if text is None or text.startswith(b"\xff") else text


def _library() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "guides need the package llguidance, which this server does not have; its operator can "
            "install preamble[guided]",
            "guide",
        ) from None
    return llguidance


@lru_cache(_COMPILED_MAX)
def _wrong(guide: Guide) -> str:
    """What the library says against it. Many prompts with one guide cost one look at it."""
    wrong: str = _library().LLMatcher.validate_grammar(_grammar(guide), limits=_limits(guide))
    return wrong


def _limits(guide: Guide) -> "llguidance.LLParserLimits":
    limits: llguidance.LLParserLimits = _library().LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL_MAX[guide.kind],
        max_grammar_size=_SYMBOLS_MAX[guide.kind],
        step_max_items=_ITEMS_MAX,
        max_items_in_row=_BRANCHES_MAX,
        verbose_errors=False,
    )
    return limits


def _grammar(guide: Guide) -> str:
    """The guide in the library's own form.

    A text that is certain is not forced on the model as the tokens that a tokenizer would make of
    it: all ways to write it are allowed. Not every tokenizer can write each certain part exactly.
    """
    library = _library()
    try:
        if guide.kind == "json":
            _check_patterns(json.loads(guide.text))  # Whose complaints are better.
            options = {"whitespace_pattern": _WHITESPACE}
            read = library.LLMatcher.grammar_from_json_schema(guide.text, options)
        elif guide.kind == "regex":
            read = library.LLMatcher.grammar_from_regex(guide.text)
        else:
            lark = _choices(guide) if guide.kind == "choice" else guide.text
            lark = library.grammar_from("grammar", lark)
            read = json.dumps({"grammars": [{"lark_grammar": lark}]})
        (part,) = json.loads(read)["grammars"]
    except (ValueError, RecursionError) as error:
        raise _refusal(guide, str(error)) from None
    whole = {"name": "whole", "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @guide'}
    return json.dumps({"grammars": [whole, {**part, "name": "guide"}]})


def _check_patterns(schema: Any) -> None:
    """Refuse a pattern, wherever it stands in a schema, that would take too long to read."""
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        if not isinstance(one, dict):
            continue
        left += one.values()
        named = one.get("patternProperties")
        for pattern in (one.get("pattern"), *(named if isinstance(named, dict) else ())):
            if isinstance(pattern, str) and len(pattern) > _PATTERN_CHARS_MAX:
                raise ValueError(
                    f"a pattern has {len(pattern)} characters, at most {_PATTERN_CHARS_MAX} can be"
                )


def _choices(guide: Guide) -> str:
    """The choices as a grammar."""
    texts = json.loads(guide.text)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is something else")
    if not texts or not all(texts):
        raise ValueError("there is no text in it, or an empty one")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


_WANTED = {
    "json": "a JSON schema",
    "regex": "a regular expression (without look-around and back-references)",
    "choice": "a JSON list of texts",
    "grammar": "a grammar, in Lark's notation or GBNF",
}


def _refusal(guide: Guide, why: str) -> RequestError:
    told = " ".join(why.split())[:300]
    return RequestError(
        f"guide.{guide.kind} cannot be followed ({told}); it must be {_WANTED[guide.kind]}",
        f"guide.{guide.kind}",
    )
