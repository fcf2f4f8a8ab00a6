"""What an adapter is: a table of numbers, and a card that says what they are for.

An adapter never changes once it is built, and its digest names what it does to a model: two with
one digest give the same prompts to the same base. The card is plain JSON and comes back from it
exactly. Knows no files.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gpt.adapters.prompt_template import Template
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.settings import settings

# A name becomes a file's name and an alias in requests, so it cannot climb out of a directory,
# hide itself, or look like an option. Versions have no leading zeros: one version, one spelling.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
VERSION = re.compile(r"[1-9][0-9]{0,5}")

CARD_BYTES_MAX = 1 << 20
STOPS_MAX = 16  # As many, and as long, as a request's own may be.
STOP_BYTES_MAX = 256
TABLE_BYTES_MAX = 1 << 30  # 8,192 rows of a model 32,768 wide.
GOLDEN_MAX = 32  # Examples that travel with an adapter; a server replays all of them.

# What a table is. "rows": hidden states that stand where an embedding's would. "prefix": keys and
# values of each layer for tokens before all others; seen as (tokens, layers, 2, KV heads, channels)
# it has the keys, as attention reads them, and then the values.
KINDS = ("rows", "prefix")


class Name(NamedTuple):
    name: str
    version: int | None  # None: whichever is current.


def parse_name(text: str) -> Name:
    """`refunds@3` names a version, `refunds` the current one."""
    name, at, version = text.partition("@")
    if not NAME.fullmatch(name) or (at and not VERSION.fullmatch(version)):
        shown = text if len(text) <= 60 else text[:60] + "..."
        raise RequestError(
            f"{shown!r} is no adapter's name; a name has 1 to 100 letters, digits, dots, dashes "
            "and underscores, and begins with a letter or digit; a version follows as @3",
            "adapter",
        )
    return Name(name, int(version) if at else None)


@dataclass(frozen=True)
class Golden:
    """An example that the adapter's owner lets travel with it, to check it where it arrives."""

    inputs: Mapping[str, str]
    output: str  # What greedy decoding wrote.
    token_ids: tuple[int, ...] = ()  # With the one that stopped it. Empty: only the text is known.
    logprob: float | None = None  # The sum over these tokens.
    dtype: str = ""  # What that was computed in.

    def __post_init__(self) -> None:
        if any(token < 0 for token in self.token_ids):
            raise AdapterError("a golden example has a negative token id; make it again")
        if self.logprob is not None and not (self.token_ids and -math.inf < self.logprob <= 0):
            raise AdapterError(
                f"a golden example has the log-probability {self.logprob} of "
                f"{len(self.token_ids)} tokens; it needs tokens, and a finite number up to 0"
            )

    def to_dict(self) -> dict[str, Any]:
        """Only what is known, so that a card of texts alone is as it always was."""
        record: dict[str, Any] = {"inputs": dict(self.inputs), "output": self.output}
        more = {"token_ids": list(self.token_ids), "logprob": self.logprob, "dtype": self.dtype}
        return record | {name: value for name, value in more.items() if value not in ([], None, "")}


