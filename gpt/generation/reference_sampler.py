"""Reference sampler: logits processors and the seeded draw, one row of logits at a time.

The logits processors and their order are those of `gpt.sampling_params.SamplingParams`. To draw a
token, a uniform number is computed from (seed, position) and searched in the cumulative
probabilities. All arithmetic is fp64. Filters such as top-k compare probabilities with a threshold,
so tokens with equal probabilities either all remain or are all removed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.sampling_params import SamplingParams, uniform_draw


@dataclass(frozen=True)
class Score:
    """A token's log-probability and rank, computed from the logits before logits processing."""

    logprob: float
    rank: int  # 1 + the number of strictly more likely tokens.
    tops: tuple[tuple[int, float], ...] = ()  # Most likely tokens: id and log-probability.


def sample_token(
    logits: Tensor,
    sampling: SamplingParams,
    prompt: Sequence[int],
    output_ids: Sequence[int],
    position: int,
) -> int:
    """Return the sampled token at `position`, which follows `prompt` and `output_ids`.

    Ids outside the vocabulary are virtual tokens, which the logits processors ignore.
    """
    if sampling.is_plain_greedy or not logits.isfinite().all():
        return int(logits.argmax())
    processed_logits = process_logits(logits, sampling, prompt, output_ids)
    if sampling.temperature == 0:
        return int(processed_logits.argmax())
    cumulative_weights = sampling_weights(processed_logits, sampling).cumsum(0)
    target = uniform_draw(sampling.seed, position) * cumulative_weights[-1]
    return int(torch.searchsorted(cumulative_weights, target, right=True))


def process_logits(
    logits: Tensor, sampling: SamplingParams, prompt: Sequence[int], output_ids: Sequence[int]
) -> Tensor:
    """Return the logits (V,) in fp64 after bias, penalties, length decay and bans."""
    vocab_size = len(logits)
    x = logits.to(torch.float64, copy=True)
    for token, bias in dict(sampling.logit_bias).items():
        if 0 <= token < vocab_size:
            x[token] += bias
    vocab_output_ids = [token for token in output_ids if 0 <= token < vocab_size]
    for token in {*vocab_output_ids, *(token for token in prompt if 0 <= token < vocab_size)}:
        penalty, count = sampling.repetition_penalty, vocab_output_ids.count(token)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= sampling.frequency_penalty * count
        x[token] -= sampling.presence_penalty * (count > 0)
    for token in set(sampling.stop_token_ids):
        if 0 <= token < vocab_size:
            x[token] += x[token].abs() * sampling.stop_logit_growth(len(output_ids))
    for ban_mask in _ban_masks(sampling, prompt, output_ids, vocab_size):
        masked_logits = x.masked_fill(ban_mask, float("-inf"))
        if masked_logits.amax() > float("-inf"):  # Otherwise the ban would leave no token.
            x = masked_logits
    return x


def sampling_weights(logits: Tensor, sampling: SamplingParams) -> Tensor:
    """Return unnormalized probabilities (V,); tokens that a filter removes have 0.

    The other tokens have their probability divided by the largest probability.
    """
    # The maximum is subtracted first, so that the division by a tiny temperature can overflow only
    # to -inf, not to +inf.
    weights = ((logits - logits.amax()) / sampling.temperature).exp()
    # The weights of the remaining tokens, in descending order.
    sorted_weights = weights.sort(descending=True).values
    if 0 < sampling.top_k < len(sorted_weights):
        sorted_weights = sorted_weights[sorted_weights >= sorted_weights[sampling.top_k - 1]]
    if sampling.top_p < 1:
        # A token remains if the mass of the tokens before it is below top_p. Therefore the first
        # token always remains.
        mass_before = torch.cat([sorted_weights.new_zeros(1), sorted_weights.cumsum(0)[:-1]])
        sorted_weights = sorted_weights[mass_before < sampling.top_p * sorted_weights.sum()]
    weight_min = max(float(sorted_weights[-1]), sampling.min_p)
    weights = weights.masked_fill(weights < weight_min, 0)
    return _apply_typical_p(weights, sampling.typical_p) if sampling.typical_p < 1 else weights


def _apply_typical_p(weights: Tensor, typical_p: float) -> Tensor:
    """Return `weights` with 0 for the tokens that typical-p removes.

    The tokens whose surprisal is nearest to the entropy remain, up to a mass of `typical_p`.
    """
    p = weights / weights.sum()
    surprisal = -p.log()
    entropy = (p * surprisal)[p > 0].sum()
    distance = (surprisal - entropy).abs()
    sorted_distance = distance.sort()
    cutoff = (p[sorted_distance.indices].cumsum(0) < typical_p).sum().clamp(max=len(p) - 1)
    return weights.masked_fill(distance > sorted_distance.values[cutoff], 0)


def _ban_masks(
    sampling: SamplingParams, prompt: Sequence[int], output_ids: Sequence[int], vocab_size: int
) -> Iterator[Tensor]:
    """Yield one mask (V,) of banned tokens per kind of ban, in the order of application."""

    def token_mask(tokens: Sequence[int]) -> Tensor:
        vocab_ids = [token for token in tokens if 0 <= token < vocab_size]
        return torch.zeros(vocab_size, dtype=torch.bool).index_fill(
            0, torch.tensor(vocab_ids).long(), 1
        )

    if sampling.allowed_token_ids:
        yield ~token_mask(sampling.allowed_token_ids)
    token_ids = (*prompt, *output_ids)
    banned_ids = [
        bad_word[-1]
        for bad_word in sampling.bad_words
        if len(bad_word) <= len(token_ids) + 1
        and token_ids[len(token_ids) - len(bad_word) + 1 :] == bad_word[:-1]
    ]
    if banned_ids:
        yield token_mask(banned_ids)
    if sampling.no_repeat_ngram_size:
        yield token_mask(_repeated_ngram_ends(token_ids, sampling.no_repeat_ngram_size, vocab_size))
    if len(output_ids) < sampling.min_new_tokens:
        yield token_mask(sampling.stop_token_ids)


def _repeated_ngram_ends(token_ids: Sequence[int], size: int, vocab_size: int) -> list[int]:
    """Return each token that would complete an n-gram which `token_ids` already has.

    `size` is n.
    """
    ngrams = [tuple(token_ids[start : start + size]) for start in range(len(token_ids) - size + 1)]
    ngram_prefix = tuple(token_ids[len(token_ids) - size + 1 :])
    if not all(0 <= token < vocab_size for token in ngram_prefix):
        return []  # Repetition of an n-gram with virtual tokens is allowed.
    return [ngram[-1] for ngram in ngrams if ngram[:-1] == ngram_prefix]


def score_tokens(logits: Tensor, tokens: Sequence[int], top_counts: Sequence[int]) -> list[Score]:
    """Return the score of each token in its row of `logits` (N, V).

    `top_counts` is, for each row, the number of most likely tokens in the score. Of equally likely
    tokens, the lower id is first.
    """
    token_column = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    logprobs = logits.log_softmax(-1)
    ranks = 1 + (logits > logits.gather(-1, token_column)).sum(-1)
    scores = []
    for row, (token, rank, count) in enumerate(
        zip(tokens, ranks.tolist(), top_counts, strict=True)
    ):
        best_ids: list[int] = []
        if count:
            best_ids = logits[row].sort(stable=True, descending=True).indices[:count].tolist()
        alternatives = tuple((token_id, float(logprobs[row, token_id])) for token_id in best_ids)
        scores.append(Score(float(logprobs[row, token]), rank, alternatives))
    return scores
