"""Requests to an engine, and the tokens of each request alone."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import torch

from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import SamplingParams
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import Stream
from serving.messages import AdapterRef
from serving.ranks.in_process import InProcessTransport
from serving.request import (
    AnswerSpec,
    Piece,
    Request,
)
from tests.support.models import CLASSIC
from tests.support.servers import WAIT_S

VOCABULARY = CLASSIC.vocab_size
LONG = SamplingParams(max_new_tokens=50)
SHORT = SamplingParams(max_new_tokens=5)
DRAWN = SamplingParams(max_new_tokens=12, temperature=3.0, seed=5)
CONFIG = ServerConfig(
    "none",
    running_requests_max=4,
    queue_requests_max=8,
    kv_block_tokens=4,
    kv_tokens_max=512,
    step_tokens_max=16,
)
TOKENIZER = NullTokenizer(VOCABULARY)


def start_engine(model: GPT, config: ServerConfig = CONFIG) -> Engine:
    engine = Engine(
        InProcessTransport(model, config),
        TOKENIZER,
        config.scheduler_config,
        config.parallel_config,
        config.observability_config,
    )
    engine.start()
    engine.wait()
    return engine


def is_idle(engine: Engine) -> bool:
    load = engine.stats
    return engine.unfinished_sequences == load.running == load.waiting == load.blocks_held == 0


def write_adapter(
    folder: Path, name: str, rows: int, *, fill: float | None = None, width: int = 32
) -> AdapterRef:
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    if fill is not None:
        table.fill_(fill)
    path = folder / f"{name}.safetensors"
    adapter = build_adapter(Card(name), table)
    save_adapter(adapter, path)
    return AdapterRef(adapter.digest, rows, str(path))


def single_request(
    prompt: tuple[int, ...],
    sampling: SamplingParams = SHORT,
    *,
    rows: AdapterRef | None = None,
    stops: tuple[str, ...] = (),
) -> Request:
    return Request((AnswerSpec(prompt, sampling, stop_strings=stops, adapter_ref=rows),))


def generate_alone(model: GPT, answer: AnswerSpec) -> list[int]:
    """The tokens that the reference loop generates for the request."""
    table = open_adapter(Path(answer.adapter_ref.file)).table if answer.adapter_ref else None
    return generate(model, [answer.prompt], answer.sampling, adapter_table=table)[0].token_ids


async def read_tokens(stream: Stream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]


async def read_pieces(stream: Stream) -> list[Piece]:
    return [piece async for piece in stream]


def run_async(work: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), WAIT_S))
