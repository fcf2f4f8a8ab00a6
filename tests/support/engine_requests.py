"""Requests to an engine, and what each gets alone."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path

import torch

from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.generation.generate import generate
from gpt.model.gpt_model import GPT
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import NullTokenizer
from serving.config import ServerConfig
from serving.engine.engine import Engine
from serving.engine.stream import Stream
from serving.messages import Rows
from serving.ranks.in_process import Inside
from serving.request import (
    Answer,
    Piece,
    Request,
)
from tests.support.models import CLASSIC

VOCABULARY = CLASSIC.vocab_size
LONG = Sampling(max_new_tokens=50)
SHORT = Sampling(max_new_tokens=5)
DRAWN = Sampling(max_new_tokens=12, temperature=3.0, seed=5)
WAIT_S = 20.0
CONFIG = ServerConfig(
    "none",
    running_requests_max=4,
    queue_requests_max=8,
    kv_block_tokens=4,
    kv_tokens_max=512,
    step_tokens_max=16,
)
TOKENIZER = NullTokenizer(VOCABULARY)


def started(model: GPT, config: ServerConfig = CONFIG) -> Engine:
    engine = Engine(Inside(model, config), TOKENIZER, config)
    engine.start()
    engine.wait()
    return engine


def idle(engine: Engine) -> bool:
    load = engine.load
    return engine.accepted == load.running == load.waiting == load.blocks_held == 0


def written(
    folder: Path, name: str, rows: int, *, fill: float | None = None, width: int = 32
) -> Rows:
    table = torch.randn(rows, width, generator=torch.Generator().manual_seed(rows))
    if fill is not None:
        table.fill_(fill)
    path = folder / f"{name}.safetensors"
    adapter = build_adapter(Card(name), table)
    save_adapter(adapter, path)
    return Rows(adapter.digest, rows, str(path))


def one(
    prompt: tuple[int, ...],
    sampling: Sampling = SHORT,
    *,
    rows: Rows | None = None,
    stops: tuple[str, ...] = (),
) -> Request:
    return Request((Answer(prompt, sampling, stop_strings=stops, rows=rows),))


def alone(model: GPT, answer: Answer) -> list[int]:
    """What the plain loop makes of it."""
    table = open_adapter(Path(answer.rows.file)).table if answer.rows else None
    return generate(model, [answer.prompt], answer.sampling, table=table)[0].token_ids


async def tokens(stream: Stream) -> list[int]:
    return [token async for piece in stream for token in piece.token_ids]


async def taken(stream: Stream) -> list[Piece]:
    return [piece async for piece in stream]


def run(work: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), WAIT_S))
