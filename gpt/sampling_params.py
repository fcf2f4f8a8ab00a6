"""The rules by which a request's tokens are chosen, and the draw itself; plain numbers, no torch.

The draw is counted, not stateful: one uniform number made from (seed, position). So a seed gives
the same tokens whatever else is in the batch, and after a restart. What logits become by the rules
is in `gpt.generation.reference_sampler`, one row at a time, and in the engine's sampler, a batch at
a time.
"""

from dataclasses import dataclass, fields
from math import isfinite, log10

from gpt.errors import RequestError

# The most alternatives that a token may be asked to be given with.
LOGPROBS_MAX = 100
# Counts of tokens are packed on their way, and become floating point numbers.
COUNT_MAX = 2**32 - 1
# To find what was there before costs up to this many looks at the whole text for each token.
NGRAM_MAX = 100
# More than any logit needs to be the largest, and less than makes one infinite.
_GROWTH_DIGITS_MAX = 30


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop. A temperature of 0 is greedy.

    The rules act in transformers' order: bias; repetition, frequency and presence penalty; length
    decay; bans; then, if a token is drawn, temperature, top-k, top-p, min-p and typical-p, each on
    what those before it left. Penalties, bans and what is remembered count tokens of the vocabulary
    only: a virtual token is never repeated, forbidden or wanted. A ban that would leave nothing to
    draw does not count: allowed ids go before bad words, those before n-grams that would come
    again, and those before `min_new_tokens`.
    """

    max_new_tokens: int = 128  # 0: none; the prompt is only scored.
    min_new_tokens: int = 0  # Stop tokens cannot be drawn before.
    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all.
    top_p: float = 1.0
    min_p: float = 0.0  # Of the likeliest token's probability; 0 keeps all.
    # Of those whose surprise is nearest to the expected one, as many as make up this; 1 keeps all.
    typical_p: float = 1.0
    repetition_penalty: float = 1.0  # On tokens of the prompt and of the completion.
    presence_penalty: float = 0.0  # On tokens of the completion, once.
    frequency_penalty: float = 0.0  # On tokens of the completion, each time.
    logit_bias: tuple[tuple[int, float], ...] = ()  # Token id and what is added to its logit.
    allowed_token_ids: tuple[int, ...] = ()  # Nothing else may be drawn. Empty: all.
    no_repeat_ngram_size: int = 0  # No run of so many tokens comes twice, the prompt's included.
    # Runs of tokens that must not become complete, wherever they begin.
    bad_words: tuple[tuple[int, ...], ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    # After so many new tokens the stop tokens' logits grow, by this factor with each one more.
    length_decay: tuple[int, float] | None = None
    seed: int = 0
    logprobs: int | None = None  # Alternatives told with each token made; None: no log-probability.
    prompt_logprobs: int | None = None  # The same for each token of the prompt.

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "min_new_tokens", "top_k"):
            if not 0 <= getattr(self, name) <= COUNT_MAX:
                raise _wrong(self, name, "from 0 to 2^32 - 1")
        if self.min_new_tokens > self.max_new_tokens:
            raise _wrong(self, "min_new_tokens", f"at most max_new_tokens, {self.max_new_tokens}")
        if not 0 <= self.no_repeat_ngram_size <= NGRAM_MAX:
            raise _wrong(self, "no_repeat_ngram_size", f"from 0 (off) to {NGRAM_MAX}")
        self._check_numbers()
        if not 0 <= self.seed < 2**64:
            raise _wrong(self, "seed", "from 0 to 2^64 - 1")
        for name in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, name)
            if asked is not None and not 0 <= asked <= LOGPROBS_MAX:
                raise _wrong(self, name, f"from 0 to {LOGPROBS_MAX}")
        if not all(self.bad_words):
            raise _wrong(self, "bad_words", "words of at least one token each")
        if not all(isfinite(bias) and abs(bias) <= 100 for _, bias in self.logit_bias):
            raise _wrong(self, "logit_bias", "from -100 to 100 for each token")

    def _check_numbers(self) -> None:
        for name, low, high, wanted in (
            ("temperature", 0, 100, "from 0 (greedy) to 100"),
            ("min_p", 0, 1, "from 0 (off) to 1"),
            ("presence_penalty", -2, 2, "from -2 to 2"),
            ("frequency_penalty", -2, 2, "from -2 to 2"),
        ):
            if not low <= getattr(self, name) <= high:  # NaN is in no range.
                raise _wrong(self, name, wanted)
        for name in ("top_p", "typical_p"):
            if not 0 < getattr(self, name) <= 1:
                raise _wrong(self, name, "in (0, 1]")
        # A logit that is divided by next to nothing is not finite any more.
        if not 0.01 <= self.repetition_penalty <= 10:
            raise _wrong(self, "repetition_penalty", "from 0.01 to 10")
        start, factor = self.length_decay or (0, 1)
        if not (0 <= start <= COUNT_MAX and 1 <= factor <= 10):
            wanted = "a number of tokens from 0 to 2^32 - 1 and a factor from 1 to 10"
            raise _wrong(self, "length_decay", wanted)

    @property
    def plain(self) -> bool:
        """Whether the likeliest token of the bare logits is the choice: the common, quick case."""
        return self.temperature == 0 and all(
            getattr(self, field.name) == field.default for field in _SHAPING
        )

    def growth(self, made: int) -> float:
        """How much of its own size is added to a stop token's logit after `made` new tokens."""
        start, factor = self.length_decay or (made, 1.0)
        past = max(0, made - start)
        if past * log10(factor) > _GROWTH_DIGITS_MAX:
            return 10.0**_GROWTH_DIGITS_MAX
        return float(factor**past - 1)

    @property
    def stateless(self) -> bool:
        """Whether a choice depends on its logits, the seed and the position alone.

        Then those of several positions can be made before it is known which of them count.
        """
        return all(getattr(self, field.name) == field.default for field in _REMEMBERING) and all(
            len(word) == 1 for word in self.bad_words
        )


def _wrong(sampling: Sampling, name: str, wanted: str) -> RequestError:
    return RequestError(f"{name} is {getattr(sampling, name)}; it must be {wanted}", name)


# The fields that change logits before the choice, besides the temperature. What only narrows a draw
# (top-k, top-p, min-p, typical-p) does nothing where none is made.
_SHAPING = [
    field
    for field in fields(Sampling)
    if field.name
    in (
        *("min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size", "length_decay"),
    )
]

# Those whose effect depends on what was made, or on how much.
_REMEMBERING = [
    field
    for field in fields(Sampling)
    if field.name
    in (
        *("min_new_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("no_repeat_ngram_size", "length_decay"),
    )
]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that (seed, position) decides: SplitMix64."""
    mask = 2**64 - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return ((x ^ (x >> 31)) >> 11) / 2**53
