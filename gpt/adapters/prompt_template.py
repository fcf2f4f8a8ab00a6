"""Prompt template: converts text, fields and virtual tokens to token ids, for training and serving.

Each virtual token becomes a token id at or above the vocabulary size. A template is parsed before
its fields get their values, so a value is always text: a marker or a field in a value has no
effect, and a control token only if the caller of `render` says so. The text between two markers,
with the values of its fields, is tokenized in one piece. A marker can also stand for the tokens of
an invocation, from which an activated LoRA acts. In a training example, the
ids before the answer equal the prompt's ids in serving. The module uses no model and opens no
files.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

from gpt.errors import ConfigError, PromptTooLongError, RequestError
from gpt.settings import parse_settings, suggest_nearest
from gpt.tokenizers.tokenizer import IncrementalDetokenizer, Tokenizer

VIRTUAL_PROMPT_MARK = "<|VIRTUAL_PROMPT_"
INVOCATION_MARK = "<|INVOCATION|>"
# Group 1 is the number of a marker of virtual tokens, group 2 the name of a field; the marker of an
# invocation has no group.
PART_PATTERN = re.compile(
    r"<\|VIRTUAL_PROMPT_([0-9]+)\|>|\{([A-Za-z_][A-Za-z0-9_-]*)\}|<\|INVOCATION\|>"
)

# Positions of the begin-of-text token. "none": no such token. "first": before everything, as in
# NeMo. "text": after leading virtual tokens and before the text, as in Hugging Face PEFT and TGIS.
BOS_POSITIONS = ("none", "first", "text")


@dataclass(frozen=True)
class TemplateField:
    """A field `{name}` of a template, which a request or an example fills with text."""

    name: str


# The literals and fields between two markers. Their text is tokenized in one piece.
TextPart = tuple[str | TemplateField, ...]
VirtualPart = range  # The table rows that a marker stands for.


@dataclass(frozen=True)
class InvocationPart:
    """The tokens that the marker of an invocation stands for."""

    ids: tuple[int, ...]


@dataclass(frozen=True)
class RenderedPrompt:
    """Token ids; id `vocab_size + n` is row n of the adapter's table."""

    ids: list[int]
    # Index of the answer's first id: len(ids) in a prompt, and 0 in a training example of a
    # template without answer_field.
    answer_start: int
    truncated_tokens: int  # Number of tokens removed from the truncate_field.


