"""Rank process: entry point of a rank that the supervisor starts; reads its spec from stdin.

It runs as `python -m serving.ranks.rank_process`. Before it imports torch, which takes seconds, it
asks the kernel to kill it when the thread that started it ends. This is the supervisor's thread,
which runs until its ranks have ended, so the kernel kills a rank only if the supervisor's process
ends before the rank.
"""

import logging
import os
import signal
import socket
import sys

import msgspec

from gpt.child_processes import die_with_parent
from gpt.cpu_threads import set_thread_count
from gpt.garbage_collection import imports_without_collections
from serving.config import ServerConfig, is_loopback
from serving.logs import log_to_stderr
from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import Store
from serving.ranks.rank_position import WorkerSpec

log = logging.getLogger(__name__)


def main() -> int:
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerSpec)
    die_with_parent(spec.parent_pid)
    config = ServerConfig(**spec.config)
    for signal_number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        # The front end handles these signals, and tells the ranks by messages what to do.
        signal.signal(signal_number, signal.SIG_IGN)
    log_to_stderr(config.observability_config.log_format, spec.position.rank)
    if is_loopback(spec.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    frontend = None if spec.frontend_fd is None else Channel(socket.socket(fileno=spec.frontend_fd))

    with imports_without_collections():
        from serving.ranks.rank import Rank

    set_thread_count(spec.position.local_world_size)
    return Rank(spec.position, config, _open_store(spec), spec.host, frontend).run()


def _open_store(spec: WorkerSpec) -> Store:
    import torch.distributed as dist

    if spec.store_port is not None:
        store: Store = dist.TCPStore(spec.host, spec.store_port)  # type: ignore[attr-defined]
        return store
    store_path = f"/proc/self/fd/{spec.store_fd}"
    store = dist.FileStore(store_path, spec.position.world_size)  # type: ignore[attr-defined]
    return store


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        log.exception("event=rank_failed")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # A normal exit would wait for other ranks in torch's clean-up.
