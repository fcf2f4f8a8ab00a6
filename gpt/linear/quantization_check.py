"""Quantization check: divergence of next-token distributions after weights are quantized.

The check uses texts that the model samples before the quantization. On such texts the mean KL
divergence equals the increase of log(perplexity), so one number describes the change. The module
defines the limit and the error message; the callers quantize the weights.
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
from gpt.sampling_params import SamplingParams

log = logging.getLogger(__name__)

PROBE_TEXTS = 8
PROBE_TEXT_TOKENS = 32
# The largest permitted mean divergence in nats. It corresponds to a growth of perplexity by 0.5%.
# Other engines accept a growth of this size without measuring it.
DIVERGENCE_MAX = 0.005
# The limit for a mixture of experts. It is larger, because rounding can also change which experts
# are chosen, if their scores are nearly equal.
MOE_DIVERGENCE_MAX = 0.05


@dataclass(frozen=True)
class Divergence:
    """The change of the next-token distributions by a quantization."""

    positions: int  # The number of text positions that were compared.
    mean_kl_nats: float  # Mean KL divergence in nats; NaN if a logit is not finite.
    top1_agreement: float  # The fraction of positions whose most likely token did not change.
    limit: float = DIVERGENCE_MAX  # The largest permitted mean_kl_nats.

    @property
    def is_within_limit(self) -> bool:
        return self.mean_kl_nats <= self.limit


class DivergenceProbe:
    """Measures how much a model's next-token distributions change after the probe is constructed.

    The constructor samples texts and computes the reference distributions. All ranks of a model
    must construct the probe together and call `measure` together.
    """

    def __init__(self, model: GPT, limit: float | None = None) -> None:
        """`limit` is the largest mean divergence in nats; None: the default for the model."""
        config = model.config
        default_limit = MOE_DIVERGENCE_MAX if config.num_experts else DIVERGENCE_MAX
        self._limit = default_limit if limit is None else limit
        generator = torch.Generator().manual_seed(0)
        first_tokens = torch.randint(
            config.vocab_size, (PROBE_TEXTS, 1), generator=generator
        ).tolist()
        new_tokens = min(PROBE_TEXT_TOKENS, config.max_position_embeddings) - 1
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=1.0)
        completions = generate(model, first_tokens, sampling)
        self._probe_texts = [
            first_token + [token for token in completion.token_ids if token >= 0]
            for first_token, completion in zip(first_tokens, completions, strict=True)
        ]
        self._reference_logits = self._probe_logits(model)

    def measure(self, model: GPT) -> Divergence | None:
        """Return the divergence from the reference; on all stages but the last, return None."""
        logits = self._probe_logits(model)
        if logits is None or self._reference_logits is None:
            return None
        reference_logprobs, logprobs = (x.log_softmax(-1) for x in (self._reference_logits, logits))
        kl_divergence = (reference_logprobs.exp() * (reference_logprobs - logprobs)).sum(-1)
        same_top1 = (reference_logprobs.argmax(-1) == logprobs.argmax(-1)).double()
        means = (float(kl_divergence.double().mean()), float(same_top1.mean()))
        return Divergence(len(reference_logprobs), *means, limit=self._limit)

    @torch.inference_mode()
    def _probe_logits(self, model: GPT) -> Tensor | None:
        device = model.mesh.device
        ids = torch.tensor([token for text in self._probe_texts for token in text], device=device)
        lengths = [len(text) for text in self._probe_texts]
        return pipeline.forward(model, ids, Batch.unpaged(lengths, device))


def enforce_limit(divergence: Divergence | None, setting: str) -> None:
    """Log the divergence that `setting` causes; raise ConfigError if it exceeds the limit."""
    if divergence is None:
        return
    log.info(
        "event=accuracy setting=%r divergence=%.3g limit=%g same_best=%.3f places=%d",
        setting,
        divergence.mean_kl_nats,
        divergence.limit,
        divergence.top1_agreement,
        divergence.positions,
    )
    if not divergence.is_within_limit:
        raise ConfigError(
            f"with {setting} the model's next-token distributions diverge by "
            f"{divergence.mean_kl_nats:.3g} nats on average, and the most likely token is the same "
            f"at {divergence.top1_agreement:.0%} of the {divergence.positions} compared positions; "
            f"the limit is {divergence.limit:g} nats: remove the setting, or raise divergence_max"
        )
