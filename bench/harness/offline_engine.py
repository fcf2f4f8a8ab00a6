"""Offline engine benchmark: throughput, step times and cache hits through the Python API.

The benchmark measures the serving engine without the front end. The model runs in this process, or
in rank processes if it is split. Prompts are random, and every requested token is generated. The
first round is a warm-up. Each round has new prompts, so only the prefix that the prompts of a round
share hits the prefix cache.
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from bench.harness.model_shapes import GPT2
from checkpoints_tools.conversion.convert import write_native
from clients.load.percentiles import quantile
from gpt.adapters.adapter_file import Adapter, open_adapter, save_adapter
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.checkpoint.random_init import random_init_checkpoint
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from gpt.linear_adapter import LinearAdapter
from gpt.model.gpt_model import GPT
from gpt.model.loading import parse_device
from gpt.parallel.adapter_sharding import largest_rank_bytes
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.transport import EngineTransport
from serving.messages import AdapterRef, ServiceClass
from serving.ranks.in_process import InProcessTransport
from serving.ranks.supervisor import LocalSupervisor
from serving.request import AnswerSpec, Completion, Request
from serving.worker.startup import load_worker_model, prepare_weights

if TYPE_CHECKING:
    from serving.service.service import Service

GPT2_SMALL = GPTConfig(
    num_layers=GPT2.settings["n_layer"],
    hidden_size=GPT2.settings["n_embd"],
    num_attention_heads=GPT2.settings["n_head"],
    vocab_size=GPT2.settings["vocab_size"],
    max_position_embeddings=GPT2.settings["n_positions"],
    dtype="bfloat16",
)
# Size of the KV cache in tokens; fixed, so that preemptions do not depend on the machine's memory.
KV_TOKENS = 1 << 16


@dataclass(frozen=True)
class OfflineWorkload:
    """The requests of one round, all submitted at once."""

    requests: int = 32
    prompt_tokens: int = 128  # Per request, shared prefix included.
    shared_tokens: int = 0  # Length of the prefix that all prompts share.
    new_tokens: int = 128
    service_class: ServiceClass = "latency"


@dataclass
class StepStats:
    """Engine statistics, sampled after each step."""

    step_s: list[float] = field(default_factory=list)
    blocks_used_max: int = 0  # Peak number of KV blocks in use.
    blocks: int = 0  # Size of the block pool.


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that only this suite uses."""
    group = parser.add_argument_group("--only engine")
    group.add_argument(
        "--model", metavar="PATH", help="checkpoint (default: GPT-2 small with random weights)"
    )
    group.add_argument(
        "--prompt",
        type=int,
        default=OfflineWorkload.prompt_tokens,
        help="tokens per prompt (default: %(default)s)",
    )
    group.add_argument(
        "--shared",
        type=int,
        default=0,
        help="length in tokens of the prefix that all prompts share (default: 0)",
    )
    group.add_argument(
        "--new",
        type=int,
        default=OfflineWorkload.new_tokens,
        help="new tokens per request (default: %(default)s)",
    )
    group.add_argument(
        "--service",
        choices=get_args(ServiceClass),
        default=OfflineWorkload.service_class,
        help="service class of the requests (default: %(default)s)",
    )
    group.add_argument(
        "--tp", type=int, help="tensor parallel size (default: 1, or as in --config)"
    )
    group.add_argument("--pp", type=int, help="pipeline stages (default: 1, or as in --config)")
    group.add_argument("--config", metavar="F", help="YAML file with server settings")


def run_from_flags(flags: argparse.Namespace) -> Iterator[str]:
    """Run the workload that the flags describe and yield the lines of its report."""
    overrides = {name: getattr(flags, name) for name in ("dtype", "device", "tp", "pp")}
    config = ServerConfig.read(flags.config, {"model": flags.model or "", **overrides})
    if config.cache_config.kv_tokens_max is None:
        config = config.with_fields(kv_tokens_max=KV_TOKENS)
    requests = flags.requests[0] if flags.requests else OfflineWorkload.requests
    workload = OfflineWorkload(requests, flags.prompt, flags.shared, flags.new, flags.service)
    return run_suite(config, workload, flags.rounds)


