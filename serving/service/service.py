"""Service: a model with its tokenizer and adapters, ready to answer, whoever asks.

`Found` is what a checkpoint's headers tell, in well under a second; a `Service` that is open has an
engine, and behind its link, here or in other processes, the weights. The gRPC server, the command
in process and the Python API are users of the same.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from gpt.adapters.adapter_file import Adapter, check_adapter
from gpt.attention.selector import check as check_attention
from gpt.checkpoint.digest import glance, identify
from gpt.checkpoint.logical_tensor import Checkpoint, Identity
from gpt.errors import ConfigError
from gpt.formats.overrides import open_overridden, read_overrides
from gpt.model.loading import check_dtype, device_of
from gpt.model.reference_logits import Proof, find_proof
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import check_split
from gpt.tokenizers.chat_template import ChatTemplate, find_template
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, check_tokenizer, open_tokenizer
from serving.adapters.registry import Adapters
from serving.adapters.store import AdapterStore
from serving.admission.admission import Admission
from serving.admission.chat_prompt import Chat
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import Stream
from serving.engine.transport import Link
from serving.ranks.in_process import Inside
from serving.ranks.rank import arrange, load, prove
from serving.request import Ask, Completion, Request
from serving.service.golden_check import Replays
from serving.service.memory_report import Ledger

log = logging.getLogger(__name__)

# The model alone, the same whatever is served.
BASE_NAME = "preamble"


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be served, as far as its headers tell. Nothing is loaded yet."""

    config: ServerConfig
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    device: torch.device
    proof: Proof | None
    chat_template: ChatTemplate | None = None

    @classmethod
    def at(cls, config: ServerConfig) -> Self:
        """Refuses what need not be loaded to be refused."""
        device = _device(config.device)
        check_dtype(config.dtype)
        if config.adapters is not None and not Path(config.adapters).is_dir():
            raise ConfigError(
                f"adapters: {config.adapters} is not a directory; make it, or name another"
            )
        changes = read_overrides(config.config_json, config.true_vocab_size)
        checkpoint = open_overridden(config.model, changes, config.tokenizer)
        check_split(checkpoint.config, config.tp, config.pp)
        if device.type == "cpu":  # What a GPU has its ranks find out: to ask would take its memory.
            check_attention(
                config.attention_backend,
                checkpoint.config,
                device,
                dtype=config.dtype,
                kv_dtype=config.kv_dtype,
            )
        proof = find_proof(checkpoint) if config.prove else None
        vocabulary = checkpoint.config.vocab_size
        tokenizer: Tokenizer = NullTokenizer(vocabulary)
        if checkpoint.tokenizer is not None:
            tokenizer = open_tokenizer(checkpoint.tokenizer)
            check_tokenizer(tokenizer, vocabulary, checkpoint.tokenizer)
        chat = find_template(checkpoint.tokenizer, tokenizer, config.chat_template)
        return cls(config, checkpoint, tokenizer, device, proof, chat)


