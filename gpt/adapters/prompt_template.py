"""Prompts from templates: text, fields and virtual tokens become ids, in training as in serving.

A template is parsed once, and ids are built part by part, so a field is only ever text: it cannot
become a marker, another field or a control token. Text between virtual tokens is tokenized in one
piece. The ids before the answer are those that serving sends. Knows no model and no files.
"""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Self

from gpt.errors import ConfigError, PromptTooLongError, RequestError
from gpt.settings import nearest, settings
from gpt.tokenizers.tokenizer import TextStream, Tokenizer

MARK = "<|VIRTUAL_PROMPT_"
PART = re.compile(r"<\|VIRTUAL_PROMPT_([0-9]+)\|>|\{([A-Za-z_][A-Za-z0-9_-]*)\}")

# Where a begin-of-text token stands: nowhere; before everything, as NeMo puts it; or before the
# text and after virtual tokens that lead, as HF PEFT and TGIS put it.
BOS = ("none", "first", "text")


@dataclass(frozen=True)
class Field:
    name: str


# A stretch between virtual tokens, tokenized in one piece: literals and fields. Or the rows of an
# adapter's table that stand there.
Text = tuple[str | Field, ...]
Virtual = range


@dataclass(frozen=True)
class Rendered:
    """Token ids; one that is at least the vocabulary's size names a row of the adapter's table."""

    ids: list[int]
    answer_start: int  # Where the answer's ids begin; len(ids) if there are none.
    truncated: int  # Tokens that the template's truncate_field lost.


