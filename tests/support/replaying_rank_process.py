"""A rank process that captures its decode steps on a CPU, and may exit or hang in a replay.

It stands for serving.ranks.rank_process of a rank with a GPU. A replay runs the captured work
again. If the file that FAULT_FILE names exists, rank 1 removes it at its next replay, and then
exits, or stops for ever, as the file says.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch.distributed as dist

from serving.ranks import rank, rank_process
from serving.worker import startup
from serving.worker.cuda_graphs import Work
from serving.worker.model_runner import ModelRunner
from tests.support.capturable_attention import CapturableAttention

FAULT_FILE = "PREAMBLE_TEST_FAULT_FILE"
EXIT, HANG, EXIT_CODE = "exit", "hang", 7
MODULE = "tests.support.replaying_rank_process"


def capture(work: Work) -> Work:
    work()
    path = Path(os.environ[FAULT_FILE])

    def replay() -> None:
        if dist.get_rank() == 1 and path.exists():
            fault = path.read_text()
            path.unlink()
            if fault == EXIT:
                os._exit(EXIT_CODE)
            time.sleep(3600)
        work()

    return replay


def main() -> int:
    vars(rank)["ModelRunner"] = partial(ModelRunner, capturer=capture)
    vars(startup)["select_backend"] = lambda *_, **__: CapturableAttention()
    return rank_process.main()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
