"""Service: a model with its tokenizer, adapters, admission and engine, ready to answer.

A `ServableCheckpoint` is read from a checkpoint's headers, without its weights. An open `Service`
has an engine. The engine's transport connects it with the ranks, which have the model's weights.
The ranks run in this process or in separate processes. The server, `preamble generate` and the
Python API all use a `Service`.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from gpt.adapters.adapter_file import Adapter, check_adapter
from gpt.adapters.change_log import OBJECTS_FOLDER
from gpt.checkpoint.digest import identify, lookup_identity
from gpt.checkpoint.logical_tensor import ModelIdentity
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.files.abandoned_files import temporary_folder
from gpt.model.loading import check_dtype, parse_device
from gpt.object_store.object_store import ObjectStore, is_object_url
from gpt.object_store.record_log import ObjectRecordLog
from gpt.parallel.adapter_sharding import largest_rank_bytes
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.tokenizers.chat_template import ChatTemplate, find_template
from gpt.tokenizers.tokenizer_info import describe_tokenizer
from serving.adapters.adapter_imports import AdapterImporter, LoraModule
from serving.adapters.mirror_folder import opened_mirror_folder
from serving.adapters.object_mirror import ObjectMirror
from serving.adapters.object_storage import ObjectStorage
from serving.adapters.registry import AdapterRegistry, check_directory
from serving.adapters.version_updates import AdapterStore
from serving.admission.admission import Admission
from serving.admission.chat_prompt import ChatPromptRenderer
from serving.config import AdapterConfig, ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import Stream
from serving.engine.transport import EngineTransport
from serving.file_threads import POLL_OWNER, FileThreads
from serving.memory_budget import ADAPTER_PAGE_BYTES
from serving.model_names import ModelNames
from serving.ranks.in_process import InProcessTransport
from serving.request import Ask, Completion, Request, UnavailableError
from serving.service.error_reasons import reason_name
from serving.service.golden_check import GoldenChecker
from serving.service.kv_capacity import context_concurrency
from serving.service.memory_report import MemoryReport
from serving.worker.startup import WorkerCheckpoint, build_worker, open_for_serving

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServableCheckpoint(WorkerCheckpoint):
    """A checkpoint with its tokenizer, proof, settings and chat template; no weights are loaded."""

    config: ServerConfig
    device: torch.device
    chat_template: ChatTemplate | None = None

    @classmethod
    def from_config(cls, config: ServerConfig) -> Self:
        """Open the checkpoint, and run every check that needs no weights."""
        device = _resolve_device(config.model_config.device)
        check_dtype(config.model_config.dtype)
        for setting in ("adapters", "adapter_imports"):
            folder = getattr(config.adapter_config, setting)
            if folder is not None and not is_object_url(folder):
                check_directory(Path(folder), setting)
        for module in map(LoraModule.parse, config.adapter_config.lora_modules):
            if not Path(module.path).exists():
                raise ConfigError(
                    f"lora_modules: {module.path}, the path of {module.name}, does not exist; give "
                    "the path of an adapter"
                )
        worker_checkpoint = open_for_serving(config, device)
        checkpoint, tokenizer = worker_checkpoint.checkpoint, worker_checkpoint.tokenizer
        return cls(
            checkpoint,
            tokenizer,
            worker_checkpoint.proof,
            config,
            device,
            find_template(checkpoint.tokenizer, tokenizer, config.model_config.chat_template),
        )


class Service:
    """The tokenizer, adapters and admission of a model, and after `open` a running engine."""

    def __init__(self, checkpoint: ServableCheckpoint) -> None:
        self.config = checkpoint.config
        self.checkpoint = checkpoint.checkpoint
        self.tokenizer = checkpoint.tokenizer
        self.chat = ChatPromptRenderer(
            checkpoint.chat_template,
            self.tokenizer,
            self.config.model_config,
            self.config.limits_config,
        )
        self.tokenizer_info = describe_tokenizer(
            self.tokenizer,
            self.checkpoint.tokenizer,
            checkpoint.chat_template,
            self.checkpoint.config.max_position_embeddings,
        )
        self._engine: Engine | None = None
        self._identity: ModelIdentity | None = None
        self._identity_lock = threading.Lock()
        self._pending_admissions = 0  # Number of asks in admission.
        self._resources = ExitStack()
        config = self.checkpoint.config
        self.golden_checker = GoldenChecker(
            self.config.adapter_config,
            self.config.limits_config,
            self.config.scheduler_config,
            self.dtype,
            self.tokenizer,
            config.vocab_size,
        )
        adapter_config = self.config.adapter_config
        self.mirror = self._open_mirror(adapter_config)
        self.adapters = AdapterRegistry(
            self._adapter_directory(adapter_config),
            self._check_adapter,
            adapters_max=adapter_config.adapters_max,
            rank_bytes=self._rank_bytes,
            eligible=self.golden_checker.is_eligible,
            catalog=self.mirror,
        )
        self.store = self._open_adapter_store(adapter_config)
        imports = adapter_config.adapter_imports
        self.importer = AdapterImporter(
            self.store,
            self.checkpoint,
            partial(lookup_identity, self.checkpoint),
            Path(imports) if imports else None,
        )
        self._lora_modules = [LoraModule.parse(text) for text in adapter_config.lora_modules]
        self.file_threads = FileThreads(adapter_config.adapters_answer_s)
        self.admission = Admission(
            self.tokenizer,
            self.adapters,
            config.vocab_size,
            config.max_position_embeddings,
            self.config.limits_config,
            self._kv_tokens,
            self.golden_checker.check_servable,
            lambda: self.base_fingerprint,
        )

    def open(self, transport: EngineTransport) -> Self:
        """Start the engine, scan the adapter directory, and wait until the engine is up."""
        self._load_lora_modules()
        self._engine = Engine(
            transport,
            self.tokenizer,
            self.config.scheduler_config,
            self.config.parallel_config,
            self.config.observability_config,
            adapter_rows_max=self.config.cache_config.adapter_rows_max,
            adapter_pages=self.config.cache_config.adapter_pages,
        )
        self._engine.start()
        self._scan_at_start()
        _ = self.base_fingerprint  # Streams send it, and cannot wait for a disk.
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
        final_only: bool = False,
        charge: Callable[[Request], object] = lambda request: None,
    ) -> Stream:
        """Admit an ask, submit it to the engine, and return its stream; raise if it is refused.

        `deadline` is on the monotonic clock. `charge` is called with the admitted request before
        the request is submitted, and may raise to refuse the request.
        """
        with self.admission_slot():
            await self.load_new_adapters(ask.adapters, ask.tenant)
            # In a thread, because tokenizing a long text blocks.
            has_ended = threading.Event()
            try:
                request = await asyncio.to_thread(self.admission.admit, ask, has_ended.is_set)
            finally:
                has_ended.set()  # The thread of a cancelled call stops early.
        charge(request)
        return self.engine.submit(request, deadline, final_only=final_only)

    async def load_new_adapters(self, names: Collection[str], tenant: str) -> None:
        """Scan the adapter directory if it may have an adapter of `names` that is not loaded.

        An adapter that it does not have is imported if the import directory has a folder of its
        name. Raise UnavailableError if the directory does not answer within `adapters_answer_s`.
        """
        if self.adapters.needs_scan(names, tenant):
            await self.file_threads.run(tenant, self._find_new_adapters, names, tenant)

    def _find_new_adapters(self, names: Collection[str], tenant: str) -> None:
        self.adapters.find_new(names, tenant)
        self.importer.import_missing(names, tenant)

    async def scan_adapters(self) -> None:
        """Scan the adapter directory; raise UnavailableError if the scan makes no progress."""
        future = asyncio.wrap_future(self.file_threads.submit(POLL_OWNER, self.adapters.scan))
        progress = -1
        while progress != self.adapters.scan_progress:
            progress = self.adapters.scan_progress
            await asyncio.wait([future], timeout=self.file_threads.limit_s)
            if future.done():
                return future.result()
        raise UnavailableError(
            f"the adapter directory did not answer within {self.file_threads.limit_s:g} s",
            "STORAGE_TIMEOUT",
        )

    @contextmanager
    def admission_slot(self) -> Iterator[None]:
        """Reserve a place in the engine's queue during admission; raise if the queue is full.

        The check precedes tokenization, so that a refusal under overload costs almost nothing.
        """
        self.engine.check_capacity(self._pending_admissions)
        self._pending_admissions += 1
        try:
            yield
        finally:
            self._pending_admissions -= 1

    def generate(self, asks: Iterable[Ask]) -> list[Completion]:
        """Return the completions of all asks, in order.

        If an ask is invalid, an error is raised and no ask runs.
        """
        asks = list(asks)
        for ask in asks:
            if self.adapters.needs_scan(ask.adapters, ask.tenant):
                self._find_new_adapters(ask.adapters, ask.tenant)
        return self.engine.generate([self.admission.admit(ask) for ask in asks])

    @cached_property
    def model_names(self) -> ModelNames:
        """The names that select the base model in protocols whose requests name a model."""
        config = self.config.model_config
        return ModelNames.build(self.checkpoint.path, config.model, config.served_model_name)

    @property
    def name(self) -> str:
        """The name of the base model in responses."""
        return self.model_names.first

    def adapter_name(self, model: str | None, tenant: str) -> str | None:
        """Return the adapter that a request for `model` means; None: the base model.

        An adapter's name precedes an alias of the base model and a client's placeholder such as
        "default". The returned adapter may not exist.
        """
        if model is None or self.model_names.is_certainly_base(model):
            return None
        if self.model_names.may_be_base(model) and not self.adapters.has(model, tenant):
            return None
        return model

    def listed_names(self, tenant: str) -> list[str]:
        """Return the names of the base model in a tenant's listing of models."""
        return [name for name in self.model_names.listed if self.adapter_name(name, tenant) is None]

    @property
    def dtype(self) -> str:
        """The compute dtype."""
        return self.config.model_config.dtype or self.checkpoint.config.dtype

    @cached_property
    def _served_config(self) -> GPTConfig:
        """The model's configuration with the dtype of this server."""
        return self.checkpoint.config.with_fields(dtype=self.dtype)

    @property
    def digest(self) -> str:
        """The digest of the base model; empty if no check of an adapter has read it yet."""
        return self._identity.digest if self._identity else ""

    @cached_property
    def base_fingerprint(self) -> str:
        """The fingerprint of the base model; reads a few elements of each tensor."""
        with self._identity_lock:
            self._identity = self._identity or lookup_identity(self.checkpoint)
            return self._identity.fingerprint

    @property
    def proof_difference(self) -> float | None:
        """Largest difference between the model's logits and the proof (reference logits).

        The unit is the standard deviation of the logits. None: the checkpoint has no proof.
        """
        ready_message = self.engine.ready_message
        return ready_message.proof[0] if ready_message and ready_message.proof else None

    @property
    def divergence(self) -> list[float] | None:
        """How much quantized weights change the model's outputs; None: no weights are quantized.

        The numbers are described at `Ready.divergence`.
        """
        return self.engine.ready_message.divergence if self.engine.ready_message else None

    @property
    def memory_report(self) -> MemoryReport:
        ready_message = self.engine.ready_message
        assert ready_message is not None
        return MemoryReport.build(
            self.config.scheduler_config,
            self.config.cache_config,
            ready_message.weight_bytes,
            ready_message.kv_tokens,
            int(self.context_concurrency),
            ready_message.step_bytes,
        )

    @property
    def context_concurrency(self) -> float:
        """The number of requests that fit in the KV cache if each of them fills the context."""
        ready_message = self.engine.ready_message
        assert ready_message is not None
        return context_concurrency(
            self.checkpoint.config,
            ready_message.kv_blocks,
            self.config.cache_config.kv_block_tokens,
        )

    @property
    def batch_invariant(self) -> bool:
        """Whether a sequence's results are bit-identical in every batch."""
        return self.engine.ready_message is not None and self.engine.ready_message.batch_invariant

    def close(self) -> None:
        self.chat.close()
        if self._engine is not None:
            self._engine.close()
        self._resources.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _open_mirror(self, config: AdapterConfig) -> ObjectMirror | None:
        """Return the mirror of the object store of adapters; None: there is no store."""
        if config.adapters is None or not is_object_url(config.adapters):
            return None
        store = ObjectStore(config.adapters)
        if config.adapter_mirror is None:
            folder = self._resources.enter_context(temporary_folder("adapters"))
        else:
            folder = Path(config.adapter_mirror)
        mirror_folder = opened_mirror_folder(folder, str(store.url))
        return ObjectMirror(
            store,
            self._resources.enter_context(mirror_folder),
            bytes_max=config.adapter_mirror_bytes_max,
            adapters_max=config.adapters_max,
        )

    def _open_adapter_store(self, config: AdapterConfig) -> AdapterStore:
        if self.mirror is None:
            return AdapterStore(self.adapters, config, reason_name)
        self.mirror.attach(self.adapters, self._used_adapter_files)
        return AdapterStore(
            self.adapters,
            config,
            reason_name,
            storage=ObjectStorage(self.mirror),
            changes_log=ObjectRecordLog(self.mirror.store, OBJECTS_FOLDER),
        )

    def _used_adapter_files(self) -> set[str]:
        return self._engine.adapter_files() if self._engine else set()

    def _adapter_directory(self, config: AdapterConfig) -> Path | None:
        """Return the adapter directory; None: there is none.

        Imported adapters need one. If none is configured, it is a temporary directory.
        """
        if self.mirror is not None:
            return self.mirror.folder.folder
        if config.adapters:
            return Path(config.adapters)
        if config.adapter_imports is None and not config.lora_modules:
            return None
        return self._resources.enter_context(temporary_folder("adapters"))

    def _load_lora_modules(self) -> None:
        """Import `lora_modules` before the ranks load the weights, so that errors appear early."""
        if not self._lora_modules:
            return
        for module in self._lora_modules:
            base_name = module.base_model_name
            if base_name is not None and not self.model_names.may_be_base(base_name):
                raise ConfigError(
                    f"lora_modules: {module.name} has base_model_name {base_name!r}, but this "
                    f"model is {self.name!r}; remove base_model_name"
                )
            self.check_adapter_name(module.name)
        self._sweep_and_scan()
        self.importer.load_modules(self._lora_modules)

    def check_adapter_name(self, name: str) -> None:
        """Refuse a name of the base model for an adapter, which no request could select."""
        if self.model_names.is_certainly_base(name):
            raise RequestError(
                f"{name!r} is a name of the base model; choose another name for the adapter", "name"
            )

    def _scan_at_start(self) -> None:
        """Scan the adapter directory; go on without it if it does not answer."""
        future = self.file_threads.submit(POLL_OWNER, self._sweep_and_scan)
        progress = -1
        while not future.done():
            if progress == self.adapters.scan_progress:
                log.warning("event=adapters_not_scanned reason=%r", "the directory did not answer")
                return
            progress = self.adapters.scan_progress
            wait([future], self.file_threads.limit_s)
        future.result()

    def _sweep_and_scan(self) -> None:
        self.store.prepare()
        if self.mirror is not None:
            self.mirror.poll()
            self.mirror.check_access()
        self.adapters.scan()

    def _kv_tokens(self) -> int | None:
        ready_message = self._engine.ready_message if self._engine else None
        if ready_message is None:
            return None
        return ready_message.sequence_kv_tokens or ready_message.kv_tokens

    def _check_adapter(self, adapter: Adapter) -> None:
        card = adapter.card
        with self._identity_lock:
            identity = self._identity or lookup_identity(self.checkpoint)
            needs_digest = card.base_digest and card.base_fingerprint != identity.fingerprint
            if needs_digest and not identity.digest:
                # The digest is read only if the fingerprints differ, because `identify` may read
                # the whole checkpoint.
                identity = identify(self.checkpoint)
            self._identity = identity
        config = self._served_config
        rows_max = config.max_position_embeddings // 2
        if card.kind == "rows":  # All rows of the adapter must fit on the device at once.
            rows_max = min(rows_max, self.config.cache_config.adapter_rows_max)
        for note in check_adapter(adapter, config, identity, rows_max=rows_max):
            log.warning("event=adapter_unchecked note=%r", note)
        memory_bytes = self.config.cache_config.adapter_pages * ADAPTER_PAGE_BYTES
        if (rank_bytes := self._rank_bytes(adapter)) > memory_bytes:
            raise AdapterError(
                f"the weights of adapter {card.name!r} need {rank_bytes} bytes on a "
                f"rank, but the adapter memory has {memory_bytes}; raise adapter_memory_mb"
            )

    def _rank_bytes(self, adapter: Adapter) -> int:
        """Return the bytes of an adapter's weights on the rank that needs the most."""
        if not adapter.linears:
            return 0
        config, parallel = self.checkpoint.config, self.config.parallel_config
        stages = stage_layers(config.num_layers, parallel.pp)
        return largest_rank_bytes(
            adapter.linears,
            config,
            [[layer for chunk in chunks for layer in chunk] for chunks in stages],
            tp=parallel.tp,
            ep=parallel.ep,
            itemsize=FLOAT_DTYPES[self.dtype].itemsize,
        )


def _resolve_device(name: str) -> torch.device:
    """Return the device called `name`; raise ConfigError if the machine has no device of its type.

    This does not initialize CUDA, because CUDA would take GPU memory that the front end does not
    need.
    """
    if name.startswith("cuda") and torch.cuda.device_count():
        with suppress(RuntimeError):
            return torch.device(name)
    return parse_device(name)


def open_in_process(config: ServerConfig) -> Service:
    """Load the weights in this process, on one rank, and open a service with them."""
    parallel = config.parallel_config
    if parallel.ranks > 1:
        raise ConfigError(
            f"{parallel.flags} need one process per rank; run a server (preamble serve), or use "
            "one rank"
        )
    checkpoint = ServableCheckpoint.from_config(config)
    return Service(checkpoint).open(in_process_transport(checkpoint))


def in_process_transport(checkpoint: ServableCheckpoint) -> InProcessTransport:
    """Load the model in this process, verify its proof, and return a transport to it."""
    worker = build_worker(checkpoint, Mesh.single(checkpoint.device), checkpoint.config)
    return InProcessTransport(
        worker.model, checkpoint.config, checkpoint.tokenizer, report=worker.report
    )
