"""GPT model, checkpoints and adapters, shared by serving, tuning and the checkpoint tools.

The two public names, `load` and `open_checkpoint`, are imported on first use, so that `gpt.config`
and `gpt.costs.inference` can be imported without torch.
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
