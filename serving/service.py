"""Service: a model with its tokenizer and adapters, ready to answer, whoever asks.

`Found` is what a checkpoint's headers tell, in well under a second; a `Service` has the weights and
an engine that runs. The gRPC server and the command in process are two users of the same.
"""

import asyncio
import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from gpt.adapter import Adapter, check_adapter
from gpt.digest import glance, identify
from gpt.errors import CheckpointError, ConfigError
from gpt.loading import check_dtype, device_of, load_model
from gpt.logical import FLOAT_NAMES, Checkpoint, Identity
from gpt.overrides import open_overridden, read_overrides
from gpt.parallel import Mesh
from gpt.proof import Difference, Proof, find_proof, replay
from gpt.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from serving.adapters import Adapters
from serving.admission import Admission
from serving.config import ServerConfig
from serving.engine import Engine, Stream
from serving.request import Ask

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be served, as far as its headers tell. Nothing is loaded yet."""

    config: ServerConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    device: torch.device
    proof: Proof | None

    @classmethod
    def at(cls, config: ServerConfig) -> Self:
        """Refuses what need not be loaded to be refused."""
        device = device_of(config.device)
        check_dtype(config.dtype)
        if config.adapters is not None and not Path(config.adapters).is_dir():
            raise ConfigError(
                f"adapters: {config.adapters} is not a directory; make it, or name another"
            )
        changes = read_overrides(config.config_json, config.true_vocab_size)
        checkpoint = open_overridden(config.model, changes, config.tokenizer)
        proof = find_proof(checkpoint) if config.prove else None
        vocabulary = checkpoint.config.vocab_size
        if checkpoint.tokenizer is None:
            return cls(config, checkpoint, NullTokenizer(vocabulary), device, proof)
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, vocabulary, checkpoint.tokenizer)
        return cls(config, checkpoint, tokenizer, device, proof)


class Service:
    """Loads the weights, proves them, loads the adapters, then starts the engine."""

    def __init__(self, found: Found) -> None:
        self.config = found.config
        self.checkpoint = found.checkpoint
        self.tokenizer = found.tokenizer
        self._identity: Identity | None = None
        self._identifying = threading.Lock()
        self.model = load_model(
            self.checkpoint, Mesh.single(found.device), dtype=self.config.dtype
        ).eval()
        self.proved = None if found.proof is None else self._replay(found.proof)
        self.adapters = Adapters(
            Path(self.config.adapters) if self.config.adapters else None,
            self._check_adapter,
            adapters_max=self.config.adapters_max,
        )
        self.admission = Admission(
            self.tokenizer,
            self.adapters,
            self.model.config.vocab_size,
            self.model.config.max_position_embeddings,
            self.config,
        )
        self.engine = Engine(
            self.model,
            self.tokenizer,
            self.adapters.table,
            running_requests_max=self.config.running_requests_max,
            queue_requests_max=self.config.queue_requests_max,
        )

    async def start(self, ask: Ask, deadline: float | None = None) -> Stream:
        """Accept what is asked, or refuse it. `deadline` is on the monotonic clock."""
        # In a thread: a long text takes a while to tokenize, and an adapter may have to be read.
        request = await asyncio.to_thread(self.admission.admit, ask)
        return self.engine.submit(request, deadline)

    @property
    def name(self) -> str:
        return self.checkpoint.path.resolve().name

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return FLOAT_NAMES[self.model.dtype]

    @property
    def digest(self) -> str:
        """What identifies the weights; empty as long as no adapter needed to know."""
        return self._identity.digest if self._identity else ""

    @property
    def weight_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def close(self) -> None:
        self.engine.close()

    def _replay(self, proof: Proof) -> Difference:
        """Refuse a model that, as it was loaded, does not say what its source did."""
        found = replay(
            proof,
            lambda ids: self.model.logits(ids.to(self.model.mesh.device)),
            self.checkpoint,
            self.dtype,
        )
        log.info(
            "event=proof_replayed difference=%.3g limit=%g best=%d/%d dtype=%s",
            *(found.largest, found.limit, found.best, found.places, found.dtype),
        )
        if not found.same:
            path = self.checkpoint.path
            raise CheckpointError(
                f"{path} does not give the logits that its proof has of its source: "
                f"{found.sentence}; find the tensors that differ with `preamble verify SOURCE "
                f"{path}`, or start it all the same with --no-prove (prove: false)"
            )
        return found

    def _check_adapter(self, adapter: Adapter) -> None:
        card = adapter.card
        with self._identifying:
            identity = self._identity or glance(self.checkpoint)
            unsettled = card.base_digest and card.base_fingerprint != identity.fingerprint
            if unsettled and not identity.digest:
                # Reads every byte of a checkpoint that records no digest, so only if that decides.
                identity = identify(self.checkpoint)
            self._identity = identity
        config = self.model.config.with_fields(dtype=self.dtype)
        for note in check_adapter(adapter, config, identity):
            log.warning("event=adapter_unchecked note=%r", note)