@dataclass(frozen=True)
class Card:
    """Everything about an adapter but its numbers. A size of zero means: as the table has it."""

    name: str
    task: str = ""
    base_digest: str | None = None  # None: the format that it came from does not say.
    base_fingerprint: str | None = None
    template: Template | None = None  # None: all rows, then the text.
    method: str = ""
    kind: str = "rows"  # One of KINDS.
    hidden_size: int = 0  # The table's width.
    virtual_tokens: int = 0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # Stop strings, where a request names none.
    max_new_tokens: int | None = None
    golden: tuple[Golden, ...] = ()
    notes: tuple[str, ...] = ()
    created: str = ""  # ISO 8601, UTC.

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise AdapterError(
                f"an adapter's card has the name {self.name[:60]!r}; it needs 1 to 100 letters, "
                "digits, dots, dashes and underscores, the first a letter or digit"
            )
        if self.kind not in KINDS:
            raise AdapterError(
                f"the card of {self.name!r} has the kind {self.kind[:40]!r}; known are: "
                f"{', '.join(KINDS)}"
            )
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise AdapterError(
                f"the card of {self.name!r} has max_new_tokens {self.max_new_tokens}; it must be "
                "at least 1"
            )
        if len(self.golden) > GOLDEN_MAX:
            raise AdapterError(
                f"the card of {self.name!r} has {len(self.golden)} golden examples; at most "
                f"{GOLDEN_MAX} travel with an adapter: leave some out"
            )
        try:
            text = self.to_json()
            exact = json.loads(text) == self.to_dict()
            # Half a surrogate pair is JSON, and yet no text that can be sent or shown.
            json.dumps(self.to_dict(), ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise AdapterError(
                f"the card of {self.name!r} has {error.object[error.start]!r}, which is half a "
                "character and cannot be written as UTF-8; take it out"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise AdapterError(f"the card of {self.name!r} is not JSON: {error}") from None
        if len(text) > CARD_BYTES_MAX:
            raise AdapterError(
                f"the card of {self.name!r} is {len(text)} bytes; at most {CARD_BYTES_MAX} are "
                "read again: shorten its texts"
            )
        self._check_stops()
        if not exact:
            raise AdapterError(
                f"the card of {self.name!r} would not come back from JSON as it is; use texts as "
                "keys, and lists instead of tuples, in metrics"
            )

    def _check_stops(self) -> None:
        """An empty stop would end every answer before its first letter."""
        if len(self.stop) > STOPS_MAX:
            raise AdapterError(
                f"the card of {self.name!r} has {len(self.stop)} stops; at most {STOPS_MAX} may be"
            )
        for stop in self.stop:
            size = len(stop.encode())
            if not 1 <= size <= STOP_BYTES_MAX:
                raise AdapterError(
                    f"the card of {self.name!r} has a stop of {size} bytes; each needs 1 to "
                    f"{STOP_BYTES_MAX}"
                )

    def to_dict(self) -> dict[str, Any]:
        record = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.kind == "rows":  # As it was before there were others.
            del record["kind"]
        return record | {
            "template": self.template.to_dict() if self.template else None,
            "metrics": dict(self.metrics),
            "stop": list(self.stop),
            "golden": [one.to_dict() for one in self.golden],
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`; an unknown key is an error."""
        try:
            if len(text) > CARD_BYTES_MAX:
                raise ConfigError(f"it is {len(text)} bytes; at most {CARD_BYTES_MAX} are read")
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ConfigError("it is not a JSON object")
            if isinstance(record.get("template"), dict):
                record["template"] = Template.from_dict(record["template"])
            if isinstance(record.get("golden"), list):
                record["golden"] = [_golden(one) for one in record["golden"]]
            return settings(cls, record, "card")
        except (ConfigError, ValueError, RecursionError) as error:
            raise AdapterError(
                f"an adapter's card cannot be read: {str(error)[:300]}; it was written by another "
                "program, or broken since: export the adapter again"
            ) from None


def _golden(record: Any) -> Golden:
    known = settings(Golden, record if isinstance(record, dict) else {}, "golden")
    if not all(isinstance(text, str) for text in known.inputs.values()):
        raise ConfigError("golden: inputs must be texts")
    return known


@dataclass(frozen=True, eq=False)
class Adapter:
    """What stands for tokens before a text. Built by `build_adapter`; nobody writes to it."""

    card: Card
    table: Tensor  # [rows, width], fp32, on the CPU: a row for each virtual token.
    digest: str


def build_adapter(card: Card, table: Tensor) -> Adapter:
    """An adapter from a card and its rows, which are copied to fp32."""
    if table.ndim != 2 or not table.numel() or not table.is_floating_point():
        raise AdapterError(
            f"the table of {card.name!r} is {table.dtype} of shape {tuple(table.shape)}; it must "
            "be floating-point of shape (rows, hidden)"
        )
    rows, hidden = table.shape
    if rows * hidden * 4 > TABLE_BYTES_MAX:
        # Before it is copied: a stored tensor can claim any shape by strides of zero.
        raise AdapterError(
            f"the table of {card.name!r} has {rows} rows of {hidden}: {rows * hidden * 4} bytes, "
            f"over the limit of {TABLE_BYTES_MAX}; give fewer rows"
        )
    found = {"virtual_tokens": rows, "hidden_size": hidden}
    for name, size in found.items():
        if getattr(card, name) not in (0, size):
            raise AdapterError(
                f"the card of {card.name!r} says {name} {getattr(card, name)}, its table is "
                f"{rows} x {hidden}; one of them is another adapter's: export it again"
            )
    if card.template is not None and card.template.rows != rows:
        raise AdapterError(
            f"the template of {card.name!r} has {card.template.rows} virtual tokens, its table "
            f"{rows} rows; make its splits sum to {rows}"
        )
    if card.kind == "prefix" and not (card.template is None or begins_with_rows(card.template)):
        raise AdapterError(
            f"the template of {card.name!r} has something before its virtual tokens, or has them "
            "in another order; keys and values of layers can only stand first: begin the template "
            "with its markers from 0 on, and let bos be none or text"
        )
    held = torch.empty(rows, hidden, dtype=torch.float32).copy_(table.detach())
    if not bool(held.isfinite().all()):
        raise AdapterError(
            f"the table of {card.name!r} has values that are not finite; it was saved after a "
            "training run went wrong: take an earlier one"
        )
    card = replace(card, virtual_tokens=rows, hidden_size=hidden)
    return Adapter(card, held, _digest(card, held))


def begins_with_rows(template: Template) -> bool:
    """Whether a prompt begins with all of the rows in order."""
    rows: list[int] = []
    for part in template.parts:
        if not isinstance(part, range):
            break
        rows += part
    return rows == list(range(template.rows)) and template.bos != "first"


def _digest(card: Card, table: Tensor) -> str:
    """sha256 over what decides a prompt's hidden states: base, layout and the table's bytes."""
    layout: dict[str, Any] = {}
    if card.template is not None:
        # Only what is not the default, so that later fields leave today's digests as they are.
        record = card.template.to_dict()
        defaults = {one.name: one.default for one in fields(Template) if one.default is not MISSING}
        defaults["splits"] = []
        layout = {key: value for key, value in record.items() if value != defaults.get(key, ...)}
    if card.kind != "rows":
        layout["kind"] = card.kind
    head = ["preamble.adapter", card.base_digest, list(table.shape), layout]
    whole = hashlib.sha256(json.dumps(head, sort_keys=True).encode() + b"\n")
    whole.update(table.numpy().astype("<f4", copy=False).data)
    return whole.hexdigest()
