"""Model names: the names under which requests can select the base model.

OpenAI's, KServe's and TGI's requests name a model. `ModelNames` holds the name of the base model,
its aliases, and the path of its checkpoint, which clients may use as well. `Service.adapter_name`
decides whether the model of a request is the base model or an adapter. This module imports neither
torch nor gRPC nor asyncio.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A name that selects the base model on every server, whatever its checkpoint.
BASE_MODEL_ALIAS = "preamble"

# Clients send these names if their user named no model: huggingface_hub sends "dummy", clients of
# TGI send "tgi", and others send "default" or an empty text.
PLACEHOLDER_NAMES = ("", "dummy", "tgi", "default")

# Folder names that describe a format or a training step, but no model. A hash is the name of a
# snapshot in a cache of Hugging Face. `checkpoint` is not in the list, because servers of a folder
# of this name have always called the model so.
_GENERIC_FOLDER = re.compile(
    r"release|iter_\d+|step[_-]?\d+|global_step\d+|checkpoint-\d+|checkpoints|ckpts|snapshots"
    r"|hf([_-](model|checkpoint|format|release))?|hugging[_-]?face|[0-9a-f]{32,64}",
    re.IGNORECASE,
)
# A repository's folder in the cache of Hugging Face: models--ORGANIZATION--NAME.
_HUGGINGFACE_CACHE_PREFIX = re.compile(r"models--(?:.+?--)?(?=.)")
_ARCHIVE_SUFFIX = ".nemo"


@dataclass(frozen=True)
class ModelNames:
    """The names of the base model.

    `fixed` names always mean the base model, and the first one is in every response. `aliases` mean
    the base model unless an adapter has the same name. `paths` are accepted, but not listed.
    """

    fixed: tuple[str, ...]
    aliases: tuple[str, ...]
    paths: frozenset[str]

    @classmethod
    def build(cls, checkpoint: Path, model: str, served_model_names: Sequence[str]) -> "ModelNames":
        """Return the names of a checkpoint.

        `checkpoint`: the folder or file that is read, for example the folder `iter_0000100` of the
        checkpoint `model`. `served_model_names`: the operator's names; empty: use folder names.
        """
        folder_names = _folder_names(checkpoint)
        names = tuple(served_model_names) or folder_names[:1]
        fixed = tuple(dict.fromkeys((*names, BASE_MODEL_ALIAS)))
        aliases = tuple(name for name in folder_names if name not in fixed)
        paths = {model, os.path.abspath(model), str(checkpoint), os.path.abspath(checkpoint)}
        return cls(fixed, aliases, frozenset(paths))

    @property
    def first(self) -> str:
        """The name of the base model in responses, metrics and logs."""
        return self.fixed[0]

    @property
    def listed(self) -> tuple[str, ...]:
        """The names in listings of models."""
        return (*self.fixed, *self.aliases)

    def is_certainly_base(self, model: str) -> bool:
        """Return whether a request for `model` means the base model, whatever adapters exist."""
        return model in self.fixed

    def may_be_base(self, model: str) -> bool:
        """Return whether `model` means the base model if no adapter has this name."""
        return (
            model in self.fixed
            or model in self.aliases
            or model in PLACEHOLDER_NAMES
            or model in self.paths
            or model.rstrip("/") in self.paths
        )


def _folder_names(checkpoint: Path) -> tuple[str, ...]:
    """Return the names that a checkpoint's path gives to its model, best first.

    The best name is the one of the innermost folder whose name is not generic. The names of the
    generic folders inside it follow, innermost first.
    """
    path = checkpoint.resolve()
    generic_names: list[str] = []
    while _GENERIC_FOLDER.fullmatch(path.name) and path.parent.name:
        generic_names.append(path.name)
        path = path.parent
    name = path.name or BASE_MODEL_ALIAS
    short_name = _HUGGINGFACE_CACHE_PREFIX.sub("", name.removesuffix(_ARCHIVE_SUFFIX), count=1)
    return tuple(dict.fromkeys((short_name or name, *generic_names, name)))
