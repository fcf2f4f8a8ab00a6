"""Cached folders: checkpoint files that were unpacked or fetched into the user's cache directory.

A folder appears complete, by a rename, and is used by all later processes. Its name is a hash of
what it was made from, so a changed source has another folder. Nothing is removed from the cache.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt.checkpoint.digest import digest_cache_folder
from gpt.files.abandoned_files import remove_abandoned_partials
from gpt.files.atomic_files import stage_folder


def cache_root(kind: str) -> Path:
    """Return the folder of all cached folders of a kind."""
    return digest_cache_folder().parent / kind


def cached_folder(kind: str, key_parts: Sequence[object], fill: Callable[[Path], None]) -> Path:
    """Return the folder in the user's cache that belongs to `kind` and `key_parts`.

    If the folder does not exist yet, it is created, and `fill` writes its content.
    """
    root = cache_root(kind)
    folder = root / hashlib.sha256(json.dumps(key_parts).encode()).hexdigest()[:32]
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    remove_abandoned_partials(root)
    try:
        with stage_folder(folder) as partial_folder:
            fill(partial_folder)
    except OSError:
        # If the folder exists now, another process created it first.
        if not folder.is_dir():
            raise
    return folder
