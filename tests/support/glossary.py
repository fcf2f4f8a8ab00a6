"""Glossary of ARCHITECTURE.md: its terms, each with the module that it belongs to."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def glossary_rows(text: str) -> Iterator[tuple[str, str]]:
    """Yield (term, module) for each term in the glossary tables of a document."""
    tables = text.split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
    for terms, module in re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|", tables, re.MULTILINE):
        yield from ((term.strip(), module) for term in terms.split(","))


@cache
def glossary() -> tuple[tuple[str, str], ...]:
    """The (term, module) rows of ARCHITECTURE.md."""
    return tuple(glossary_rows((ROOT / "ARCHITECTURE.md").read_text("utf-8")))
