"""The engine without a server: a list of requests through the Python API, and what became of them.

The same engine that serves, with its model in this process, or in rank processes where the model is
split. Every prompt is random and every token that is asked for is made. A first round is not
counted; of the others each has new prompts, so that only what they are told to share is cached.
"""

import argparse
import math
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import torch

from bench.harness.model_shapes import GPT2
from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.checkpoint.random_init import fresh
from gpt.config import GPTConfig
from gpt.model.gpt_model import GPT
from gpt.model.loading import device_of
from gpt.parallel.mesh import Mesh
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.messages import ServiceClass
from serving.ranks.in_process import Inside
from serving.ranks.rank import arrange, load
from serving.ranks.supervisor import Supervisor
from serving.request import Answer, Completion, Request
from serving.service.service import Found, Service

GPT2_SMALL = GPTConfig(
    num_layers=GPT2.settings["n_layer"],
    hidden_size=GPT2.settings["n_embd"],
    num_attention_heads=GPT2.settings["n_head"],
    vocab_size=GPT2.settings["vocab_size"],
    max_position_embeddings=GPT2.settings["n_positions"],
    dtype="bfloat16",
)
# Whatever the machine, so that its memory does not decide what is preempted.
KV_TOKENS = 1 << 16


@dataclass(frozen=True)
class Work:
    """What is asked in a round, all at once."""

    requests: int = 32
    prompt: int = 128  # Tokens of each, and
    shared: int = 0  # how many of them all begin with.
    new: int = 128
    service: ServiceClass = "latency"


@dataclass
class Watched:
    """What the engine said of itself after each step."""

    step_s: list[float] = field(default_factory=list)
    blocks_held: int = 0  # At most.
    blocks: int = 0


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Beside --requests, --rounds, --dtype and --device, which other tables have, too."""
    group = parser.add_argument_group("--only engine")
    group.add_argument("--model", metavar="PATH", help="default: GPT-2 small, random weights")
    group.add_argument("--prompt", type=int, default=Work.prompt, help="tokens of each prompt")
    group.add_argument("--shared", type=int, default=0, help="of these, which all begin with")
    group.add_argument("--new", type=int, default=Work.new, help="tokens of each answer")
    group.add_argument("--service", choices=get_args(ServiceClass), default=Work.service)
    group.add_argument("--tp", type=int, help="tensor ranks, in processes of their own")
    group.add_argument("--pp", type=int, help="pipeline stages, likewise")
    group.add_argument("--config", metavar="F", help="a YAML file with limits of the server's")


def asked(flags: argparse.Namespace) -> Iterator[str]:
    """The report that flags ask for."""
    given = {name: getattr(flags, name) for name in ("dtype", "device", "tp", "pp")}
    config = ServerConfig.read(flags.config, {"model": flags.model or "", **given})
    if config.kv_tokens_max is None:
        config = replace(config, kv_tokens_max=KV_TOKENS)
    requests = flags.requests[0] if flags.requests else Work.requests
    work = Work(requests, flags.prompt, flags.shared, flags.new, flags.service)
    return lines(config, work, flags.rounds)


def lines(
    config: ServerConfig, work: Work, rounds: int = 3, network: GPTConfig = GPT2_SMALL
) -> Iterator[str]:
    """The report. A config without a model means one with random weights."""
    split = config.tp * config.pp > 1
    ranks = f"tp {config.tp} x pp {config.pp}" if split else f"{torch.get_num_threads()} threads"
    with _engine(config, network) as (engine, vocab_size):
        facts = engine.wait()
        model = Path(config.model).name or "random weights"
        yield f"{model}, {facts.dtype}, {ranks}, torch {torch.__version__}"
        yield (
            f"{work.requests} requests of {work.prompt} tokens ({work.shared} shared) + "
            f"{work.new} new ones, {work.service} class"
        )
        yield from report(engine, vocab_size, work, rounds)


@contextmanager
def _engine(config: ServerConfig, network: GPTConfig) -> Iterator[tuple[Engine, int]]:
    """And the size of its model's vocabulary."""
    if not config.model and config.tp * config.pp == 1:
        with engine_of(loaded(fresh(network, 0), config), config) as engine:
            yield engine, network.vocab_size
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if not config.model:
            write_native(fresh(network, 0), Path(folder) / "model")
            config = replace(config, model=str(Path(folder) / "model"))
        with service_of(config) as service:
            yield service.engine, service.checkpoint.config.vocab_size


