"""Guided decoding: token masks from JSON schemas, regexes and grammars (llguidance).

A guide is the format that a completion must match. The library `llguidance` (the extra `guided`)
parses the guide and computes the tokens that may come next, from the bytes of each token of the
model's tokenizer. There is one matcher for each slot with a guide. The request's stop tokens are
allowed where the guide may end, and forbidden elsewhere. This module is independent of logits.
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
from serving.json_schemas import close_schema, nested_objects
from serving.messages import Guide

if TYPE_CHECKING:
    import llguidance

# Limits of a guide's text and of the work to parse and match it. With these limits, the check, the
# start of a sequence and the slowest token take at most about 0.3 s each, even for a hostile guide.
GUIDE_BYTES_MAX = 1 << 16
_SYMBOLS_MAX = {"json": 50_000, "choice": 50_000, "regex": 20_000, "grammar": 20_000}
_ITEMS_MAX = 20_000  # Earley items for one token; the library computes about 100 per millisecond.
# Alternatives (choices, property names of a schema) that the parser follows at the same time.
_BRANCHES_MAX = 10_000
# Limits of patterns (regular expressions). The library's time for a pattern grows with the square
# of the pattern's length. Therefore a long pattern is refused, but a schema may have many short
# ones.
_LEXER_FUEL_MAX = {"json": 200_000, "choice": 200_000, "regex": 20_000, "grammar": 20_000}
_PATTERN_CHARS_MAX = 2_000
# Whitespace between JSON tokens: one space, or one newline with an indentation. Without a limit a
# model could generate only whitespace, up to max_new_tokens.
JSON_WHITESPACE = r"\x20|\x0D?\x0A[\x20\x09]{0,32}"
_COMPILED_MAX = 64  # Compiled guides that are cached.


def check_guide(guide: Guide, stop_token_ids: Iterable[int]) -> None:
    """Raise RequestError if the guide is invalid or too large.

    `stop_token_ids`: the stop tokens of the request, defaults included. The check needs no model.
    It takes up to about 0.3 s for a hostile guide, and far less for most guides.
    """
    field = f"guide.{guide.kind}"
    if guide.kind not in _KIND_DESCRIPTIONS:
        raise RequestError(
            f"guide has the unknown kind {guide.kind!r}; choose one of: "
            f"{', '.join(_KIND_DESCRIPTIONS)}",
            "guide",
        )
    size = len(guide.text.encode(errors="replace"))
    if not 0 < size <= GUIDE_BYTES_MAX:
        raise RequestError(f"{field} has {size} bytes; it must have 1 to {GUIDE_BYTES_MAX}", field)
    if not any(True for _ in stop_token_ids):
        raise RequestError(
            f"{field} needs a stop token to end the completion, and this model's tokenizer has "
            "none; set stop_token_ids",
            field,
        )
    error = _grammar_error(guide)
    if error and not error.startswith("WARNING"):
        raise _guide_error(guide, error)


class GuideMatchers:
    """The matchers of all slots with a guide, each advanced by its sequence's output tokens."""

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._slot_matchers: dict[int, _SlotMatcher] = {}
        self._compiled: OrderedDict[Guide, llguidance.LLMatcher] = OrderedDict()
        if tokenizer is not None:
            # The tokenizer of llguidance is built now, because building takes 0.2 s, which would
            # delay the first step with a guide.
            with suppress(RequestError):  # Raised if llguidance is not installed.
                assert self._ll_tokenizer

    def __contains__(self, slot: int) -> bool:
        return slot in self._slot_matchers

    def __len__(self) -> int:
        return len(self._slot_matchers)

    def init_slot(
        self, slot: int, guide: Guide, stop_ids: Sequence[int], output_tokens: Sequence[int]
    ) -> None:
        """Start a guide in a slot, and advance it by the `output_tokens` of the slot's sequence."""
        default_stop_ids = self._tokenizer.stop_ids if self._tokenizer else ()
        end_ids = [i for i in stop_ids or default_stop_ids if 0 <= i < self._vocab_size]
        matcher = None
        # Admission rejects invalid guides (`check_guide`). If a guide is invalid here nevertheless,
        # only this sequence fails: its matcher is None.
        with suppress(RequestError):
            matcher = self._new_matcher(guide)
        self._slot_matchers[slot] = slot_matcher = _SlotMatcher(matcher, tuple(end_ids))
        for token in output_tokens:
            slot_matcher.accept_token(token)

    def drop_slot(self, slot: int) -> None:
        self._slot_matchers.pop(slot, None)

    def allowed_mask(self, slots: Sequence[int]) -> NDArray[np.bool_]:
        """A mask (slots, V) of the tokens that each of these slots may sample next; True: allowed.

        A row without True means that the guide of its slot allows no token.
        """
        words = self._vocab_size // 32 + 1
        bits = np.zeros((len(slots), words), dtype=np.uint32)
        for row, slot in enumerate(slots):
            slot_matcher = self._slot_matchers[slot]
            if slot_matcher.is_finished:
                # Only the end token is allowed. Its bit follows the bits of the vocabulary.
                bits[row, -1] = 1 << self._vocab_size % 32
            elif not slot_matcher.fill_mask(bits[row]):
                bits[row] = 0
        flags = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")
        mask: NDArray[np.bool_] = flags[:, : self._vocab_size].view(np.bool_)
        may_end = flags[:, self._vocab_size] != 0
        for row, slot in enumerate(slots):
            mask[row, list(self._slot_matchers[slot].stop_ids)] = may_end[row]
        return mask

    def accept_token(self, slot: int, token: int) -> bool:
        """Advance a slot's matcher by a sampled token; False: the guide does not allow the token.

        If the guide allows no token at all, the sampler ignores `allowed_mask` (`_mask_logits` in
        `serving.worker.sampler`). Then the sampled token is not allowed.
        """
        return self._slot_matchers[slot].accept_token(token)

    @cached_property
    def _ll_tokenizer(self) -> "llguidance.LLTokenizer":
        library = _import_llguidance()
        wrapper = library.TokenizerWrapper(_TokenizerAdapter(self._tokenizer, self._vocab_size))
        ll_tokenizer: llguidance.LLTokenizer = library.LLTokenizer(
            wrapper, n_vocab=self._vocab_size + 1
        )
        return ll_tokenizer

    def _new_matcher(self, guide: Guide) -> "llguidance.LLMatcher":
        if guide not in self._compiled:
            self._compiled[guide] = _import_llguidance().LLMatcher(
                self._ll_tokenizer, _ll_grammar(guide), log_level=0, limits=_parser_limits(guide)
            )
            if len(self._compiled) > _COMPILED_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(guide)
        return self._compiled[guide].deep_copy()


