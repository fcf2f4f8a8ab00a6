"""Sampling parameters of a request, and the counter-based random draw.

The draw has no state: a uniform number is computed from (seed, position). So a seed gives the same
tokens in any batch and after a restart. Two modules apply the logits processors (penalties, logit
bias, temperature, top-k, top-p): `gpt.generation.reference_sampler`, one row at a time, and the
engine's sampler, a batch at a time. The module does not import torch.
"""

from dataclasses import dataclass, fields
from math import isfinite, log10

from gpt.errors import RequestError

# Limit of the number of alternative tokens per position that a request can ask for.
LOGPROBS_MAX = 100
# Token counts are sent between processes as unsigned 32-bit integers and converted to floats.
TOKEN_COUNT_MAX = 2**32 - 1
# Limit of no_repeat_ngram_size. For each token, the search for repeated n-grams compares the whole
# text up to this number of times.
NGRAM_MAX = 100
# Limit of the decimal exponent of `stop_logit_growth`: the factor makes any positive logit the
# largest, and the product is finite.
_LOGIT_GROWTH_DIGITS_MAX = 30


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop. A temperature of 0 means greedy decoding.

    The logits processors run in the order of transformers: logit bias; repetition, frequency and
    presence penalty; length decay; bans. If decoding is not greedy, then temperature, top-k, top-p,
    min-p and typical-p follow, each applied to the tokens that the previous filter kept. Penalties
    and bans apply only to tokens of the vocabulary, never to virtual tokens. Bans are applied in
    this order: allowed ids, bad words, repeated n-grams, `min_new_tokens`. A ban that would exclude
    every remaining token is ignored.
    """

    max_new_tokens: int = 128  # 0: no tokens are generated, and the prompt is only scored.
    min_new_tokens: int = 0  # Stop tokens are banned until this number of new tokens is reached.
    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all tokens.
    top_p: float = 1.0
    min_p: float = 0.0  # Relative to the most likely token's probability; 0 keeps all tokens.
    # Keeps the tokens whose information content is nearest to the entropy, up to this probability
    # mass; 1 keeps all tokens.
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # Applied to tokens of the prompt and of the completion.
    presence_penalty: float = 0.0  # Applied once to each token that the completion contains.
    frequency_penalty: float = 0.0  # Applied once per occurrence of a token in the completion.
    logit_bias: tuple[tuple[int, float], ...] = ()  # Token id, and the value added to its logit.
    allowed_token_ids: tuple[int, ...] = ()  # Only these tokens may be chosen. Empty: all tokens.
    # No n-gram of this size may repeat in prompt and completion; 0: off.
    no_repeat_ngram_size: int = 0
    # Token sequences that no new token may complete, even if they begin in the prompt.
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # (start, factor): after `start` new tokens, the logits of the stop tokens are increased
    # exponentially, by `factor` for each further token.
    length_decay: tuple[int, float] | None = None
    seed: int = 0
    # Number of alternatives to return per new token; None: no log-probabilities.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # The same for the tokens of the prompt.

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "top_k"):
            if not 0 <= getattr(self, name) <= TOKEN_COUNT_MAX:
                raise _range_error(self, name, "from 0 to 2^32 - 1")
        if self.min_new_tokens > self.max_new_tokens:
            raise _range_error(
                self, "min_new_tokens", f"at most max_new_tokens, {self.max_new_tokens}"
            )
        if not 0 <= self.no_repeat_ngram_size <= NGRAM_MAX:
            raise _range_error(self, "no_repeat_ngram_size", f"from 0 (off) to {NGRAM_MAX}")
        self._check_ranges()
        if not 0 <= self.seed < 2**64:
            raise _range_error(self, "seed", "from 0 to 2^64 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= LOGPROBS_MAX:
                raise _range_error(self, name, f"from 0 to {LOGPROBS_MAX}")
        if not all(self.bad_words):
            raise _range_error(self, "bad_words", "words of at least one token each")
        if not all(isfinite(bias) and abs(bias) <= 100 for _, bias in self.logit_bias):
            raise _range_error(self, "logit_bias", "from -100 to 100 for each token")

    def _check_ranges(self) -> None:
        for name, low, high, requirement in (
            ("temperature", 0, 100, "from 0 (greedy) to 100"),
            ("min_p", 0, 1, "from 0 (off) to 1"),
            ("presence_penalty", -2, 2, "from -2 to 2"),
            ("frequency_penalty", -2, 2, "from -2 to 2"),
        ):
            if not low <= getattr(self, name) <= high:  # True for NaN too.
                raise _range_error(self, name, requirement)
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise _range_error(self, name, "in (0, 1]")
        # With a penalty below 0.01, the division of a logit may overflow.
        if not 0.01 <= self.repetition_penalty <= 10:
            raise _range_error(self, "repetition_penalty", "from 0.01 to 10")
        start, factor = self.length_decay or (0, 1)
        if not (0 <= start <= TOKEN_COUNT_MAX and 1 <= factor <= 10):
            requirement = "a number of tokens from 0 to 2^32 - 1 and a factor from 1 to 10"
            raise _range_error(self, "length_decay", requirement)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the choice is the argmax of the unprocessed logits: the common, fast case."""
        return self.temperature == 0 and all(
            getattr(self, field.name) == field.default for field in _LOGIT_FIELDS
        )

    def stop_logit_growth(self, new_tokens: int) -> float:
        """Return the growth g after `new_tokens` tokens; each stop logit x becomes x + g|x|."""
        start, factor = self.length_decay or (new_tokens, 1.0)
        excess = max(0, new_tokens - start)
        if excess * log10(factor) > _LOGIT_GROWTH_DIGITS_MAX:
            return 10.0**_LOGIT_GROWTH_DIGITS_MAX
        return float(factor**excess - 1)

    @property
    def is_stateless(self) -> bool:
        """Whether a choice depends only on the logits, the seed and the position.

        Then the tokens of several positions can be chosen at once, before it is known which of them
        are accepted.
        """
        return all(getattr(self, field.name) == field.default for field in _HISTORY_FIELDS) and all(
            len(word) == 1 for word in self.bad_words
        )


def _range_error(params: SamplingParams, name: str, requirement: str) -> RequestError:
    return RequestError(f"{name} is {getattr(params, name)}; it must be {requirement}", name)


# The fields that change the logits in greedy decoding too. top-k, top-p, min-p and typical-p only
# restrict the random draw, so they are not included.
_LOGIT_FIELDS = [
    field
    for field in fields(SamplingParams)
    if field.name
    in (
        "min_new_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "no_repeat_ngram_size",
        "length_decay",
    )
]

# The fields whose effect depends on the earlier tokens or on their number.
_HISTORY_FIELDS = [
    field
    for field in fields(SamplingParams)
    if field.name
    in (
        "min_new_tokens",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "no_repeat_ngram_size",
        "length_decay",
    )
]


def uniform_draw(seed: int, position: int) -> float:
    """Compute the uniform number in [0, 1) of (seed, position) by SplitMix64."""
    mask = 2**64 - 1
    state = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return ((state ^ (state >> 31)) >> 11) / 2**53
