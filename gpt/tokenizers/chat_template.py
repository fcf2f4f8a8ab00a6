"""Chat template of a tokenizer: its file, escaping of messages, encoding of the rendered text.

The template is in the tokenizer's directory or in a file that the operator sets;
`serving/admission/` renders it. Templates write control tokens (tokens such as <|im_start|>) as
text, and a message may contain the same text. Before rendering, this module therefore inserts a
mark after each letter of a control token in a message. After rendering, only control tokens without
marks are encoded to the ids of control tokens, and all other text is encoded as user text. A
message therefore cannot forge a turn.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt.errors import CheckpointError, ConfigError, RequestError
from gpt.tokenizers.special_tokens import read_json, read_token_names, spell_out_guarded
from gpt.tokenizers.tokenizer import Tokenizer

CHAT_TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_BYTES_MAX = 1 << 20
# Unicode noncharacters. The first one that the messages do not contain is used as the mark.
ESCAPE_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


def trie_pattern(words: Iterable[str]) -> str:
    """Return a regular expression that matches the longest of these words at a position.

    The pattern is a trie, so the cost per position depends on the length of a word, not on the
    number of words. With an alternation of all words, a long search in a hostile message could
    block the process, because `re` holds the GIL.
    """
    trie: dict[str, Any] = {}
    for word in words:
        node = trie
        for letter in word:
            node = node.setdefault(letter, {})
        node[""] = None
    return _node_pattern(trie)


def _node_pattern(node: dict[str, Any]) -> str:
    common_prefix = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        common_prefix += re.escape(letter)
    alternatives = [
        re.escape(letter) + _node_pattern(child) for letter, child in node.items() if letter
    ]
    if not alternatives:
        return common_prefix
    return f"{common_prefix}(?:{'|'.join(alternatives)}){'?' if '' in node else ''}"


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, and the texts of special tokens by name (`bos_token` and others)."""

    text: str
    special_tokens: Mapping[str, str]
    source: Path


def find_template(
    tokenizer_path: Path | None, tokenizer: Tokenizer, template_path: str | None = None
) -> ChatTemplate | None:
    """Return the template in `template_path`, else in the tokenizer's directory, else None."""
    folder = tokenizer_path
    if folder is not None and not folder.is_dir():
        folder = folder.parent
    special_tokens = {} if folder is None else read_token_names(folder)
    for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token is not None:
            special_tokens.setdefault(name, tokenizer.id_to_token(token))
    if template_path is not None:
        try:
            return ChatTemplate(
                _read_template(Path(template_path)), special_tokens, Path(template_path)
            )
        except CheckpointError as error:
            raise ConfigError(f"chat_template: {error}") from None
    if folder is None:
        return None
    if (folder / CHAT_TEMPLATE_FILE).is_file():
        return ChatTemplate(
            _read_template(folder / CHAT_TEMPLATE_FILE), special_tokens, folder / CHAT_TEMPLATE_FILE
        )
    config = folder / "tokenizer_config.json"
    text = _template_from_config(config) if config.is_file() else None
    return None if text is None else ChatTemplate(text, special_tokens, config)


