"""From logits to a token: greedy, or drawn after temperature, top-k and top-p.

The draw is counted, not stateful: one uniform number made from (seed, position), looked up in the
cumulated probabilities. So a seed gives the same tokens whatever else is in the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gpt.sampling import Sampling, uniform


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
