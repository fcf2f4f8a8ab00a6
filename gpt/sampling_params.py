"""Sampling parameters of a request, such as its logit bias, and the counter-based random draw.

The draw is stateless: a uniform number is computed from (seed, position). Therefore a seed gives
the same tokens in any batch and after a restart. Two modules apply the parameters to logits:
`gpt.generation.reference_sampler` processes one row of logits at a time, and
`serving.worker.sampler` all rows of a batch. The module does not import torch.
"""

from dataclasses import dataclass, fields
from math import isfinite, log10

from gpt.errors import RequestError

# Largest number of alternative tokens per position that a request can ask for.
LOGPROBS_MAX = 100
# Token counts are sent between processes as unsigned 32-bit integers.
TOKEN_COUNT_MAX = 2**32 - 1
# Largest no_repeat_ngram_size. For each new token, the search for repeated n-grams makes at most
# (length of the text) x (n-gram size) comparisons.
NGRAM_MAX = 100
# `length_decay` adds g |x| to the logit x of a stop token. The largest g is 10 to this power. With
# this g, a stop token has the largest logit (unless x is 0), and this logit is still finite.
_LOGIT_GROWTH_EXPONENT_MAX = 30


@dataclass(frozen=True)
class SamplingParams:
    """The rules that choose a request's tokens and end its completion.

    The logits are processed in this order, as in transformers:

    1. logit bias;
    2. repetition, frequency and presence penalty;
    3. length decay;
    4. bans: `allowed_token_ids`, `bad_words`, `no_repeat_ngram_size`, `min_new_tokens`. A ban that
       would exclude all remaining tokens is ignored;
    5. unless decoding is greedy: temperature, top-k, top-p, min-p, typical-p. Each filter applies
       to the tokens that the previous filter kept.

    Penalties and bans ignore virtual tokens.
    """

    max_new_tokens: int = 128  # 0: no tokens are generated, and the prompt is only scored.
    min_new_tokens: int = 0  # Stop tokens are banned until this number of new tokens is reached.
    temperature: float = 0.0  # 0: greedy decoding.
    top_k: int = 0  # 0 keeps all tokens.
    top_p: float = 1.0
    # Removes tokens whose probability is below min_p times the largest probability. 0 keeps all
    # tokens.
    min_p: float = 0.0
    # Keeps the tokens whose surprisal, -log p, is nearest to the entropy, up to this probability
    # mass. 1 keeps all tokens.
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # Applied to tokens of the prompt and of the completion.
    presence_penalty: float = 0.0  # Applied once to each token that the completion contains.
    frequency_penalty: float = 0.0  # Applied once per occurrence of a token in the completion.
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    allowed_token_ids: tuple[int, ...] = ()  # Only these tokens may be chosen. Empty: all tokens.
    # No n-gram of this size may repeat in prompt and completion; 0: off.
    no_repeat_ngram_size: int = 0
    # Token sequences that no new token may complete, even if they begin in the prompt.
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # (start, factor): after n > start new tokens, each stop token's logit x is increased by
    # (factor ** (n - start) - 1) * |x|. None: off.
    length_decay: tuple[int, float] | None = None
    seed: int = 0
    # Number of alternatives to return with each new token's log-probability. None: no
    # log-probabilities.
    logprobs: int | None = None
    # Number of alternatives to return with each prompt token's log-probability. None: no
    # log-probabilities of the prompt.
    prompt_logprobs: int | None = None

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
            if not low <= getattr(self, name) <= high:  # NaN is refused too.
                raise _range_error(self, name, requirement)
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise _range_error(self, name, "in (0, 1]")
        # With a penalty below 0.01, the division of a logit by the penalty may overflow.
        if not 0.01 <= self.repetition_penalty <= 10:
            raise _range_error(self, "repetition_penalty", "from 0.01 to 10")
        start, factor = self.length_decay or (0, 1)
        if not (0 <= start <= TOKEN_COUNT_MAX and 1 <= factor <= 10):
            requirement = "a number of tokens from 0 to 2^32 - 1 and a factor from 1 to 10"
            raise _range_error(self, "length_decay", requirement)

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the token is the argmax of the unprocessed logits: the common, fast case."""
        return self.temperature == 0 and all(
            getattr(self, field.name) == field.default for field in _LOGIT_FIELDS
        )

    def stop_logit_growth(self, new_tokens: int) -> float:
        """Return the growth g that `length_decay` gives after `new_tokens` new tokens.

        The logit x of a stop token becomes x + g |x|.
        """
        start, factor = self.length_decay or (new_tokens, 1.0)
        excess = max(0, new_tokens - start)
        if excess * log10(factor) > _LOGIT_GROWTH_EXPONENT_MAX:
            return 10.0**_LOGIT_GROWTH_EXPONENT_MAX
        return float(factor**excess - 1)

    @property
    def is_stateless(self) -> bool:
        """Whether a token depends on the earlier tokens only through the logits.

        If so, draft verification can sample the tokens of several positions at once, before it is
        known which draft tokens are accepted.
        """
        return all(getattr(self, field.name) == field.default for field in _HISTORY_FIELDS) and all(
            len(word) == 1 for word in self.bad_words
        )


def _range_error(params: SamplingParams, name: str, requirement: str) -> RequestError:
    return RequestError(f"{name} is {getattr(params, name)}; it must be {requirement}", name)


# The fields that can change a greedy token. top-k, top-p, min-p and typical-p only restrict the
# random draw.
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
    """Return a uniform number in [0, 1), computed from (seed, position) by SplitMix64."""
    mask = 2**64 - 1
    state = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & mask
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & mask
    return ((state ^ (state >> 31)) >> 11) / 2**53