def _read_template(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            data = opened.read(TEMPLATE_BYTES_MAX + 1)
        if len(data) <= TEMPLATE_BYTES_MAX:
            return data.decode()
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    else:
        problem = f"has more than {TEMPLATE_BYTES_MAX} bytes, too many for a chat template"
    raise CheckpointError(f"{file} {problem}; give a file with a jinja2 template")


def _template_from_config(file: Path) -> str | None:
    """Return the template in tokenizer_config.json; None if the file has no template.

    From a list of templates, return the template named "default", else the only template.
    """
    template = read_json(file).get("chat_template")
    if template is None or isinstance(template, str):
        return template
    if isinstance(template, list):
        templates = {
            named_template.get("name"): named_template.get("template")
            for named_template in template
            if isinstance(named_template, dict)
        }
        only_template = next(iter(templates.values())) if len(templates) == 1 else None
        text = templates.get("default", only_template)
        if len(templates) == len(template) and isinstance(text, str):
            return text
    raise CheckpointError(
        f"{file} has a chat_template that is neither a string nor a list of named templates with "
        "one named 'default'; correct or remove the chat_template"
    )


class EscapedMessages:
    """Messages whose control tokens are escaped by a mark after each letter, and the mark."""

    def __init__(self, messages: list[dict[str, Any]], controls: re.Pattern[str]) -> None:
        texts = _collect_strings(messages)
        mark = next(
            (
                candidate
                for candidate in ESCAPE_MARKS
                if not any(candidate in text for text in texts)
            ),
            None,
        )
        if mark is None:
            raise RequestError(
                "the messages contain all of the noncharacters U+FDD0 to U+FDEF; remove one of "
                "these characters",
                "messages",
            )
        self.mark = mark
        # If two control tokens overlap in a text, `sub` finds only the first one. The marks after
        # its letters also split the second one.
        self.messages = _map_strings(
            messages,
            lambda text: controls.sub(lambda match: mark.join([*match[0], ""]), text),
        )


def _collect_strings(value: Any) -> list[str]:
    strings, pending = [], [value]
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            strings.append(node)
        elif isinstance(node, dict):
            pending += [*node, *node.values()]
        elif isinstance(node, list):
            pending += node
    return strings


def _map_strings(value: Any, transform: Any) -> Any:
    if isinstance(value, str):
        return transform(value)
    if isinstance(value, dict):
        return {transform(name): _map_strings(child, transform) for name, child in value.items()}
    if isinstance(value, list):
        return [_map_strings(child, transform) for child in value]
    return value


class ChatTemplateEncoder:
    """Encodes chats: call `escape_messages`, render the template, then call `encode_rendered`."""

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Special tokens, and the added tokens in the template's text: some models mark turns with
        # added tokens that are not special. Added tokens of only letters and digits are words, not
        # control tokens.
        self._control_tokens = {
            text: control
            for text, control in tokenizer.control_tokens.items()
            if control.special or (text in template.text and not text.isalnum())
        }
        # `Tokenizer.encode` prevents special tokens in user text. This class prevents the control
        # tokens that are not special.
        self._guarded_tokens = {
            control.id: text
            for text, control in self._control_tokens.items()
            if not control.special
        }
        self._control_pattern = re.compile(trie_pattern(self._control_tokens) or "(?!)")
        self._continues_after_control = bool(self._control_tokens) and self._is_continuation_after(
            min(self._control_tokens, key=len)
        )

    def _is_continuation_after(self, control: str) -> bool:
        """Return whether "a" after a control token is encoded differently than "a" alone.

        If so, the tokenizer adds a leading space only at the start of a text, not after a control
        token.
        """
        ids_after = self._tokenizer.encode(f"{control}a", allow_special=True)[1:]
        return ids_after != self._tokenizer.encode("a")

    def escape_messages(self, messages: list[dict[str, Any]]) -> EscapedMessages:
        return EscapedMessages(messages, self._control_pattern)

    def encode_rendered(self, text: str, mark: str) -> tuple[int, ...]:
        """Encode a rendered template. No BOS token is added, because templates write bos_token."""
        token_ids: list[int] = []
        end = 0
        strip_next = False  # Whether the last control token removes the whitespace after it.
        for match in self._control_pattern.finditer(text):
            control = self._control_tokens[match[0]]
            token_ids += self._encode_text(
                text[end : match.start()],
                mark,
                strip_left=strip_next,
                strip_right=control.lstrip,
                continues_text=end > 0,
            )
            token_ids.append(control.id)
            end, strip_next = match.end(), control.rstrip
        return (
            *token_ids,
            *self._encode_text(
                text[end:], mark, strip_left=strip_next, strip_right=False, continues_text=end > 0
            ),
        )

    def _encode_text(
        self, text: str, mark: str, *, strip_left: bool, strip_right: bool, continues_text: bool
    ) -> list[int]:
        text = text.lstrip() if strip_left else text
        text = text.rstrip() if strip_right else text
        text = text.replace(mark, "")
        if not text:
            return []
        encode = self._tokenizer.encode
        ids = encode(text, continues_text=continues_text and self._continues_after_control)
        return spell_out_guarded(
            ids, self._guarded_tokens, lambda letter: encode(letter, continues_text=True)
        )
