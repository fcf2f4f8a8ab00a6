"""Naming: what the admission refuses, said in the words of the wire that it came by.

An ask calls a field one name, a wire another. A caller knows only the wire's, so both the field and
the sentence get that one. Knows no wire.
"""

import re
from collections.abc import Mapping

from gpt.errors import RequestError
from serving.request import RefusedError
from serving.service.error_reasons import reason_of


def said_as(error: RequestError, names: Mapping[str, str]) -> Exception:
    """The same refusal by the wire's names."""
    own = error.field or ""
    if own not in names:
        return error
    named = names[own]
    return RefusedError(reason_of(error).name, worded(str(error), own, named, names), named)


def worded(text: str, own: str, named: str, names: Mapping[str, str]) -> str:
    """A sentence about the field `own`; of a path such as `a.b` it has the end."""
    if own != "adapter":  # Which is a word of the sentence, too.
        text = _replaced(text, own, named, count=1)
    for other, name in names.items():
        if "_" in other and other != own:  # No word that a sentence might have by itself.
            text = _replaced(text, other, name)
    return text


def _replaced(text: str, own: str, named: str, count: int = 0) -> str:
    leaf = named.rpartition(".")[2]
    return re.sub(rf"(?<![\w.]){re.escape(own)}(?!\.?\w)", lambda _: leaf, text, count=count)
