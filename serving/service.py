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
from gpt.checkpoint import open_checkpoint
from gpt.digest import glance, identify
from gpt.errors import ConfigError
from gpt.loading import check_dtype, device_of, load_model
from gpt.logical import FLOAT_NAMES, Checkpoint, Identity
from gpt.parallel import Mesh
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

    @classmethod
    def at(cls, config: ServerConfig) -> Self:
        """Refuses what need not be loaded to be refused."""
        device = device_of(config.device)
        check_dtype(config.dtype)
        if config.adapters is not None and not Path(config.adapters).is_dir():
            raise ConfigError(
                f"adapters: {config.adapters} is not a directory; make it, or name another"
            )
        checkpoint = open_checkpoint(config.model)
        vocabulary = checkpoint.config.vocab_size
        if checkpoint.tokenizer is None:
            return cls(config, checkpoint, NullTokenizer(vocabulary), device)
        tokenizer = open_tokenizer(checkpoint.tokenizer)
        check_tokenizer(tokenizer, vocabulary, checkpoint.tokenizer)
        return cls(config, checkpoint, tokenizer, device)


class Service:
    """Loads the weights, then the adapters, then starts the engine."""

    def __init__(self, found: Found) -> None:
        self.config = found.config
        self.checkpoint = found.checkpoint
        self.tokenizer = found.tokenizer
        self._identity: Identity | None = None
        self._identifying = threading.Lock()
        self.model = load_model(
            self.checkpoint, Mesh.single(found.device), dtype=self.config.dtype
        ).eval()
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
