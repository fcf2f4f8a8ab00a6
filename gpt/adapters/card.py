"""Adapter and its card: metadata, template, golden examples, and the digest of the content.

An adapter is a card, a table and the adapter weights (`LinearAdapter`); it has a table, or
adapter weights, or both. The table has a row for each virtual token. The virtual tokens (the
preamble) are inserted into a prompt, usually before the text. The card describes the content. An
adapter is immutable. Its digest covers the table, the adapter weights, the template and the base
model, so adapters with equal digests have the same effect. A card can be written as JSON and read
again without a change. The module opens no files.
"""

import hashlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from gpt.adapters.linear_check import LINEARS_MAX, all_finite, copy_as_fp32, copy_linears
from gpt.adapters.prompt_template import PromptTemplate
from gpt.errors import AdapterError, ConfigError, RequestError
from gpt.linear_adapter import LinearAdapter
from gpt.settings import parse_settings, short_repr

# A name is part of a file name, so it must not contain a path separator, nor begin with a dot or a
# dash. A version number has no leading zeros, so each version has one spelling.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,5}")

CARD_BYTES_MAX = 1 << 20
SCALE_BYTES_MAX = 128  # Of a linear's name and scale, for which a card has more bytes.
INTEGER_MAX = 2**31 - 1  # A message about an adapter has 32-bit integers.
METRIC_MAX = 1e300
STOP_STRINGS_MAX = 16  # The limits of stop strings are the same as in requests.
STOP_BYTES_MAX = 256
TABLE_BYTES_MAX = 1 << 30  # Size in fp32; for example, 8,192 rows of 32,768 values.
GOLDEN_EXAMPLES_MAX = 32  # Limit of one card; a server replays all examples of a card.

# The content of a table row.
# "rows": the input embedding of a virtual token.
# "prefix": the keys and values of a token before the prompt, in all layers. The row is a flattened
# array (layers, 2, KV heads, channels). Its second dimension has the keys at index 0, with RoPE
# already applied, and the values at index 1.
# "linears": the table is empty, and the adapter only changes linears of the model.
ADAPTER_KINDS = ("rows", "prefix", "linears")
INVOCATION_TOKENS_MAX = 256


class AdapterName(NamedTuple):
    """An adapter name and its version number, written as `name@version`."""

    name: str
    version: int | None  # None: the current version.


def parse_name(text: str) -> AdapterName:
    """Parse an adapter name: `refunds@3` is version 3, `refunds` is the current version."""
    name, separator, version = text.partition("@")
    if not NAME_PATTERN.fullmatch(name) or (separator and not VERSION_PATTERN.fullmatch(version)):
        short_text = text if len(text) <= 60 else text[:60] + "..."
        raise RequestError(
            f"{short_text!r} is not an adapter name; a name has 1 to 100 letters, digits, dots, "
            "dashes and underscores, and begins with a letter or digit; a version number follows "
            "after @, as in name@3",
            "adapter",
        )
    return AdapterName(name, int(version) if separator else None)


def card_name(path: Path) -> str:
    """Derive a card name from the name of a file or directory."""
    return sanitized_name(path.resolve().name)


def sanitized_name(name: str) -> str:
    """Derive a valid card name from any text."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).lstrip("._-")[:100] or "imported"


@dataclass(frozen=True)
class GoldenExample:
    """A recorded completion in an adapter's card, to verify the adapter on the serving model."""

    inputs: Mapping[str, str]
    output: str  # The text of greedy decoding.
    # Includes the stop token if one ended the output. Empty: only the text is recorded.
    token_ids: tuple[int, ...] = ()
    logprob: float | None = None  # Sum of the log-probabilities of `token_ids`.
    dtype: str = ""  # The dtype of the model that computed `logprob`.

    def __post_init__(self) -> None:
        if any(token < 0 for token in self.token_ids):
            raise AdapterError("a golden example has a negative token id; record it again")
        if self.logprob is not None and not (self.token_ids and -math.inf < self.logprob <= 0):
            raise AdapterError(
                f"a golden example has the log-probability {self.logprob} for "
                f"{len(self.token_ids)} tokens; it must be finite and at most 0, and there must "
                "be at least one token: record the example again"
            )

    def to_dict(self) -> dict[str, Any]:
        """Convert to a dict; omit empty optional fields, which older cards did not have."""
        record: dict[str, Any] = {"inputs": dict(self.inputs), "output": self.output}
        optional = {"token_ids": list(self.token_ids), "logprob": self.logprob, "dtype": self.dtype}
        return record | {
            name: value for name, value in optional.items() if value not in ([], None, "")
        }


