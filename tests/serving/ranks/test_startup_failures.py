"""A rank that fails in the start-up while the other rank waits for it in a collective."""

import os
import socket
import threading
from pathlib import Path
from typing import NoReturn

import pytest
import torch.distributed as dist

from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.parallel.collectives import barrier
from serving.config import ServerConfig
from serving.messages import Failed, FromEngineLoop, decode_from_engine_loop
from serving.ranks import startup_exchange
from serving.ranks.message_socket import Channel
from serving.ranks.rank import Rank
from serving.ranks.rank_position import RankPosition
from serving.worker import startup
from tests.support.ranks import ranks
from tests.support.servers import WAIT_S, write_checkpoint

ERROR = "the memory of cuda:1 does not suffice; lower step_tokens_max"


def start_rank(rank: int, folder: str, port: int, failing_rank: int) -> NoReturn:
    """Start a rank of two. On one of them the memory does not suffice for the largest step."""

    def size_kv_cache(model: GPT, *_: object, **__: object) -> NoReturn:
        if rank == failing_rank:
            raise ConfigError(ERROR)
        barrier(model.mesh)
        raise AssertionError("the barrier needs both ranks")

    vars(startup)["size_kv_cache"] = size_kv_cache
    startup_exchange.FAILURE_GRACE_S = 0.1
    dist.destroy_process_group()  # The rank joins its own.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    frontend = Channel(socket.create_connection(("127.0.0.1", port))) if rank == 0 else None
    config = ServerConfig(folder, tp=2, kv_tokens_max=640)
    store = dist.FileStore(f"{folder}.store", 2)  # type: ignore[attr-defined]
    position = RankPosition(rank, 2, rank, 2)
    os._exit(Rank(position, config, store, "127.0.0.1", frontend).run())


@pytest.mark.slow
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_the_front_end_receives_the_error_and_all_ranks_exit(
    tmp_path: Path, failing_rank: int
) -> None:
    folder = write_checkpoint(tmp_path / "model", tokenizer=False)
    messages: list[FromEngineLoop] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def read_frontend() -> None:
            channel = Channel(server.accept()[0])
            while (frame := channel.receive(WAIT_S)) is not None:
                messages.append(decode_from_engine_loop(frame))

        reader = threading.Thread(target=read_frontend, daemon=True)
        reader.start()
        port = server.getsockname()[1]
        with pytest.raises(RuntimeError, match="exit code 1"):
            ranks(2, start_rank, str(folder), port, failing_rank)
        reader.join(WAIT_S)
    assert Failed(ERROR, is_permanent=True) in messages