@dataclass(frozen=True)
class PromptTemplate:
    """A text with fields `{name}` and markers `<|VIRTUAL_PROMPT_n|>`.

    Marker n stands for splits[n] virtual tokens. The marker `<|INVOCATION|>` stands for the tokens
    of `invocation`. Braces around a name are a field; other braces are
    text. Spaces at both ends of the prompt are removed.
    """

    text: str
    splits: tuple[int, ...] = ()
    # The field that is truncated at its end if a prompt is too long; None: the prompt is refused.
    truncate_field: str | None = None
    answer_field: str | None = None  # The field with the completion; rendered in training only.
    bos: str = "none"  # One of BOS_POSITIONS.
    eos: bool = True  # Whether answers end with the end-of-text token; prompts do not.
    invocation: tuple[int, ...] = ()  # Token ids; empty: the text has no such marker.

    def __post_init__(self) -> None:
        if self.text.count(INVOCATION_MARK) != bool(self.invocation):
            raise ConfigError(
                f"the template has {self.text.count(INVOCATION_MARK)} markers {INVOCATION_MARK} "
                f"for an invocation of {len(self.invocation)} tokens; use the marker once, and "
                "only with an invocation"
            )
        markers = [int(marker) for marker, _ in PART_PATTERN.findall(self.text) if marker]
        if self.text.count(VIRTUAL_PROMPT_MARK) != len(markers):
            raise ConfigError(
                f"the template has a broken marker; it must be {VIRTUAL_PROMPT_MARK}0|>, "
                f"{VIRTUAL_PROMPT_MARK}1|>, ..."
            )
        if sorted(markers) != list(range(len(self.splits))):
            raise ConfigError(
                f"the template has the markers {markers}, but `splits` is {list(self.splits)}; "
                "number the markers from 0, use each marker once, and give its number of virtual "
                "tokens in `splits`"
            )
        if any(rows < 1 for rows in self.splits):
            raise ConfigError(
                f"splits is {list(self.splits)}; each number must be at least 1 virtual token"
            )
        if self.bos not in BOS_POSITIONS:
            raise ConfigError(
                f"the template's bos is {self.bos!r}; choose one of: {', '.join(BOS_POSITIONS)}"
            )
        for role in ("truncate_field", "answer_field"):
            name = getattr(self, role)
            if name is not None and name not in self.fields:
                raise ConfigError(
                    f"{role} {name!r} is not in the template; {self._field_hint(name)}"
                )
        if self.answer_field is not None:
            self._check_answer(self.answer_field)

    def _check_answer(self, name: str) -> None:
        if self.answer_field == self.truncate_field:
            raise ConfigError(
                f"{name!r} is both answer_field and truncate_field; the answer cannot be "
                "truncated: choose another truncate_field"
            )
        if not self.text.endswith(f"{{{name}}}") or self.text.count(f"{{{name}}}") > 1:
            raise ConfigError(
                f"the answer {{{name}}} must occur once, at the end of the template; move it to "
                "the end"
            )

    @cached_property
    def parts(self) -> tuple[TextPart | VirtualPart | InvocationPart, ...]:
        """The text parts, virtual parts and the invocation, in the order of the template."""
        parts: list[TextPart | VirtualPart | InvocationPart] = []
        text: list[str | TemplateField] = []
        end = 0
        for match in PART_PATTERN.finditer(self.text):
            text.append(self.text[end : match.start()])
            end = match.end()
            marker, name = match.groups()
            if name:
                text.append(TemplateField(name))
            elif marker is None:
                parts += [tuple(filter(None, text)), InvocationPart(self.invocation)]
                text = []
            else:
                row = sum(self.splits[: int(marker)])
                parts += [tuple(filter(None, text)), range(row, row + self.splits[int(marker)])]
                text = []
        text.append(self.text[end:])
        parts.append(tuple(filter(None, text)))
        return tuple(part for part in parts if part)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields in order, including the answer."""
        return tuple(dict.fromkeys(name for _, name in PART_PATTERN.findall(self.text) if name))

    @property
    def virtual_tokens(self) -> int:
        """The number of virtual tokens in a prompt, and of rows in the adapter's table."""
        return sum(self.splits)

    def to_dict(self) -> dict[str, Any]:
        record = {**asdict(self), "splits": list(self.splits)}
        if not self.invocation:  # Omitted, as in older cards, which had no such field.
            del record["invocation"]
            return record
        return record | {"invocation": list(self.invocation)}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Self:
        """Parse the mapping of `to_dict`; an unknown key is an error."""
        return parse_settings(cls, record, "template")

    def render(
        self,
        tokenizer: Tokenizer,
        inputs: Mapping[str, str],
        *,
        vocab_size: int,
        tokens_max: int,
        with_answer: bool,
        parse_fields: bool = False,
        text_bytes_max: int | None = None,
    ) -> RenderedPrompt:
        """Return the ids of a prompt, or, if `with_answer` is set, of a training example.

        Virtual token n gets the id `vocab_size + n`. If there are more than `tokens_max` ids, the
        value of truncate_field is shortened, or the prompt is refused. `text_bytes_max` limits the
        text before it is shortened; None: no limit.

        Training and serving use the same prompts: the example's ids before `answer_start` equal the
        ids of the prompt alone, even if the tokenizer would merge the end of the prompt with the
        answer. If the template has no answer_field, all ids of an example are the answer. Without
        `with_answer`, an answer in `inputs` is ignored.

        `parse_fields`: control tokens in the values of fields become their ids. Control tokens in
        the template's own text never do, because training did not parse them.
        """
        self._check_inputs(inputs, with_answer)
        if text_bytes_max is not None:
            self._check_text_size(inputs, text_bytes_max)
        field_values = dict(inputs)
        truncated_tokens = 0
        assert not (with_answer and parse_fields), "an example of training is plain text"

        def encode_parts() -> tuple[list[int], int]:
            return self._encode_parts(
                tokenizer, field_values, vocab_size, with_answer, parse_fields
            )

        ids, answer_start = encode_parts()
        if len(ids) > tokens_max and self.truncate_field is not None:
            value = field_values[self.truncate_field]
            field_ids = tokenizer.encode(value)
            remaining_tokens = len(field_ids)
            while len(ids) > tokens_max and remaining_tokens:
                # A shorter text can have different tokens, so repeat until the prompt fits.
                remaining_tokens = max(0, remaining_tokens - (len(ids) - tokens_max))
                field_values[self.truncate_field] = value[
                    : _text_length(tokenizer, field_ids[:remaining_tokens])
                ]
                ids, answer_start = encode_parts()
            truncated_tokens = len(field_ids) - remaining_tokens
        if len(ids) > tokens_max:
            raise self._too_long_error(
                len(ids), tokens_max, len(ids) - answer_start if with_answer else None
            )
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", "inputs")
        return RenderedPrompt(ids, answer_start, truncated_tokens)

    def _encode_parts(
        self,
        tokenizer: Tokenizer,
        field_values: Mapping[str, str],
        vocab_size: int,
        with_answer: bool,
        parse_fields: bool,
    ) -> tuple[list[int], int]:
        """Return the ids of all parts, and the index of the answer's first id."""
        ids: list[int] = []
        answer_ids: list[int] = []
        bos_index = 0
        has_text = False
        for index, part in enumerate(self.parts):
            if isinstance(part, range):
                ids += [vocab_size + row for row in part]
                if self.bos == "text" and not has_text:
                    bos_index = len(ids)
            elif isinstance(part, InvocationPart):
                has_text = True
                ids += part.ids
            else:
                has_text = True
                # Only the last part can contain the answer (`_check_answer`).
                prompt_ids, answer_ids = self._encode_text_part(
                    tokenizer,
                    part,
                    field_values,
                    begins_prompt=index == 0,
                    ends_prompt=index == len(self.parts) - 1,
                    with_answer=with_answer,
                    parse_fields=parse_fields,
                )
                ids += prompt_ids
        if self.bos != "none":
            ids.insert(bos_index, self._require_token(tokenizer.bos_id, "bos"))
        answer_start = len(ids) if self.answer_field is not None or not with_answer else 0
        if with_answer and self.eos:
            answer_ids = [*answer_ids, self._require_token(tokenizer.eos_id, "eos")]
        return ids + answer_ids, answer_start

    def _encode_text_part(
        self,
        tokenizer: Tokenizer,
        part: TextPart,
        field_values: Mapping[str, str],
        *,
        begins_prompt: bool,
        ends_prompt: bool,
        with_answer: bool,
        parse_fields: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the ids of a text part without the answer, and the ids of the answer.

        The ids of the answer are empty if the part does not end with the answer, or if
        `with_answer` is not set.
        """
        answer_part = part[-1] if part[-1] == TemplateField(self.answer_field or "") else None
        if parse_fields:
            elements = [element for element in part if element is not answer_part]
            segments = _split_fields(tokenizer, elements, field_values)
            return _encode_segments(tokenizer, segments, begins_prompt, ends_prompt), []
        texts = [
            field_values[element.name] if isinstance(element, TemplateField) else element
            for element in part
            if element is not answer_part
        ]
        prompt = _strip_ends("".join(texts), begins_prompt, ends_prompt)
        ids = tokenizer.encode(prompt) if prompt else []
        if not with_answer or not isinstance(answer_part, TemplateField):
            return ids, []
        # The space before the answer is part of the answer, because prompts lose trailing spaces.
        full_text = "".join([*texts, field_values[answer_part.name]])
        full_text = _strip_ends(full_text, begins_prompt, ends_prompt)
        full_ids = tokenizer.encode(full_text) if full_text else []
        if full_ids[: len(ids)] == ids:
            return ids, full_ids[len(ids) :]
        # Here the tokenizer has merged the end of the prompt with the start of the answer. In
        # serving the prompt is encoded alone, so prompt and answer are encoded separately.
        return ids, tokenizer.encode(full_text[len(prompt) :], continues_text=True)

    def _require_token(self, token_id: int | None, name: str) -> int:
        if token_id is None:
            raise ConfigError(
                f"the template requires the {name} token, but this model's tokenizer has no such "
                f"token; set {name} to {'none' if name == 'bos' else 'false'} in the template"
            )
        return token_id

    def _field_hint(self, name: str) -> str:
        return suggest_nearest(name, self.fields) if self.fields else "the template has no fields"

    def _check_inputs(self, inputs: Mapping[str, str], with_answer: bool) -> None:
        for name, value in inputs.items():
            if name not in self.fields:
                raise RequestError(
                    f"field {name!r} is not in the template; {self._field_hint(name)}", name
                )
            if not isinstance(value, str):
                raise RequestError(
                    f"field {name!r} is a {type(value).__name__}; it must be a string", name
                )
        for name in self.fields:
            if name not in inputs and (with_answer or name != self.answer_field):
                required = [
                    field_name
                    for field_name in self.fields
                    if with_answer or field_name != self.answer_field
                ]
                raise RequestError(
                    f"field {name!r} is missing; the template needs {', '.join(required)}", name
                )

    def _check_text_size(self, inputs: Mapping[str, str], text_bytes_max: int) -> None:
        """Raise if the rendered text would be over the limit; the text is not built.

        A template can contain a field many times, so the text can be much larger than the inputs.
        """
        size = self._literal_bytes
        for name, count in self._field_counts.items():
            if name in inputs:
                size += count * len(inputs[name].encode(errors="replace"))
        if size > text_bytes_max:
            raise RequestError(
                f"the template and the inputs together are {size} bytes of text; this server takes "
                f"at most {text_bytes_max} (text_bytes_max)",
                "inputs",
            )

    @cached_property
    def _field_counts(self) -> Mapping[str, int]:
        """The number of occurrences of each field."""
        return Counter(name for _, name in PART_PATTERN.findall(self.text) if name)

    @cached_property
    def _literal_bytes(self) -> int:
        """The bytes of the template without its fields and markers."""
        return len(PART_PATTERN.sub("", self.text).encode(errors="replace"))

    def _too_long_error(
        self, prompt_tokens: int, tokens_max: int, answer_tokens: int | None
    ) -> PromptTooLongError:
        subject = "the prompt has" if answer_tokens is None else "prompt and answer have"
        if self.truncate_field:
            subject = f"even without the text of {self.truncate_field!r}, {subject}"
        remedy = f"shorten the text by {prompt_tokens - tokens_max} tokens"
        if self.virtual_tokens >= tokens_max:
            remedy = "the virtual tokens alone reach the limit, so raise the limit"
        elif (
            answer_tokens
            and self.answer_field
            and self.virtual_tokens + answer_tokens >= tokens_max
        ):
            remedy = (
                f"the answer alone has {answer_tokens} tokens, so shorten it, or raise the limit"
            )
        return PromptTooLongError(
            f"{subject} {prompt_tokens - self.virtual_tokens} tokens + "
            f"{self.virtual_tokens} virtual tokens = {prompt_tokens}, over "
            f"the limit of {tokens_max}; {remedy}",
            "inputs",
        )


def _strip_ends(text: str, begins_prompt: bool, ends_prompt: bool) -> str:
    """Remove spaces at the beginning and the end of a prompt; as in NeMo, keep other whitespace."""
    text = text.lstrip(" ") if begins_prompt else text
    return text.rstrip(" ") if ends_prompt else text


def encode_control_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text in which control tokens become their ids."""
    segments: list[tuple[int | None, str]] = [(None, "")]
    for segment, control in tokenizer.control_splitter.split(text):
        segments[-1] = segments[-1][0], segments[-1][1] + segment
        if control is not None:
            segments.append((control.id, ""))
    return _encode_segments(tokenizer, segments, begins_prompt=False, ends_prompt=False)


def _split_fields(
    tokenizer: Tokenizer, elements: Iterable[str | TemplateField], field_values: Mapping[str, str]
) -> list[tuple[int | None, str]]:
    """Split a text part at the control tokens in its fields.

    Each segment is the id of a control token and the text after it; the first has no control token.
    """
    segments: list[tuple[int | None, str]] = [(None, "")]
    for element in elements:
        if not isinstance(element, TemplateField):
            segments[-1] = segments[-1][0], segments[-1][1] + element
            continue
        for text, control in tokenizer.control_splitter.split(field_values[element.name]):
            segments[-1] = segments[-1][0], segments[-1][1] + text
            if control is not None:
                segments.append((control.id, ""))
    return segments


def _encode_segments(
    tokenizer: Tokenizer,
    segments: Sequence[tuple[int | None, str]],
    begins_prompt: bool,
    ends_prompt: bool,
) -> list[int]:
    ids: list[int] = []
    for index, (control_id, text) in enumerate(segments):
        is_last = index == len(segments) - 1
        text = _strip_ends(text, begins_prompt and index == 0, ends_prompt and is_last)
        if control_id is not None:
            ids.append(control_id)
        if text:
            continues_text = index > 0 and tokenizer.continues_after_control
            ids += tokenizer.encode(text, continues_text=continues_text)
    return ids


def _text_length(tokenizer: Tokenizer, ids: list[int]) -> int:
    """Return the length in characters of the text of `ids`, the first tokens of a longer text.

    An incomplete character at the end does not count. If the tokenizer does not decode ids to
    exactly the text that was encoded, the length is approximate. An approximate length is enough,
    because `render` encodes the truncated text again.
    """
    stream = IncrementalDetokenizer(tokenizer)
    return sum(len(stream.push(token_id)) for token_id in ids)
