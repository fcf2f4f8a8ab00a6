"""How much a model's answers change when its weights are narrowed, measured where it is loaded.

The text is the model's own, drawn before, so what the narrowed one says of it is told in one
number: the mean divergence of next tokens is the logarithm of how much its perplexity grows. Which
settings narrow weights is not known here; that too much is refused, in which words, is.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from gpt.batch import Batch
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.model import pipeline
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling

log = logging.getLogger(__name__)

TEXTS = 8
TEXT_TOKENS = 32
# Perplexity may grow by half a per cent, which is what is lost in silence elsewhere.
DIVERGENCE_MAX = 0.005
# Where experts are nearly equal others are chosen, and then a place differs that is as right.
EXPERTS_DIVERGENCE_MAX = 0.05


@dataclass(frozen=True)
class Drift:
    """What narrowing has changed, over some places of text."""

    places: int
    divergence: float  # The mean over places, in nats; NaN if logits are not finite any more.
    same_best: float  # The share of places with the same likeliest token.
    limit: float = DIVERGENCE_MAX  # Of the divergence.

    @property
    def fine(self) -> bool:
        return self.divergence <= self.limit


class Gate:
    """What a model says of text of its own, to be held against what it says later.

    All ranks of a model make it together, and ask it together. The last stage knows the answer.
    """

    def __init__(self, model: GPT, limit: float | None = None) -> None:
        """`limit`: of the divergence; None: what is fine for such a network."""
        config = model.config
        known = EXPERTS_DIVERGENCE_MAX if config.num_experts else DIVERGENCE_MAX
        self._limit = known if limit is None else limit
        generator = torch.Generator().manual_seed(0)
        firsts = torch.randint(config.vocab_size, (TEXTS, 1), generator=generator).tolist()
        more = min(TEXT_TOKENS, config.max_position_embeddings) - 1
        rule = Sampling(max_new_tokens=more, temperature=1.0)
        made = generate(model, firsts, rule)
        self._texts = [
            first + [token for token in one.token_ids if token >= 0]
            for first, one in zip(firsts, made, strict=True)
        ]
        self._before = self._logits(model)

    def drift(self, model: GPT) -> Drift | None:
        """None on stages that have no logits."""
        after = self._logits(model)
        if after is None or self._before is None:
            return None
        old, new = (x.log_softmax(-1) for x in (self._before, after))
        divergence = (old.exp() * (old - new)).sum(-1)
        same = (old.argmax(-1) == new.argmax(-1)).double()
        numbers = (float(divergence.double().mean()), float(same.mean()))
        return Drift(len(old), *numbers, limit=self._limit)

    @torch.inference_mode()
    def _logits(self, model: GPT) -> Tensor | None:
        device = model.mesh.device
        ids = torch.tensor([token for text in self._texts for token in text], device=device)
        lengths = [len(text) for text in self._texts]
        return pipeline.forward(model, ids, Batch.plain(lengths, device))


def judge(drift: Drift | None, setting: str) -> None:
    """Log what the `setting` has changed, and refuse it if that is too much."""
    if drift is None:
        return
    log.info(
        "event=accuracy setting=%r divergence=%.3g limit=%g same_best=%.3f places=%d",
        *(setting, drift.divergence, drift.limit, drift.same_best, drift.places),
    )
    if not drift.fine:
        raise ConfigError(
            f"with {setting} the model's next tokens diverge by {drift.divergence:.3g} nats from "
            f"what they were, over {drift.places} places of its own text ({drift.same_best:.0%} "
            f"have the same likeliest token); at most {drift.limit:g} is let through: leave "
            "that setting out, or say how much may be (divergence_max)"
        )
