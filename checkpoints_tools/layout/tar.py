"""A tar whose weights are still to come: every byte's place, before any is there.

Members are plain files, one after the other, each in whole blocks behind a header. Headers say
nothing that differs between two runs: no time, no owner. A member beyond 8 GiB has its size in the
binary form that tars of today read. A member may be an archive of `torch.save`.
It knows no models.
"""

import tarfile
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoints_tools.layout.layout import File, Patch, Placement, Text
from checkpoints_tools.layout.torch_save import archive

NAME_BYTES_MAX = 100  # More would need a second header.


@dataclass
class Tar:
    """Members in the order in which they are added; `close` gives the file."""

    end: int = 0
    texts: list[Text] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)

    def text(self, name: str, content: bytes) -> None:
        self._open(name, len(content))
        self.texts.append(Text(self.end, content))
        self._skip(len(content))

    def archive(self, name: str, record: Any) -> None:
        """What `torch.save` would make of plain values in which tensors are `Promise`s."""
        made = archive(record, self.end + tarfile.BLOCKSIZE)
        self._open(name, made.size)
        before = len(self.placements)
        self.texts += made.texts
        self.placements += made.placements
        self.patches += [replace(one, placement=one.placement + before) for one in made.patches]
        self._skip(made.size)

    def close(self, path: str) -> File:
        """Two empty blocks end it, and it is filled up to a whole record."""
        size = self.end + 2 * tarfile.BLOCKSIZE
        size += -size % tarfile.RECORDSIZE
        return File(path, size, tuple(self.texts), tuple(self.placements), tuple(self.patches))

    def _open(self, name: str, size: int) -> None:
        assert len(name.encode()) <= NAME_BYTES_MAX, name
        member = tarfile.TarInfo(name)
        member.size, member.mode, member.mtime = size, 0o644, 0
        self.texts.append(Text(self.end, member.tobuf(tarfile.GNU_FORMAT)))
        self.end += tarfile.BLOCKSIZE

    def _skip(self, size: int) -> None:
        self.end += size + -size % tarfile.BLOCKSIZE
