"""Directory layout: the file names in an adapter directory.

The files are versions, alias records (`alias_record.py`), uploads and unloaded adapters. Hidden
files are unfinished uploads, and unloaded adapters that running requests may still use. This module
opens no file.
"""

import os
from pathlib import Path

from gpt.adapters.adapter_file import SUFFIX, AdapterName, parse_name
from gpt.errors import RequestError

ALIAS_SUFFIX = ".current"
UPLOAD_PREFIX = ".upload-"
UNLOADED_PREFIX = ".gone-"


def unloaded_path(file: Path) -> Path:
    """Return the hidden path to which an unloaded adapter's file is renamed until its removal."""
    return file.with_name(f"{UNLOADED_PREFIX}{file.name}")


def adapter_file_name(name: str, version: int) -> str:
    return f"{name}@{version}{SUFFIX}"


def parse_file_name(file: str) -> AdapterName | None:
    """Return the adapter name and version in a file name; None: the file is not an adapter file."""
    if not file.endswith(SUFFIX):
        return None
    try:
        name, version = parse_name(file.removesuffix(SUFFIX))
    except RequestError:
        return None
    return AdapterName(name, version or 1)


def version_files(folder: Path, name: str) -> dict[int, Path]:
    """Return the files of one adapter name by version, including files that cannot be used."""
    files: dict[int, Path] = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(name):
                adapter_name = parse_file_name(entry.name)
                if adapter_name is not None and adapter_name.name == name and adapter_name.version:
                    files[adapter_name.version] = Path(entry.path)
    return files