def run_suite(
    config: ServerConfig,
    workload: OfflineWorkload,
    rounds: int = 3,
    network: GPTConfig = GPT2_SMALL,
) -> Iterator[str]:
    """Yield the lines of the report; a config without a model uses random weights."""
    is_split = config.parallel_config.tp * config.parallel_config.pp > 1
    ranks_text = (
        f"tp {config.parallel_config.tp} x pp {config.parallel_config.pp}"
        if is_split
        else f"{torch.get_num_threads()} threads"
    )
    with _open_engine(config, network) as (engine, vocab_size):
        ready = engine.wait()
        model = Path(config.model_config.model).name or "random weights"
        yield f"{model}, {ready.dtype}, {ranks_text}, torch {torch.__version__}"
        yield (
            f"{workload.requests} requests of {workload.prompt_tokens} tokens "
            f"({workload.shared_tokens} shared) + "
            f"{workload.new_tokens} new tokens, {workload.service_class} class"
        )
        yield from measure_rounds(engine, vocab_size, workload, rounds)


@contextmanager
def _open_engine(config: ServerConfig, network: GPTConfig) -> Iterator[tuple[Engine, int]]:
    """Yield the engine and the vocabulary size of its model."""
    if not config.model_config.model and config.parallel_config.tp * config.parallel_config.pp == 1:
        with running_engine(
            load_for_serving(random_init_checkpoint(network, 0), config), config
        ) as engine:
            yield engine, network.vocab_size
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if not config.model_config.model:
            write_native(random_init_checkpoint(network, 0), Path(folder) / "model")
            config = config.with_fields(model=str(Path(folder) / "model"))
        with open_service(config) as service:
            yield service.engine, service.checkpoint.config.vocab_size


def measure_rounds(
    engine: Engine, vocab_size: int, workload: OfflineWorkload, rounds: int
) -> Iterator[str]:
    """Run a warm-up round and the measured rounds; yield a line per figure."""
    rng = random.Random(0)
    round_s: list[float] = []
    step_stats = StepStats()
    for round_index in range(rounds + 1):
        if round_index == 1:
            stats_before = engine.stats
            record_steps(engine, step_stats)
        requests = random_requests(rng, vocab_size, workload)
        start = time.perf_counter()
        completions = generate_all(engine, requests)
        if round_index:
            round_s.append(time.perf_counter() - start)
        assert (
            sum(len(completion.token_ids) for completion in completions)
            == workload.requests * workload.new_tokens
        )
    engine.on_step = lambda seconds: None
    stats_after, total_s = engine.stats, sum(round_s)
    seconds = statistics.median(round_s)
    prompt_tokens = workload.requests * workload.prompt_tokens
    yield f"prompt tokens/s    {prompt_tokens / seconds:10,.0f}"
    yield f"new tokens/s       {workload.requests * workload.new_tokens / seconds:10,.0f}"
    yield f"requests/s         {workload.requests / seconds:10.2f}"
    low, high = min(round_s), max(round_s)
    yield (
        f"seconds            {seconds:10.2f}  median of {len(round_s)} rounds, "
        f"{low:.2f} to {high:.2f}"
    )
    steps = stats_after.steps - stats_before.steps
    ms = [1e3 * quantile(step_stats.step_s, fraction) for fraction in (0.5, 0.9, 0.99, 1.0)]
    yield f"steps              {steps:10,}  ms: " + ", ".join(
        f"{name} {value:.1f}" for name, value in zip(("p50", "p90", "p99", "max"), ms, strict=True)
    )
    idle_share = max(0.0, 1 - sum(step_stats.step_s) / total_s)
    yield f"between the steps  {100 * idle_share:9.1f}%  of the time"
    scheduled_tokens = stats_after.prompt_tokens - stats_before.prompt_tokens
    hits = stats_after.cached_tokens - stats_before.cached_tokens
    yield (
        f"prefix hits        {100 * hits / scheduled_tokens:9.1f}%  of {scheduled_tokens:,} "
        "prompt tokens"
    )
    yield f"preemptions        {stats_after.preemptions - stats_before.preemptions:10,}"
    drafted = stats_after.drafted_tokens - stats_before.drafted_tokens
    if drafted:
        # Models with random weights repeat themselves, so they accept many n-gram drafts.
        accepted = stats_after.accepted_tokens - stats_before.accepted_tokens
        decoded = stats_after.made_tokens - stats_before.made_tokens - accepted
        yield (
            f"draft acceptance   {100 * accepted / drafted:9.1f}%  of {drafted:,} drafted tokens; "
            f"{1 + accepted / decoded:.2f} new tokens per decode"
        )
    kv_percent = 100 * step_stats.blocks_used_max / max(1, step_stats.blocks)
    yield f"KV memory          {kv_percent:9.1f}%  peak use of {step_stats.blocks:,} blocks"