@dataclass(frozen=True)
class Card:
    """The metadata of an adapter."""

    name: str
    task: str = ""
    base_digest: str | None = None  # None: the source format does not record the base model.
    base_fingerprint: str | None = None
    template: PromptTemplate | None = None  # None: all virtual tokens, then the text.
    method: str = ""
    kind: str = "rows"  # One of ADAPTER_KINDS.
    hidden_size: int = 0  # The table's width. 0: `build_adapter` sets it.
    virtual_tokens: int = 0  # The number of table rows. 0: `build_adapter` sets it.
    metrics: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()  # The default of a request.
    max_new_tokens: int | None = None  # The default of a request. None: the server's.
    golden: tuple[GoldenExample, ...] = ()
    notes: tuple[str, ...] = ()  # For the user.
    # The token ids of the invocation (activated LoRA): the adapter weights act on the tokens
    # from its last occurrence in the prompt on. Empty: they act on all tokens.
    invocation: tuple[int, ...] = ()
    # The factor of the low-rank product of each linear or part, by key. `build_adapter` sets it.
    scales: Mapping[str, float] = field(default_factory=dict)
    created: str = ""  # ISO 8601, UTC.

    def __post_init__(self) -> None:
        if not NAME_PATTERN.fullmatch(self.name):
            raise AdapterError(
                f"an adapter card has the name {self.name[:60]!r}; a name must have 1 to 100 "
                "letters, digits, dots, dashes and underscores, and begin with a letter or digit"
            )
        if self.kind not in ADAPTER_KINDS:
            raise AdapterError(
                f"the card of {self.name!r} has the kind {self.kind[:40]!r}; choose one of: "
                f"{', '.join(ADAPTER_KINDS)}"
            )
        if self.max_new_tokens is not None and not 1 <= self.max_new_tokens <= INTEGER_MAX:
            raise AdapterError(
                f"the card of {self.name!r} has max_new_tokens {short_repr(self.max_new_tokens)}; "
                f"it must be from 1 to {INTEGER_MAX}"
            )
        for name, metric in self.metrics.items():
            # A listing of adapters sends the metrics as floating-point numbers.
            if isinstance(metric, int) and abs(metric) > METRIC_MAX:
                raise AdapterError(
                    f"the card of {self.name!r} has the metric {short_repr(name)} with the value "
                    f"{short_repr(metric)}; it must be at most {METRIC_MAX:g}"
                )
        self._check_invocation()
        if len(self.golden) > GOLDEN_EXAMPLES_MAX:
            raise AdapterError(
                f"the card of {self.name!r} has {len(self.golden)} golden examples; at most "
                f"{GOLDEN_EXAMPLES_MAX} are allowed: remove some"
            )
        try:
            record, text = self.to_dict(), self.to_json()
            is_reversible = json.loads(text) == record
            # JSON can contain a lone surrogate, but UTF-8 cannot.
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise AdapterError(
                f"the card of {self.name!r} has {error.object[error.start]!r}, a lone surrogate, "
                "which UTF-8 cannot encode; remove it"
            ) from None
        except (TypeError, ValueError, RecursionError) as error:
            raise AdapterError(
                f"the card of {self.name!r} cannot be written as JSON: {error}"
            ) from None
        if len(text) > (limit := CARD_BYTES_MAX + SCALE_BYTES_MAX * len(self.scales)):
            raise AdapterError(
                f"the card of {self.name!r} has {len(text)} bytes; at most {limit} are allowed: "
                "shorten its texts"
            )
        self._check_stop_strings()
        if not is_reversible:
            raise AdapterError(
                f"the card of {self.name!r} would change if it were written as JSON and read "
                "again; in `metrics`, use strings as keys, and lists instead of tuples"
            )

    def _check_invocation(self) -> None:
        are_ids = all(0 <= token <= INTEGER_MAX for token in self.invocation)
        if not are_ids or len(self.invocation) > INVOCATION_TOKENS_MAX:
            raise AdapterError(
                f"the card of {self.name!r} has an invocation of {len(self.invocation)} tokens; it "
                f"must have at most {INVOCATION_TOKENS_MAX} token ids that are not negative"
            )

    def _check_stop_strings(self) -> None:
        """Check the stop strings; an empty stop string would stop every completion at once."""
        if len(self.stop) > STOP_STRINGS_MAX:
            raise AdapterError(
                f"the card of {self.name!r} has {len(self.stop)} stop strings; at most "
                f"{STOP_STRINGS_MAX} are allowed"
            )
        for stop in self.stop:
            size = len(stop.encode())
            if not 1 <= size <= STOP_BYTES_MAX:
                raise AdapterError(
                    f"the card of {self.name!r} has a stop string of {size} bytes; each stop "
                    f"string must have 1 to {STOP_BYTES_MAX} bytes"
                )

    def to_dict(self) -> dict[str, Any]:
        record = {card_field.name: getattr(self, card_field.name) for card_field in fields(self)}
        if self.kind == "rows":  # The default is omitted, as in older cards, which had no `kind`.
            del record["kind"]
        for name in ("invocation", "scales"):  # Older cards did not have these fields.
            if not record[name]:
                del record[name]
        return record | {
            "template": self.template.to_dict() if self.template else None,
            "metrics": dict(self.metrics),
            "stop": list(self.stop),
            "golden": [example.to_dict() for example in self.golden],
            "notes": list(self.notes),
            **({"invocation": list(self.invocation)} if self.invocation else {}),
            **({"scales": dict(self.scales)} if self.scales else {}),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), allow_nan=False, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Parse the text of `to_json`; an unknown key is an error."""
        try:
            if len(text) > (limit := CARD_BYTES_MAX + SCALE_BYTES_MAX * LINEARS_MAX):
                raise ConfigError(f"it has {len(text)} bytes; at most {limit} are allowed")
            record = json.loads(text)
            if not isinstance(record, dict):
                raise ConfigError("it is not a JSON object")
            if isinstance(record.get("template"), dict):
                record["template"] = PromptTemplate.from_dict(record["template"])
            if isinstance(record.get("golden"), list):
                record["golden"] = [_parse_golden_example(example) for example in record["golden"]]
            return parse_settings(cls, record, "card")
        except (ConfigError, ValueError, RecursionError) as error:
            raise AdapterError(
                f"an adapter card cannot be read: {str(error)[:300]}; the card is broken or was "
                "written by another program: export the adapter again"
            ) from None


def _parse_golden_example(record: Any) -> GoldenExample:
    example = parse_settings(GoldenExample, record if isinstance(record, dict) else {}, "golden")
    if not all(isinstance(text, str) for text in example.inputs.values()):
        raise ConfigError("golden: inputs must be strings")
    return example


@dataclass(frozen=True, eq=False)
class Adapter:
    """A card, a table of virtual tokens and adapter weights; immutable.

    `build_adapter` creates adapters.
    """

    card: Card
    table: Tensor  # (virtual tokens, width), fp32, on the CPU.
    digest: str
    # By the key of a linear or part (gpt/linear_adapter.py); fp32 tensors on the CPU.
    linears: Mapping[str, LinearAdapter] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """The largest rank of the low-rank products; 0 without them."""
        return max((linear.rank for linear in self.linears.values()), default=0)

    @property
    def method(self) -> str:
        """The card's method; if it has none, the method that the adapter weights tell."""
        if self.card.method or not self.linears:
            return self.card.method
        if self.card.invocation:
            return "alora"
        if any(linear.bottleneck is not None for linear in self.linears.values()):
            return "bottleneck"
        if any(linear.magnitude is not None for linear in self.linears.values()):
            return "dora"
        return "lora" if self.rank else "ia3"

    @property
    def nbytes(self) -> int:
        """The size of all tensors in fp32."""
        tensors = (tensor for linear in self.linears.values() for _, tensor in linear.tensors())
        return self.table.nbytes + sum(tensor.nbytes for tensor in tensors)


