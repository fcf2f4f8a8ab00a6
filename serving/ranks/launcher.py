"""Rank launcher: selects the transport, a local supervisor or the supervisor of torchrun's ranks.

The environment variables below select the supervisor of torchrun's ranks.
"""

import os
from pathlib import Path

from serving.config import ServerConfig
from serving.ranks.supervisor import LocalSupervisor, RankSupervisor
from serving.ranks.torchrun_supervisor import TorchrunSupervisor

# A torchrun worker sets both in the environment of the front end that it starts.
FOLDER_VARIABLE, AGENT_VARIABLE = "PREAMBLE_RANKS_FOLDER", "PREAMBLE_RANKS_AGENT"


def open_transport(config: ServerConfig) -> RankSupervisor:
    """Return the transport, not yet started.

    Raise ConfigError if the socket for torchrun's ranks cannot be created.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        return TorchrunSupervisor(config, Path(folder), int(os.environ[AGENT_VARIABLE]))
    return LocalSupervisor(config)
