"""Field names: translate admission errors to the field names of the caller's protocol.

Admission errors name fields of `Ask`, the request type of all protocols. A field of `Ask` may have
a different name in a protocol, and a caller knows only the protocol's names. Therefore the
protocol's names replace the names of `Ask` in the error's `field` and in the error's message. Each
protocol passes its names to this module.
"""

import re
from collections.abc import Mapping

from gpt.errors import RequestError
from serving.request import RefusedError
from serving.service.error_reasons import reason_of

# Fields of `Ask` whose names are also English words in messages ("the guide allows ...").
MESSAGE_WORDS = ("adapter", "guide")


def translate_error(error: RequestError, names: Mapping[str, str]) -> Exception:
    """Return the error with the protocol's field names.

    `names` maps fields of `Ask`, and parts of fields (such as `guide.json`), to the protocol's
    fields. An error whose field is not in `names` is returned unchanged.
    """
    field = error.field or ""
    if field not in names:
        return error
    protocol_field = names[field]
    return RefusedError(
        reason_of(error).name,
        translate_message(str(error), field, protocol_field, names),
        protocol_field,
    )


def translate_message(text: str, field: str, protocol_field: str, names: Mapping[str, str]) -> str:
    """Replace field names of `Ask` in a message by the protocol's names.

    The first occurrence of `field` becomes `protocol_field`. `names` has the protocol's names of
    the remaining fields. If the protocol's name is a path such as `a.b`, only its last part `b` is
    inserted.
    """
    if field not in MESSAGE_WORDS:
        text = _replace_field(text, field, protocol_field, count=1)
    for other_field, other_name in names.items():
        # Of these names, only names with an underscore are replaced: a name without an underscore
        # may be an English word.
        if "_" in other_field and other_field != field:
            text = _replace_field(text, other_field, other_name)
    return text


def _replace_field(text: str, field: str, protocol_field: str, count: int = 0) -> str:
    """Replace `field` where it is a whole word and not part of a path.

    `count`: the maximum number of replacements; 0: no limit.
    """
    leaf = protocol_field.rpartition(".")[2]
    return re.sub(rf"(?<![\w.]){re.escape(field)}(?!\.?\w)", lambda _: leaf, text, count=count)
