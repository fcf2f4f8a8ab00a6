"""Chats: whose template makes a prompt of messages, and why no message can forge a turn.

A template comes with the tokenizer, or from the operator; what runs it is elsewhere. It writes
control tokens as text. So those that stand in a message are broken by a mark before it sees them,
and only whole ones become ids; all else is encoded as any user's text is.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import CheckpointError, ConfigError, RequestError
from gpt.tokenizers.special_tokens import read_json, special_names, spelled
from gpt.tokenizers.tokenizer import Tokenizer

FILE = "chat_template.jinja"
TEMPLATE_BYTES_MAX = 1 << 20
# Code points that Unicode keeps from ever being characters. One that no message has is the mark.
MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


def any_of(words: Iterable[str]) -> str:
    """A pattern of these words, the longest of those that fit.

    As a tree, so that a place costs a word's length and not the number of words: a message may be
    nothing but what many words begin with, and Python does nothing else while it is searched.
    """
    tree: dict[str, Any] = {}
    for word in words:
        node = tree
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = None
    return _branches(tree)


def _branches(node: dict[str, Any]) -> str:
    straight = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        straight += re.escape(letter)
    ways = [re.escape(letter) + _branches(rest) for letter, rest in node.items() if letter]
    if not ways:
        return straight
    return f"{straight}(?:{'|'.join(ways)}){'?' if '' in node else ''}"


@dataclass(frozen=True)
class ChatTemplate:
    """The text of a template, and what it may call the special tokens: `bos_token` and others."""

    text: str
    names: Mapping[str, str]
    where: Path


def find_template(
    place: Path | None, tokenizer: Tokenizer, given: str | None = None
) -> ChatTemplate | None:
    """The one that is `given` as a file, or the one in the directory of the tokenizer's files."""
    folder = place if place is None or place.is_dir() else place.parent
    names = {} if folder is None else special_names(folder)
    for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token is not None:
            names.setdefault(name, tokenizer.spelling(token))
    if given is not None:
        try:
            return ChatTemplate(_read(Path(given)), names, Path(given))
        except CheckpointError as error:
            raise ConfigError(f"chat_template: {error}") from None
    if folder is None:
        return None
    if (folder / FILE).is_file():
        return ChatTemplate(_read(folder / FILE), names, folder / FILE)
    config = folder / "tokenizer_config.json"
    text = _of_config(config) if config.is_file() else None
    return None if text is None else ChatTemplate(text, names, config)


def _read(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(TEMPLATE_BYTES_MAX + 1)
        if len(data) <= TEMPLATE_BYTES_MAX:
            return data.decode()
    except OSError as error:
        what = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        what = "is not UTF-8"
    else:
        what = f"is over {TEMPLATE_BYTES_MAX} bytes, more than any chat template has"
    raise CheckpointError(f"{file} {what}; give a file with a template of jinja2")


def _of_config(file: Path) -> str | None:
    """As a text, or as several by name; then it is the one called `default`, or the only one."""
    found = read_json(file).get("chat_template")
    if found is None or isinstance(found, str):
        return found
    if isinstance(found, list):
        named = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
        only = next(iter(named.values())) if len(named) == 1 else None
        text = named.get("default", only)
        if len(named) == len(found) and isinstance(text, str):
            return text
    raise CheckpointError(
        f"{file} has a chat_template that is neither a text nor a list of names and templates with "
        "one called 'default'; correct it, or take it out"
    )


class Marked:
    """Messages that can be given to a template, and the mark that breaks what they must not say."""

    def __init__(self, messages: list[dict[str, Any]], controls: re.Pattern[str]) -> None:
        texts = _texts(messages)
        mark = next((one for one in MARKS if not any(one in text for text in texts)), None)
        if mark is None:
            raise RequestError(
                "the messages have all of the code points U+FDD0 to U+FDEF, which stand for no "
                "character; leave one of them out",
                "messages",
            )
        self.mark = mark
        # Behind each letter: so what overlaps with a control token is broken too.
        self.messages = _mapped(
            messages,
            lambda text: controls.sub(lambda found: mark.join([*found[0], ""]), text),
        )


def _texts(value: Any) -> list[str]:
    found, left = [], [value]
    while left:
        one = left.pop()
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, dict):
            left += [*one, *one.values()]
        elif isinstance(one, list):
            left += one
    return found


def _mapped(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(name): _mapped(one, change) for name, one in value.items()}
    return [_mapped(one, change) for one in value] if isinstance(value, list) else value


class ChatTokens:
    """What a template writes, as ids. `marked`, for messages, comes before; `ids` after it."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Some write turns with added tokens that are not special. The template tells which.
        self._controls = {
            text: control
            for text, control in tokenizer.controls.items()
            if control.special or (text in template.text and not text.isalnum())
        }
        # Of the special ones the tokenizer itself takes care.
        self._guarded = {
            control.id: text for text, control in self._controls.items() if not control.special
        }
        self._whole = re.compile(any_of(self._controls) or "(?!)")
        self._started = bool(self._controls) and self._continues(min(self._controls, key=len))

    def _continues(self, control: str) -> bool:
        """Whether text behind a control token is one that goes on: it has no space put before."""
        behind = self._tokenizer.encode(f"{control}a", special=True)[1:]
        return behind != self._tokenizer.encode("a")

    def marked(self, messages: list[dict[str, Any]]) -> Marked:
        return Marked(messages, self._whole)

    def ids(self, text: str, mark: str) -> tuple[int, ...]:
        """Those of a rendered text. Nothing is put before it: a template begins texts itself."""
        found: list[int] = []
        end = 0
        strip = False  # Whether the last control token takes along the space behind it.
        for match in self._whole.finditer(text):
            control = self._controls[match[0]]
            found += self._plain(
                text[end : match.start()], mark, left=strip, right=control.lstrip, started=end > 0
            )
            found.append(control.id)
            end, strip = match.end(), control.rstrip
        return (*found, *self._plain(text[end:], mark, left=strip, right=False, started=end > 0))

    def _plain(self, text: str, mark: str, *, left: bool, right: bool, started: bool) -> list[int]:
        text = text.lstrip() if left else text
        text = text.rstrip() if right else text
        text = text.replace(mark, "")
        if not text:
            return []
        encode = self._tokenizer.encode
        ids = encode(text, started=started and self._started)
        return spelled(ids, self._guarded, lambda letter: encode(letter, started=True))