def report(engine: Engine, vocab_size: int, work: Work, rounds: int) -> Iterator[str]:
    draw = random.Random(0)
    spent: list[float] = []
    watched = Watched()
    for turn in range(rounds + 1):
        if turn == 1:
            before = engine.load
            watch(engine, watched)
        requests = drawn(draw, vocab_size, work)
        start = time.perf_counter()
        made = answered(engine, requests)
        if turn:
            spent.append(time.perf_counter() - start)
        assert sum(len(one.token_ids) for one in made) == work.requests * work.new
    engine.on_step = lambda seconds: None
    after, whole = engine.load, sum(spent)
    seconds = statistics.median(spent)
    prompt_tokens = work.requests * work.prompt
    yield f"prompt tokens/s    {prompt_tokens / seconds:10,.0f}"
    yield f"new tokens/s       {work.requests * work.new / seconds:10,.0f}"
    yield f"requests/s         {work.requests / seconds:10.2f}"
    low, high = min(spent), max(spent)
    yield f"seconds            {seconds:10.2f}  of {len(spent)} rounds from {low:.2f} to {high:.2f}"
    steps = after.steps - before.steps
    ms = [1e3 * quantile(watched.step_s, part) for part in (0.5, 0.9, 0.99, 1.0)]
    yield f"steps              {steps:10,}  ms: " + ", ".join(
        f"{name} {value:.1f}" for name, value in zip(("p50", "p90", "p99", "max"), ms, strict=True)
    )
    outside = max(0.0, 1 - sum(watched.step_s) / whole)
    yield f"between the steps  {100 * outside:9.1f}%  of the time"
    asked = after.prompt_tokens - before.prompt_tokens
    hits = after.cached_tokens - before.cached_tokens
    yield f"prefix hits        {100 * hits / asked:9.1f}%  of {asked:,} prompt tokens"
    yield f"preemptions        {after.preemptions - before.preemptions:10,}"
    drafted = after.drafted_tokens - before.drafted_tokens
    if drafted:
        # Models with random weights repeat themselves, which flatters guessing ahead.
        right = after.accepted_tokens - before.accepted_tokens
        plain = after.made_tokens - before.made_tokens - right
        yield (
            f"guessed right      {100 * right / drafted:9.1f}%  of {drafted:,} tokens; "
            f"{1 + right / plain:.2f} new ones at a time"
        )
    held = 100 * watched.blocks_held / max(1, watched.blocks)
    yield f"KV memory          {held:9.1f}%  held at most, of {watched.blocks:,} blocks"


def watch(engine: Engine, watched: Watched) -> None:
    def note(seconds: float) -> None:
        load = engine.load
        watched.step_s.append(seconds)
        watched.blocks_held = max(watched.blocks_held, load.blocks_held)
        watched.blocks = load.blocks

    engine.on_step = note


def drawn(draw: random.Random, vocab_size: int, work: Work) -> list[Request]:
    beginning = ids(draw, vocab_size, work.shared)
    return [
        asking(beginning + ids(draw, vocab_size, work.prompt - work.shared), work.new, work.service)
        for _ in range(work.requests)
    ]


def asking(prompt: tuple[int, ...], new: int, service: ServiceClass = "latency") -> Request:
    """One greedy answer that nothing ends before its last token."""
    return Request((Answer(prompt, Sampling(new)),), service=service)


def ids(draw: random.Random, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(draw.choices(range(vocab_size), k=count))


def answered(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """All of them at once; a bench has no use for a part of them."""
    made = engine.generate(requests)
    for one in made:
        if one.error is not None:
            raise one.error
    return made


def quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else 0.0


# ------------------------------------------------------------------------------------- the engine


@contextmanager
def service_of(config: ServerConfig) -> Iterator[Service]:
    """All that serving has but the surfaces."""
    found = Found.at(config)
    split = config.tp * config.pp > 1
    link = Supervisor(config) if split else Inside(loaded(found.checkpoint, config), config)
    with Service(found).open(link) as service:
        yield service


@contextmanager
def engine_of(model: GPT, config: ServerConfig) -> Iterator[Engine]:
    """An engine alone, for a model that is there."""
    engine = Engine(Inside(model, config), NullTokenizer(model.config.vocab_size), config)
    engine.start()
    try:
        engine.wait()
        yield engine
    finally:
        engine.close()


def loaded(checkpoint: Checkpoint, config: ServerConfig) -> GPT:
    """On one rank, as a rank that serves has it."""
    model = load(checkpoint, Mesh.single(device_of(config.device)), config)
    arrange(model, config)
    return model