@dataclass(frozen=True)
class Template:
    """`{field}`s and markers `<|VIRTUAL_PROMPT_0|>`, ...; marker n stands for splits[n] rows.

    Braces around anything but a name are text. Spaces at both ends of the whole are dropped.
    """

    text: str
    splits: tuple[int, ...] = ()
    truncate_field: str | None = None  # Loses its end where a prompt is too long; None: refused.
    answer_field: str | None = None  # What the model is to write. Only training renders it.
    bos: str = "none"
    eos: bool = True  # Whether an answer ends with the end-of-text token. Prompts never do.

    def __post_init__(self) -> None:
        markers = [int(mark) for mark, _ in PART.findall(self.text) if mark]
        if self.text.count(MARK) != len(markers):
            raise ConfigError(
                f"the template has a broken marker; it must be {MARK}0|>, {MARK}1|>, ..."
            )
        if sorted(markers) != list(range(len(self.splits))):
            raise ConfigError(
                f"the template has the virtual prompts {markers} and {len(self.splits)} splits; "
                "number the markers from 0, use each once, and give one split for each"
            )
        if any(rows < 1 for rows in self.splits):
            raise ConfigError(f"splits are {list(self.splits)}; each must be at least 1 row")
        if self.bos not in BOS:
            raise ConfigError(f"the template's bos is {self.bos!r}; known are: {', '.join(BOS)}")
        for role in ("truncate_field", "answer_field"):
            name = getattr(self, role)
            if name is not None and name not in self.fields:
                raise ConfigError(f"{role} {name!r} is not in the template; {self._known(name)}")
        if self.answer_field is not None:
            self._check_answer(self.answer_field)

    def _check_answer(self, name: str) -> None:
        if self.answer_field == self.truncate_field:
            raise ConfigError(f"{name!r} is the answer; truncate_field must be another field")
        if not self.text.endswith(f"{{{name}}}") or self.text.count(f"{{{name}}}") > 1:
            raise ConfigError(
                f"the answer {{{name}}} must be the last thing in the template, and only there; "
                "move it to the end"
            )

    @cached_property
    def parts(self) -> tuple[Text | Virtual, ...]:
        """The template in order, with neighbouring literals and fields together."""
        found: list[Text | Virtual] = []
        text: list[str | Field] = []
        end = 0
        for match in PART.finditer(self.text):
            text.append(self.text[end : match.start()])
            end = match.end()
            marker, name = match.groups()
            if name:
                text.append(Field(name))
            else:
                row = sum(self.splits[: int(marker)])
                found += [tuple(filter(None, text)), range(row, row + self.splits[int(marker)])]
                text = []
        text.append(self.text[end:])
        found.append(tuple(filter(None, text)))
        return tuple(part for part in found if part)

    @cached_property
    def fields(self) -> tuple[str, ...]:
        """The names of the fields in order, the answer's too."""
        return tuple(dict.fromkeys(name for _, name in PART.findall(self.text) if name))

    @property
    def rows(self) -> int:
        """How many virtual tokens a prompt has, and so how many rows the adapter's table."""
        return sum(self.splits)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "splits": list(self.splits)}

    @classmethod
    def from_dict(cls, record: Mapping[str, object]) -> Self:
        """The inverse of `to_dict`; an unknown key is an error."""
        return settings(cls, record, "template")

    def render(
        self,
        tokenizer: Tokenizer,
        inputs: Mapping[str, str],
        *,
        vocab_size: int,
        tokens_max: int,
        answer: bool,
    ) -> Rendered:
        """The ids of a prompt, or with `answer` of a whole training example.

        The example's ids before `answer_start` are exactly the ids of the prompt alone, whatever
        would merge with the answer's first letters: so the model learns to continue what it will be
        sent. A prompt's inputs may hold the answer, which is then not looked at. Without an
        answer_field the whole example is the answer.
        """
        self._check_inputs(inputs, answer)
        values, truncated = dict(inputs), 0
        ids, start = self._ids(tokenizer, values, vocab_size, answer)
        if len(ids) > tokens_max and self.truncate_field is not None:
            value = values[self.truncate_field]
            pieces = tokenizer.encode(value)
            kept = len(pieces)
            while len(ids) > tokens_max and kept:
                # Cutting text can change how the rest is tokenized, so look again until it fits.
                kept = max(0, kept - (len(ids) - tokens_max))
                values[self.truncate_field] = value[: _length(tokenizer, pieces[:kept])]
                ids, start = self._ids(tokenizer, values, vocab_size, answer)
            truncated = len(pieces) - kept
        if len(ids) > tokens_max:
            raise self._too_long(len(ids), tokens_max, len(ids) - start if answer else None)
        if not ids:
            raise RequestError("the prompt is empty; it needs at least one token", "inputs")
        return Rendered(ids, start, truncated)

    def _ids(
        self, tokenizer: Tokenizer, values: Mapping[str, str], vocab_size: int, answer: bool
    ) -> tuple[list[int], int]:
        ids: list[int] = []
        bos_at, only_virtual = 0, True
        answer_ids: list[int] = []
        for place, part in enumerate(self.parts):
            if isinstance(part, range):
                ids += [vocab_size + row for row in part]
            else:
                only_virtual = False
                ends = place == 0, place == len(self.parts) - 1
                before, after = self._encoded(tokenizer, part, values, ends, answer)
                ids += before
                answer_ids = after
            if only_virtual and self.bos == "text":
                bos_at = len(ids)
        if self.bos != "none":
            ids.insert(bos_at, self._control(tokenizer.bos_id, "bos"))
        start = len(ids) if self.answer_field is not None or not answer else 0
        if answer and self.eos:
            answer_ids = [*answer_ids, self._control(tokenizer.eos_id, "eos")]
        return ids + answer_ids, start

    def _encoded(
        self,
        tokenizer: Tokenizer,
        part: Text,
        values: Mapping[str, str],
        ends: tuple[bool, bool],
        answer: bool,
    ) -> tuple[list[int], list[int]]:
        """The ids of a stretch of text, and those of the answer at its end."""
        ours = part[-1] if part[-1] == Field(self.answer_field or "") else None
        texts = [
            values[one.name] if isinstance(one, Field) else one for one in part if one is not ours
        ]
        prompt = _stripped("".join(texts), ends)
        ids = tokenizer.encode(prompt) if prompt else []
        if not answer or not isinstance(ours, Field):
            return ids, []
        # The space between prompt and answer belongs to the answer: the prompt alone loses it.
        whole = _stripped("".join([*texts, values[ours.name]]), ends)
        together = tokenizer.encode(whole) if whole else []
        if together[: len(ids)] == ids:
            return ids, together[len(ids) :]
        # A token would reach across the boundary. Serving cannot send half of it.
        return ids, tokenizer.encode(whole[len(prompt) :], started=True)

    def _control(self, token_id: int | None, name: str) -> int:
        if token_id is None:
            raise ConfigError(
                f"the template asks for {name}, and this model's tokenizer has no such token; "
                f"set {name} to {'none' if name == 'bos' else 'false'} in the template"
            )
        return token_id

    def _known(self, name: str) -> str:
        return nearest(name, self.fields) if self.fields else "it has no fields"

    def _check_inputs(self, inputs: Mapping[str, str], answer: bool) -> None:
        for name, value in inputs.items():
            if name not in self.fields:
                raise RequestError(
                    f"field {name!r} is not in the template; {self._known(name)}", name
                )
            if not isinstance(value, str):
                raise RequestError(
                    f"field {name!r} is a {type(value).__name__}; it must be a text", name
                )
        for name in self.fields:
            if name not in inputs and (answer or name != self.answer_field):
                needed = [one for one in self.fields if answer or one != self.answer_field]
                raise RequestError(
                    f"field {name!r} is missing; the template needs {', '.join(needed)}", name
                )

    def _too_long(self, found: int, tokens_max: int, answer: int | None) -> PromptTooLongError:
        what = "the prompt has" if answer is None else "prompt and answer have"
        cut = f" with {self.truncate_field!r} cut to nothing" if self.truncate_field else ""
        way = f"shorten it by {found - tokens_max} tokens"
        if self.rows >= tokens_max:
            way = "the virtual tokens alone leave no room for text: allow more"
        elif answer and self.answer_field and self.rows + answer >= tokens_max:
            way = f"the answer alone has {answer}: shorten it, or allow more"
        return PromptTooLongError(
            f"{what} {found - self.rows} tokens{cut} + {self.rows} virtual tokens = {found}, over "
            f"the limit of {tokens_max}; {way}",
            "inputs",
        )


def _stripped(text: str, ends: tuple[bool, bool]) -> str:
    """Without spaces at those ends that are ends of the whole prompt; only spaces, as in NeMo."""
    first, last = ends
    text = text.lstrip(" ") if first else text
    return text.rstrip(" ") if last else text


def _length(tokenizer: Tokenizer, ids: list[int]) -> int:
    """How many characters of a text its first tokens are, without the half of one at the end.

    Exact if decoding gives the text back. Else it is near, and the text that is cut is still the
    caller's, not what the tokenizer made of it.
    """
    stream = TextStream(tokenizer)
    return sum(len(stream.push(token_id)) for token_id in ids)