class Service:
    """A tokenizer, adapters and an admission; and, once it is open, an engine that runs."""

    def __init__(self, found: Found) -> None:
        self.config = found.config
        self.checkpoint = found.checkpoint
        self.tokenizer = found.tokenizer
        self.chat = Chat(found.chat_template, self.tokenizer, self.config)
        self._engine: Engine | None = None
        self._identity: Identity | None = None
        self._identifying = threading.Lock()
        self._admitting = 0  # Asks on their way to the engine.
        config = self.checkpoint.config
        self.replays = Replays(self.config, self.dtype, self.tokenizer, config.vocab_size)
        self.adapters = Adapters(
            Path(self.config.adapters) if self.config.adapters else None,
            self._check_adapter,
            adapters_max=self.config.adapters_max,
            ripe=self.replays.ripe,
        )
        self.store = AdapterStore(self.adapters, self.config)
        self.admission = Admission(
            self.tokenizer,
            self.adapters,
            config.vocab_size,
            config.max_position_embeddings,
            self.config,
            self._kv_tokens,
            self.replays.check,
        )

    def open(self, link: Link) -> Self:
        """Start what runs the model, read the adapters meanwhile, and wait until it answers."""
        self._engine = Engine(link, self.tokenizer, self.config)
        self._engine.start()
        self.store.sweep()
        self.adapters.scan()
        for note in self._engine.wait().notes:
            log.info("event=engine_note note=%r", note)
        return self

    @property
    def engine(self) -> Engine:
        assert self._engine is not None, "not open yet"
        return self._engine

    async def start(
        self,
        ask: Ask,
        deadline: float | None = None,
        *,
        whole: bool = False,
        charge: Callable[[Request], object] = lambda request: None,
    ) -> Stream:
        """Accept what is asked, or refuse it. `deadline` is on the monotonic clock.

        `charge` is told of a request that can be, before it is accepted; it may refuse it too.
        """
        with self.coming():
            # In a thread: a long text takes a while to tokenize, an adapter may have to be read.
            request = await asyncio.to_thread(self.admission.admit, ask)
        charge(request)
        return self.engine.submit(request, deadline, whole=whole)

    @contextmanager
    def coming(self) -> Iterator[None]:
        """Around all that is done for an ask before it is accepted, so that for one without room
        nothing is done: under overload a refusal costs next to nothing.
        """
        self.engine.check_room(self._admitting)
        self._admitting += 1
        try:
            yield
        finally:
            self._admitting -= 1

    def generate(self, asks: Iterable[Ask]) -> list[Completion]:
        """Every ask's answers, in order. The first one that cannot be is raised before any runs."""
        return self.engine.generate([self.admission.admit(ask) for ask in asks])

    @cached_property
    def name(self) -> str:
        return self.checkpoint.path.resolve().name

    @property
    def base_names(self) -> tuple[str, str]:
        """What the model alone is called where models are named; no adapter is meant by these."""
        return self.name, BASE_NAME

    @property
    def dtype(self) -> str:
        """What it computes in."""
        return self.config.dtype or self.checkpoint.config.dtype

    @property
    def digest(self) -> str:
        """What identifies the weights; empty as long as no adapter needed to know."""
        return self._identity.digest if self._identity else ""

    @property
    def proved(self) -> float | None:
        """How far the ranks' model was from its proof, if it was replayed."""
        facts = self.engine.facts
        return facts.proof[0] if facts and facts.proof else None

    @property
    def drift(self) -> list[float] | None:
        """What narrowed weights have changed, where they were narrowed: see `Ready`."""
        return self.engine.facts.drift if self.engine.facts else None

    @property
    def ledger(self) -> Ledger:
        facts = self.engine.facts
        assert facts is not None
        context = self.checkpoint.config.max_position_embeddings
        return Ledger.of(self.config, facts.weight_bytes, facts.kv_tokens, context)

    @property
    def batch_invariant(self) -> bool:
        """Whether a row's numbers are the same to the bit in whatever batch."""
        return self.engine.facts is not None and self.engine.facts.batch_invariant

    def close(self) -> None:
        self.chat.close()
        if self._engine is not None:
            self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _kv_tokens(self) -> int | None:
        facts = self._engine.facts if self._engine else None
        return facts.kv_tokens if facts else None

    def _check_adapter(self, adapter: Adapter) -> None:
        card = adapter.card
        with self._identifying:
            identity = self._identity or glance(self.checkpoint)
            unsettled = card.base_digest and card.base_fingerprint != identity.fingerprint
            if unsettled and not identity.digest:
                # Reads every byte of a checkpoint that records no digest, so only if that decides.
                identity = identify(self.checkpoint)
            self._identity = identity
        config = self.checkpoint.config.with_fields(dtype=self.dtype)
        rows_max = config.max_position_embeddings // 2
        if card.kind == "rows":  # All of them must have room on the device at once.
            rows_max = min(rows_max, self.config.adapter_rows_max)
        for note in check_adapter(adapter, config, identity, rows_max=rows_max):
            log.warning("event=adapter_unchecked note=%r", note)


def _device(name: str) -> torch.device:
    """The device, if it is there. A front end runs nothing on it, and so takes no memory of it."""
    if name.startswith("cuda") and torch.cuda.device_count():
        with suppress(RuntimeError):
            return torch.device(name)
    return device_of(name)


def open_inside(config: ServerConfig) -> Service:
    """A service with its model in this process, on one rank: the weights are loaded first."""
    if config.tp * config.pp > 1:
        raise ConfigError(
            f"--tp {config.tp} and --pp {config.pp} need processes of their own; run a server "
            "(preamble serve), or use one rank"
        )
    found = Found.at(config)
    return Service(found).open(inside(found))


def inside(found: Found) -> Inside:
    """A link to the model, loaded and proved here."""
    model = load(found.checkpoint, Mesh.single(found.device), found.config)
    size = sum(parameter.nbytes for parameter in model.parameters())
    narrow = found.config.narrow
    if not narrow:
        arrange(model, found.config)
    if found.proof is not None:  # Of the form that answers, unless that has lost digits.
        prove(model, found.checkpoint, found.proof)
    if narrow:
        size -= arrange(model, found.config).freed_bytes
    return Inside(model, found.config, found.tokenizer, weight_bytes=size)
