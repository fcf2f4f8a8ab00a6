"""Files that are there whole or not at all, whatever ends the writer.

A new file is written beside the old one and takes its name. Knows nothing of what is in them.
"""

import os
import secrets
from contextlib import suppress
from pathlib import Path


def put(path: Path, content: bytes) -> Path:
    """What is lacking, such as room, is the caller's OSError."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_bytes(content)
        os.replace(part, path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    return path
