"""Findings of a full scan: faults and remarks.

A fault changes the model's outputs. A remark is a suspicious property, which the user should check.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One problem; `line` is the sentence "location: message"."""

    location: str  # A tensor's name or a file's path.
    message: str  # What is wrong, without the location.
    is_fault: bool = True

    @property
    def line(self) -> str:
        return f"{self.location}: {self.message}"
