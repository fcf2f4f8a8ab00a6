"""Findings of a full scan: faults and remarks.

A finding is a fault if it would change the model's outputs, else a remark, which a person should
check.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One problem; `location` is the subject (a tensor or file), `message` the predicate."""

    location: str
    message: str
    is_fault: bool = True

    @property
    def line(self) -> str:
        return f"{self.location}: {self.message}"