@dataclass
class _SlotMatcher:
    """One slot's matcher, and the stop tokens that may end its sequence."""

    matcher: "llguidance.LLMatcher | None"  # None: the guide could not be compiled.
    stop_ids: tuple[int, ...]
    is_finished: bool = False  # A stop token was sampled.

    def fill_mask(self, bits: NDArray[np.uint32]) -> bool:
        """Write one bit for each token of the vocabulary and one for the end token; 1: allowed.

        Return False if no token is allowed: the guide is invalid, or needs text that no token has.
        """
        if self.matcher is None:
            return False
        self.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        return not self.matcher.is_error()

    def accept_token(self, token: int) -> bool:
        """Advance by a token; False: the guide does not allow it."""
        if self.matcher is None or self.matcher.is_error():
            return False
        self.is_finished = self.is_finished or token in self.stop_ids
        return self.is_finished or self.matcher.consume_token(token)


class _TokenizerAdapter:
    """The tokenizer interface of llguidance: the bytes of each token id, and an end token.

    The end token is an extra id after the vocabulary, which `allowed_mask` maps to the stop tokens
    of each request. Special tokens have no bytes, because they are not text.
    """

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer | None, vocab_size: int) -> None:
        self.eos_token_id = vocab_size
        self.special_token_ids = [vocab_size]
        self.tokens = [_token_bytes(tokenizer, i) for i in range(vocab_size)] + [b"<end of guide>"]

    def __call__(self, text: bytes) -> list[int]:
        return []  # llguidance does not tokenize texts, because `_ll_grammar` sets `no_forcing`.


def _token_bytes(tokenizer: Tokenizer | None, token_id: int) -> bytes:
    """A token's bytes; empty if they begin with 0xFF, which llguidance reserves as a marker."""
    text = tokenizer.token_bytes(token_id) if tokenizer else None
    return b"" if text is None or text.startswith(b"\xff") else text


