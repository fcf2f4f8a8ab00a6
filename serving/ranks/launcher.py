"""Rank launcher: creates the front end's transport, one of the two rank supervisors.

If a torchrun worker started the front end, the transport is a `TorchrunSupervisor`; otherwise it is
a `LocalSupervisor`. The environment variables below distinguish the two cases.
"""

import os
from pathlib import Path

from serving.config import ServerConfig
from serving.ranks.supervisor import LocalSupervisor, RankSupervisor
from serving.ranks.torchrun_supervisor import TorchrunSupervisor

# The names of the variables that a torchrun worker sets in the environment of the front end that it
# starts: the front end's private directory, and the process ID of torchrun's agent.
FOLDER_VARIABLE, AGENT_VARIABLE = "PREAMBLE_RANKS_FOLDER", "PREAMBLE_RANKS_AGENT"


def open_transport(config: ServerConfig) -> RankSupervisor:
    """Return the transport, not yet started.

    Raise ConfigError if the socket for torchrun's ranks cannot be created.
    """
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is not None:
        return TorchrunSupervisor(config, Path(folder), int(os.environ[AGENT_VARIABLE]))
    return LocalSupervisor(config)