def build_adapter(
    card: Card, table: Tensor | None = None, linears: Mapping[str, LinearAdapter] | None = None
) -> Adapter:
    """Build an adapter from a card and fp32 copies of its tensors; refuse a card that does not fit.

    `table` is None if the adapter has no virtual tokens.
    """
    if table is None or card.kind == "linears":
        table = _empty_table(card, table, linears)
        card = replace(card, kind="linears")
    else:
        _check_table(card, table)
    rows, hidden = table.shape
    if card.template is not None and card.template.virtual_tokens != rows:
        raise AdapterError(
            f"the template of {card.name!r} has {card.template.virtual_tokens} virtual tokens, but "
            f"the table has {rows} rows; make the template's splits sum to {rows}"
        )
    if card.kind == "prefix" and not (
        card.template is None or begins_with_virtual_tokens(card.template)
    ):
        raise AdapterError(
            f"the template of {card.name!r} does not begin with its virtual tokens in order, as "
            "an adapter of the kind prefix requires: begin the template with the markers "
            "<|VIRTUAL_PROMPT_0|>, <|VIRTUAL_PROMPT_1|>, ... in order, and set bos to none or text"
        )
    fp32_table = copy_as_fp32(table.detach())
    if not all_finite(fp32_table):
        raise AdapterError(
            f"the table of {card.name!r} has values that are not finite, probably because training "
            "diverged; give an adapter that was saved earlier"
        )
    checked_linears = copy_linears(card.name, linears or {})
    if card.invocation and not checked_linears:
        raise AdapterError(
            f"the card of {card.name!r} has an invocation, but the adapter changes no linear; "
            "remove the invocation"
        )
    scales = {key: linear.scale for key, linear in checked_linears.items() if linear.rank}
    # A saved card of rows has its sizes already; a new one would be checked again.
    if scales or card.scales or (card.virtual_tokens, card.hidden_size) != (rows, hidden):
        card = replace(card, virtual_tokens=rows, hidden_size=hidden, scales=scales)
    digest = _digest(card, fp32_table, checked_linears)
    return Adapter(card, fp32_table, digest, checked_linears)


