"""Layout of a tar file: plans every member's header and offset without reading weights.

A member is a header block and the bytes of a regular file, padded to whole 512-byte blocks. Headers
have no time and no owner, so two runs write the same bytes. The size of a member over 8 GiB is
stored in GNU's binary form, which current tar programs can read. A member may be a `torch.save`
archive. The module is independent of the model.
"""

import tarfile
from dataclasses import dataclass, field, replace
from typing import Any

from checkpoints_tools.layout.layout import CrcPatch, LiteralBytes, Placement, TargetFile
from checkpoints_tools.layout.torch_save import plan_archive

NAME_BYTES_MAX = 100  # A longer member name would need a second header.


@dataclass
class TarLayout:
    """Builds a tar file: add the members in order, then call `finish`."""

    end: int = 0  # Offset of the next member.
    literals: list[LiteralBytes] = field(default_factory=list)
    placements: list[Placement] = field(default_factory=list)
    patches: list[CrcPatch] = field(default_factory=list)

    def add_bytes(self, name: str, content: bytes) -> None:
        self._begin_member(name, len(content))
        self.literals.append(LiteralBytes(self.end, content))
        self._advance(len(content))

    def add_torch_archive(self, name: str, record: Any) -> None:
        """Add `record` as `torch.save` would write it.

        `record` contains a `TensorPlaceholder` in place of each tensor.
        """
        archive = plan_archive(record, self.end + tarfile.BLOCKSIZE)
        self._begin_member(name, archive.size)
        placements_before = len(self.placements)
        self.literals += archive.literals
        self.placements += archive.placements
        self.patches += [
            replace(patch, placement_index=patch.placement_index + placements_before)
            for patch in archive.patches
        ]
        self._advance(archive.size)

    def finish(self, path: str) -> TargetFile:
        """Return the planned file.

        The file ends with two empty blocks, and with zeros up to a multiple of 10,240 bytes (one
        tar record).
        """
        size = self.end + 2 * tarfile.BLOCKSIZE
        size += -size % tarfile.RECORDSIZE
        return TargetFile(
            path, size, tuple(self.literals), tuple(self.placements), tuple(self.patches)
        )

    def _begin_member(self, name: str, size: int) -> None:
        assert len(name.encode()) <= NAME_BYTES_MAX, name
        member = tarfile.TarInfo(name)
        member.size = size
        member.mode = 0o644
        member.mtime = 0
        self.literals.append(LiteralBytes(self.end, member.tobuf(tarfile.GNU_FORMAT)))
        self.end += tarfile.BLOCKSIZE

    def _advance(self, size: int) -> None:
        self.end += size + -size % tarfile.BLOCKSIZE