def _import_llguidance() -> Any:
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            "guided decoding needs the package llguidance, which is not installed on this server; "
            "its operator can install preamble[guided]",
            "guide",
        ) from None
    return llguidance


@lru_cache(_COMPILED_MAX)
def _grammar_error(guide: Guide) -> str:
    """Return llguidance's message about the guide: an error, a "WARNING", or "" if it is valid.

    The message is cached, because many requests may have the same guide.
    """
    error: str = _import_llguidance().LLMatcher.validate_grammar(
        _ll_grammar(guide), limits=_parser_limits(guide)
    )
    return error


def _parser_limits(guide: Guide) -> "llguidance.LLParserLimits":
    limits: llguidance.LLParserLimits = _import_llguidance().LLParserLimits(
        initial_lexer_fuel=_LEXER_FUEL_MAX[guide.kind],
        max_grammar_size=_SYMBOLS_MAX[guide.kind],
        step_max_items=_ITEMS_MAX,
        max_items_in_row=_BRANCHES_MAX,
        verbose_errors=False,
    )
    return limits


def _ll_grammar(guide: Guide) -> str:
    """Convert the guide to a grammar of llguidance, as JSON.

    If only one text can come next, llguidance by default tokenizes this text and allows only these
    tokens. Some tokenizers cannot encode every fragment of a text exactly. Therefore the grammar
    sets `no_forcing`, which allows any tokens that spell the text.
    """
    library = _import_llguidance()
    try:
        if guide.kind == "json":
            # json.loads has better error messages than llguidance, which parses the text again.
            schema = json.loads(guide.text)
            _check_patterns(schema)
            options = {"whitespace_pattern": JSON_WHITESPACE}
            grammar_json = library.LLMatcher.grammar_from_json_schema(
                json.dumps(close_schema(schema)), options
            )
        elif guide.kind == "regex":
            _check_last_escape(guide.text)
            grammar_json = library.LLMatcher.grammar_from_regex(guide.text)
        else:
            lark = _choice_grammar(guide) if guide.kind == "choice" else guide.text
            lark = library.grammar_from("grammar", lark)
            grammar_json = json.dumps({"grammars": [{"lark_grammar": lark}]})
        (grammar,) = json.loads(grammar_json)["grammars"]
    except (ValueError, RecursionError) as error:
        raise _guide_error(guide, str(error)) from None
    root_grammar = {
        "name": "whole",
        "lark_grammar": '%llguidance {"no_forcing": true}\nstart: @guide',
    }
    return json.dumps({"grammars": [root_grammar, {**grammar, "name": "guide"}]})


def _check_patterns(schema: Any) -> None:
    """Raise ValueError if a regular expression in a JSON schema is too long or incomplete."""
    for node in nested_objects(schema):
        pattern_properties = node.get("patternProperties")
        for pattern in (
            node.get("pattern"),
            *(pattern_properties if isinstance(pattern_properties, dict) else ()),
        ):
            if not isinstance(pattern, str):
                continue
            if len(pattern) > _PATTERN_CHARS_MAX:
                raise ValueError(
                    f"a pattern has {len(pattern)} characters; at most {_PATTERN_CHARS_MAX} are "
                    "allowed"
                )
            _check_last_escape(pattern)


def _check_last_escape(pattern: str) -> None:
    """Raise ValueError if a pattern ends within an escape, which llguidance removes silently."""
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise ValueError("a pattern ends with a backslash that escapes nothing")


def _choice_grammar(guide: Guide) -> str:
    """Convert a guide of kind "choice" to a Lark grammar."""
    texts = json.loads(guide.text)
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it is not a list of strings")
    if not texts or not all(texts):
        raise ValueError("the list is empty or contains an empty text")
    return "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


_KIND_DESCRIPTIONS = {
    "json": "a JSON schema",
    "regex": "a regular expression (without look-around and back-references)",
    "choice": "a JSON list of texts",
    "grammar": "a grammar, in Lark's notation or GBNF",
}


def _guide_error(guide: Guide, reason: str) -> RequestError:
    detail = " ".join(reason.split())[:300]
    return RequestError(
        f"guide.{guide.kind} is invalid or unsupported ({detail}); give "
        f"{_KIND_DESCRIPTIONS[guide.kind]} within the limits",
        f"guide.{guide.kind}",
    )
