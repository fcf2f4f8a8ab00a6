"""Imports Megatron-Core 0.19 when it is imported, so that a server of ranks can preload it."""

from tests.support.checkpoints.mcore_hybrid import import_core

import_core()