def record_steps(engine: Engine, step_stats: StepStats) -> None:
    def record_step(seconds: float) -> None:
        stats = engine.stats
        step_stats.step_s.append(seconds)
        step_stats.blocks_used_max = max(step_stats.blocks_used_max, stats.blocks_held)
        step_stats.blocks = stats.blocks

    engine.on_step = record_step


def random_requests(
    rng: random.Random, vocab_size: int, workload: OfflineWorkload
) -> list[Request]:
    shared_prefix = random_ids(rng, vocab_size, workload.shared_tokens)
    return [
        greedy_request(
            shared_prefix
            + random_ids(rng, vocab_size, workload.prompt_tokens - workload.shared_tokens),
            workload.new_tokens,
            workload.service_class,
        )
        for _ in range(workload.requests)
    ]


def greedy_request(
    prompt: tuple[int, ...],
    new_tokens: int,
    service_class: ServiceClass = "latency",
    adapter_ref: AdapterRef | None = None,
) -> Request:
    """Build a greedy request that generates exactly `new_tokens` tokens (no end token)."""
    answer = AnswerSpec(prompt, SamplingParams(new_tokens), adapter_ref=adapter_ref)
    return Request((answer,), service=service_class)


def import_adapters(adapters: Sequence[Path], model: str) -> list[AdapterRef]:
    """Save adapters of other programs as files of ours beside them; return the references."""
    base = open_checkpoint(model)
    references = []
    for path in adapters:
        adapter = open_adapter(path, base=base)
        file = path.with_suffix(".safetensors")
        save_adapter(adapter, file)
        references.append(linear_adapter_ref(adapter, file, base.config))
    return references


def linear_adapter_ref(adapter: Adapter, file: Path, config: GPTConfig) -> AdapterRef:
    """Return the reference to an adapter without virtual tokens, for bf16 on one rank."""
    return AdapterRef(
        adapter.digest,
        0,
        str(file),
        "linears",
        len(adapter.linears),
        adapter.nbytes,
        bf16_bytes(adapter.linears, config),
    )


def bf16_bytes(linears: Mapping[str, LinearAdapter], config: GPTConfig) -> int:
    """Return the bytes of an adapter in bf16 on one rank."""
    return largest_rank_bytes(linears, config, [range(config.num_layers)], tp=1, itemsize=2)


def random_ids(rng: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(vocab_size), k=count))


def generate_all(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Submit all requests at once and return their completions, or raise the first error."""
    completions = engine.generate(requests)
    for completion in completions:
        if completion.error is not None:
            raise completion.error
    return completions


# ------------------------------------------------------------------------------------------ engine


@contextmanager
def open_service(config: ServerConfig) -> "Iterator[Service]":
    """Open a service (model, adapters, engine) without gRPC or HTTP front end."""
    # The service needs gRPC and the compiled protos. The other functions of this module also run
    # on a machine without them.
    from serving.service.service import ServableCheckpoint, Service

    servable = ServableCheckpoint.from_config(config)
    is_split = config.parallel_config.tp * config.parallel_config.pp > 1
    transport = (
        LocalSupervisor(config)
        if is_split
        else InProcessTransport(load_for_serving(servable.checkpoint, config), config)
    )
    with Service(servable).open(transport) as service:
        yield service


@contextmanager
def running_engine(model: GPT, config: ServerConfig, *, warm_up: bool = False) -> Iterator[Engine]:
    """Run an engine for a model that is already loaded in this process.

    `warm_up`: run the warm-up steps, as a server does, before the engine is ready.
    """
    transport = InProcessTransport(model, config, warm_up=warm_up)
    with engine_over(transport, model.config.vocab_size, config) as engine:
        yield engine


@contextmanager
def engine_over(
    transport: EngineTransport, vocab_size: int, config: ServerConfig
) -> Iterator[Engine]:
    """Run an engine over a transport that is not started yet, for example over rank processes."""
    engine = Engine(
        transport,
        NullTokenizer(vocab_size),
        config.scheduler_config,
        config.parallel_config,
        config.observability_config,
    )
    engine.start()
    try:
        engine.wait()
        yield engine
    finally:
        engine.close()


def load_for_serving(checkpoint: Checkpoint, config: ServerConfig) -> GPT:
    """Load the unsplit model in this process and prepare its weights, as a serving rank does."""
    model = load_worker_model(
        checkpoint,
        Mesh.single(parse_device(config.model_config.device)),
        config.model_config,
        config.cache_config,
    )
    prepare_weights(model, config.model_config)
    return model
