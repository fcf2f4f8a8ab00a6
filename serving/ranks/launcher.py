"""Which link a front end has: to ranks of its own, or to those that torchrun starts.

The environment decides, which a worker of torchrun prepares for the front end that it starts. How
the engine uses its link is not known here.
"""

import os
from pathlib import Path

from serving.config import ServerConfig
from serving.ranks.supervisor import Keeper, Supervisor
from serving.ranks.torchrun_supervisor import Outside

# Set for a front end by the worker that starts it.
FOLDER, AGENT = "PREAMBLE_RANKS_FOLDER", "PREAMBLE_RANKS_AGENT"


def open_link(config: ServerConfig) -> Keeper:
    """Not started yet. Refuses what this machine cannot do."""
    folder = os.environ.get(FOLDER)
    if folder is not None:
        return Outside(config, Path(folder), int(os.environ[AGENT]))
    return Supervisor(config)
