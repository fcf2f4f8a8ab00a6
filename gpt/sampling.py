"""From logits to a token: greedy, or drawn after temperature, top-k and top-p.

The draw is counted, not stateful: one uniform number made from (seed, position), looked up in the
cumulated probabilities. So a seed gives the same tokens whatever else is in the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.errors import RequestError


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop. A temperature of 0 is greedy."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0  # 0 keeps all.
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise RequestError(
                f"max_new_tokens is {self.max_new_tokens}; it must be at least 1", "max_new_tokens"
            )
        if not 0 <= self.temperature <= 100:
            raise RequestError(
                f"temperature is {self.temperature}; it must be from 0 (greedy) to 100",
                "temperature",
            )
        if self.top_k < 0:
            raise RequestError(f"top_k is {self.top_k}; it must be 0 (off) or more", "top_k")
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; it must be in (0, 1]", "top_p")
        if not 0 <= self.seed < 2**64:
            raise RequestError(f"seed is {self.seed}; it must be from 0 to 2^64 - 1", "seed")


def choose(logits: Tensor, samplings: Sequence[Sampling], positions: Sequence[int]) -> Tensor:
    """One token for each row of logits (B, V); `positions` are those that the tokens will have."""
    greedy = logits.argmax(-1)
    drawn = [row for row, sampling in enumerate(samplings) if sampling.temperature > 0]
    if not drawn:
        return greedy
    chosen = [samplings[row] for row in drawn]
    device, wide = logits.device, torch.promote_types(logits.dtype, torch.float32)
    temperature = torch.tensor([s.temperature for s in chosen], device=device, dtype=wide)
    # From the best one down, so that a tiny temperature cannot reach infinity but below.
    below = logits[drawn].to(wide) - logits[drawn].amax(-1, keepdim=True)
    scaled = keep_likely(below / temperature.unsqueeze(-1), chosen)
    uniforms = [uniform(s.seed, positions[row]) for row, s in zip(drawn, chosen, strict=True)]
    # fp64 sums: with a large vocabulary fp32 would lose the tail that a uniform can point to.
    cumulated = scaled.softmax(-1, dtype=torch.float64).cumsum(-1)
    target = torch.tensor(uniforms, device=device, dtype=torch.float64) * cumulated[:, -1]
    picked = torch.searchsorted(cumulated, target.unsqueeze(-1), right=True).squeeze(-1)
    greedy[drawn] = picked.clamp(max=logits.shape[-1] - 1)
    return greedy


def keep_likely(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Logits with everything outside each row's top-k and top-p at minus infinity."""
    if all(s.top_k == 0 and s.top_p == 1 for s in samplings):
        return logits
    vocabulary = logits.shape[-1]
    ordered, order = logits.sort(stable=True, dim=-1, descending=True)
    ks = [min(s.top_k, vocabulary) or vocabulary for s in samplings]
    top_k = torch.tensor(ks, device=logits.device).unsqueeze(-1)
    drop = torch.arange(vocabulary, device=logits.device) >= top_k
    probabilities = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    top_p = torch.tensor([s.top_p for s in samplings], device=logits.device).unsqueeze(-1)
    # A token stays while those before it have not reached top_p; so the first always stays.
    drop |= (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), float("-inf"))


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that (seed, position) decides: SplitMix64."""
    mask = 2**64 - 1
    x = (seed + (position + 1) * 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return ((x ^ (x >> 31)) >> 11) / 2**53
