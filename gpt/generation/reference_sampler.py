"""From a row of logits to a token by a request's rules: the plain twin, one row at a time.

The rules and their order are those of `gpt.sampling_params.Sampling`. Then comes the draw: one
uniform number, made from (seed, position), looked up in the cumulated weights. All in fp64, and by
values, not by ranks: of equal tokens all are kept or none, in whatever order they are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.sampling_params import Sampling, uniform


@dataclass(frozen=True)
class Score:
    """A token by the model's own distribution, before any rule, and the best beside it."""

    logprob: float
    rank: int  # 1 and how many are strictly likelier.
    tops: tuple[tuple[int, float], ...] = ()  # Token id and log-probability, best first.


def choose(
    logits: Tensor, sampling: Sampling, prompt: Sequence[int], made: Sequence[int], position: int
) -> int:
    """The token after `prompt` and `made`, whose place in the sequence is `position`.

    Ids outside the vocabulary are virtual: no rule sees them.
    """
    if sampling.plain or not logits.isfinite().all():
        return int(logits.argmax())
    shaped = shape(logits, sampling, prompt, made)
    if sampling.temperature == 0:
        return int(shaped.argmax())
    cumulated = weigh(shaped, sampling).cumsum(0)
    target = uniform(sampling.seed, position) * cumulated[-1]
    return int(torch.searchsorted(cumulated, target, right=True))


def shape(logits: Tensor, sampling: Sampling, prompt: Sequence[int], made: Sequence[int]) -> Tensor:
    """The logits (V,) in fp64 after bias, penalties, length decay and bans."""
    vocabulary = len(logits)
    x = logits.to(torch.float64, copy=True)
    for token, bias in dict(sampling.logit_bias).items():
        if 0 <= token < vocabulary:
            x[token] += bias
    known = [token for token in made if 0 <= token < vocabulary]
    for token in {*known, *(token for token in prompt if 0 <= token < vocabulary)}:
        penalty, count = sampling.repetition_penalty, known.count(token)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
        x[token] -= sampling.frequency_penalty * count
        x[token] -= sampling.presence_penalty * (count > 0)
    for token in set(sampling.stop_token_ids):
        if 0 <= token < vocabulary:
            x[token] += x[token].abs() * sampling.growth(len(made))
    for banned in _bans(sampling, prompt, made, vocabulary):
        left = x.masked_fill(banned, float("-inf"))
        # A ban that would leave nothing does not count.
        x = left if left.amax() > float("-inf") else x
    return x


def weigh(shaped: Tensor, sampling: Sampling) -> Tensor:
    """What each token (V,) weighs in a draw: the likeliest 1, those left out by a rule 0."""
    # From the best one down, so that a tiny temperature cannot reach infinity but below.
    weights = ((shaped - shaped.amax()) / sampling.temperature).exp()
    kept = weights.sort(descending=True).values
    if 0 < sampling.top_k < len(kept):
        kept = kept[kept >= kept[sampling.top_k - 1]]
    if sampling.top_p < 1:
        # A token stays while those before it have not reached top_p; so the first always stays.
        before = torch.cat([kept.new_zeros(1), kept.cumsum(0)[:-1]])
        kept = kept[before < sampling.top_p * kept.sum()]
    floor = max(float(kept[-1]), sampling.min_p)
    weights = weights.masked_fill(weights < floor, 0)
    return _typical(weights, sampling.typical_p) if sampling.typical_p < 1 else weights


def _typical(weights: Tensor, typical_p: float) -> Tensor:
    """Those (V,) whose surprise is nearest to the expected one, until they make up `typical_p`."""
    p = weights / weights.sum()
    surprise = -p.log()
    expected = (p * surprise)[p > 0].sum()
    distance = (surprise - expected).abs()
    nearest = distance.sort()
    before = (p[nearest.indices].cumsum(0) < typical_p).sum().clamp(max=len(p) - 1)
    return weights.masked_fill(distance > nearest.values[before], 0)


def _bans(
    sampling: Sampling, prompt: Sequence[int], made: Sequence[int], vocabulary: int
) -> Iterator[Tensor]:
    """Masks (V,) of what may not be drawn, those that must hold first."""

    def mask(tokens: Sequence[int]) -> Tensor:
        known = [token for token in tokens if 0 <= token < vocabulary]
        return torch.zeros(vocabulary, dtype=torch.bool).index_fill(
            0, torch.tensor(known).long(), 1
        )

    if sampling.allowed_token_ids:
        yield ~mask(sampling.allowed_token_ids)
    text = (*prompt, *made)
    ends = [
        word[-1]
        for word in sampling.bad_words
        if len(word) <= len(text) + 1 and text[len(text) - len(word) + 1 :] == word[:-1]
    ]
    if ends:
        yield mask(ends)
    if sampling.no_repeat_ngram_size:
        yield mask(_repeats(text, sampling.no_repeat_ngram_size, vocabulary))
    if len(made) < sampling.min_new_tokens:
        yield mask(sampling.stop_token_ids)


def _repeats(text: Sequence[int], size: int, vocabulary: int) -> list[int]:
    """The tokens that would make the last `size` tokens a run that `text` has already."""
    runs = [tuple(text[at : at + size]) for at in range(len(text) - size + 1)]
    begun = tuple(text[len(text) - size + 1 :])
    if not all(0 <= token < vocabulary for token in begun):
        return []  # Virtual tokens are like no other, not even like themselves.
    return [run[-1] for run in runs if run[:-1] == begun]


def score(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[Score]:
    """Each token's place among its row of `logits` (N, V), with as many of the best as `tops` says.

    Of equals the lower id is the better one.
    """
    own = torch.tensor(tokens, device=logits.device).unsqueeze(-1)
    logprobs = logits.log_softmax(-1)
    ranks = 1 + (logits > logits.gather(-1, own)).sum(-1)
    scores = []
    for row, (token, rank, count) in enumerate(zip(tokens, ranks.tolist(), tops, strict=True)):
        best: list[int] = []
        if count:
            best = logits[row].sort(stable=True, descending=True).indices[:count].tolist()
        alternatives = tuple((one, float(logprobs[row, one])) for one in best)
        scores.append(Score(float(logprobs[row, token]), rank, alternatives))
    return scores
