"""The model that serving and tuning share, and the checkpoints it is read from.

The two public names load lazily, so that `gpt.config` and `gpt.costs.inference` can be used without
torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpt.formats.registry import open_checkpoint
    from gpt.model.loading import load

__all__ = ["load", "open_checkpoint"]


def __getattr__(name: str) -> Any:
    if name == "load":
        from gpt.model.loading import load

        return load
    if name == "open_checkpoint":
        from gpt.formats.registry import open_checkpoint

        return open_checkpoint
    raise AttributeError(f"module 'gpt' has no attribute '{name}'")
