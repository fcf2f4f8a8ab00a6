"""The process of a rank that a supervisor starts: `python -m serving.ranks.rank_process`.

It is told who it is through its standard input. That it ends with its parent is settled in its
first moments, before torch, which takes seconds, is loaded.
"""

import logging
import os
import signal
import socket
import sys

import msgspec

from gpt.child_processes import end_with
from serving.logs import log_to_stderr
from serving.ranks.message_socket import Channel
from serving.ranks.rank_position import Charge

log = logging.getLogger(__name__)


def main() -> int:
    charge = msgspec.json.decode(sys.stdin.buffer.read(), type=Charge)
    end_with(charge.parent)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # These are for the front end, which tells us.
    log_to_stderr(charge.config.log_format, charge.place.rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    front = None if charge.front is None else Channel(socket.socket(fileno=charge.front))

    import torch.distributed as dist

    from serving.ranks.rank import Rank, share_cores

    share_cores(charge.place, said=True)
    file = f"/proc/self/fd/{charge.store}"
    store = dist.FileStore(file, charge.place.ranks)  # type: ignore[attr-defined]
    return Rank(charge.place, charge.config, store, "127.0.0.1", front).run()


if __name__ == "__main__":
    try:
        code = main()
    except BaseException:
        log.exception("event=rank_failed")
        code = 1
    sys.stderr.flush()
    os._exit(code)  # At once: torch's own goodbye waits for peers.