def _empty_table(
    card: Card, table: Tensor | None, linears: Mapping[str, LinearAdapter] | None
) -> Tensor:
    if not linears or (table is not None and len(table)):
        raise AdapterError(
            f"adapter {card.name!r} of the kind linears must change linears, and must have no "
            "virtual tokens; export the adapter again"
        )
    return torch.empty(0, card.hidden_size)


def _check_table(card: Card, table: Tensor) -> None:
    if table.ndim != 2 or not table.numel() or not table.is_floating_point():
        raise AdapterError(
            f"the table of {card.name!r} is {table.dtype} of shape {tuple(table.shape)}; it must "
            "be floating-point of shape (rows, hidden)"
        )
    rows, hidden = table.shape
    if rows * hidden * 4 > TABLE_BYTES_MAX:
        # Checked before the copy: a tensor with strides of 0 can have a huge shape in a small file.
        raise AdapterError(
            f"the table of {card.name!r} has {rows} rows of {hidden} values: {rows * hidden * 4} "
            f"bytes, over the limit of {TABLE_BYTES_MAX}; give fewer rows"
        )
    sizes = {"virtual_tokens": rows, "hidden_size": hidden}
    for name, size in sizes.items():
        if getattr(card, name) not in (0, size):
            raise AdapterError(
                f"the card of {card.name!r} has {name} {getattr(card, name)}, but its table is "
                f"{rows} x {hidden}; card and table belong to different adapters: export the "
                "adapter again"
            )


def begins_with_virtual_tokens(template: PromptTemplate) -> bool:
    """Tell whether each prompt of the template begins with all virtual tokens in order."""
    rows: list[int] = []
    for part in template.parts:
        if not isinstance(part, range):
            break
        rows += part
    return rows == list(range(template.virtual_tokens)) and template.bos != "first"


def _digest(card: Card, table: Tensor, linears: Mapping[str, LinearAdapter]) -> str:
    """Return the SHA-256 of the base model's digest, the prompt layout, and all tensors.

    These inputs determine the hidden states of a prompt.
    """
    layout: dict[str, Any] = {}
    if card.template is not None:
        # Fields with default values are omitted, so that new fields do not change old digests.
        record = card.template.to_dict()
        defaults = {
            template_field.name: template_field.default
            for template_field in fields(PromptTemplate)
            if template_field.default is not MISSING
        }
        defaults["splits"] = []
        layout = {key: value for key, value in record.items() if value != defaults.get(key, ...)}
    if card.kind != "rows":
        layout["kind"] = card.kind
    if linears:
        layout["invocation"] = list(card.invocation)
        layout["scales"] = dict(card.scales)
        layout["tensors"] = {
            f"{key}.{name}": list(tensor.shape)
            for key, linear in linears.items()
            for name, tensor in linear.tensors()
        }
    header = ["preamble.adapter", card.base_digest, list(table.shape), layout]
    hasher = hashlib.sha256(json.dumps(header, sort_keys=True).encode() + b"\n")
    hasher.update(table.numpy().astype("<f4", copy=False).data)
    for key in sorted(linears):
        for _, tensor in linears[key].tensors():
            hasher.update(tensor.numpy().astype("<f4", copy=False).data)
    return hasher.hexdigest()
