"""Chat template of a tokenizer: its file, escaping of messages, encoding of the rendered text.

The template is in the tokenizer's directory or in a file that the operator sets;
`serving/admission/` renders it. Templates write control tokens (tokens such as <|im_start|>) as
text, and a message may contain the same text. Before rendering, this module therefore inserts a
mark after each letter of a control token in a message. After rendering, only control tokens without
marks are encoded to the ids of control tokens, and all other text is encoded as user text. A
message therefore cannot forge a turn. To continue the last message, another mark at its end shows
where the rendered text has to be cut.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from gpt.errors import CheckpointError, ConfigError, RequestError
from gpt.files.regular_files import open_regular_file
from gpt.tokenizers.special_tokens import (
    ControlTokenSplitter,
    read_json,
    read_token_names,
    spell_out_guarded,
)
from gpt.tokenizers.tokenizer import Tokenizer

CHAT_TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_BYTES_MAX = 1 << 20
TOO_LONG = f"has more than {TEMPLATE_BYTES_MAX} bytes, too many for a chat template"
# Unicode noncharacters. The first one that the messages do not contain is used as the mark.
ESCAPE_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, and the texts of special tokens by name (`bos_token` and others)."""

    text: str
    special_tokens: Mapping[str, str]
    source: Path


def tokenizer_folder(tokenizer_path: Path | None) -> Path | None:
    """Return the directory of a tokenizer, whose path is a file or a directory."""
    if tokenizer_path is None or tokenizer_path.is_dir():
        return tokenizer_path
    return tokenizer_path.parent


def token_names(tokenizer_path: Path | None, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the texts of special tokens by name (`bos_token` and others)."""
    folder = tokenizer_folder(tokenizer_path)
    names = {} if folder is None else read_token_names(folder)
    for name, token in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id)):
        if token is not None:
            names.setdefault(name, tokenizer.id_to_token(token))
    return names


def find_template(
    tokenizer_path: Path | None, tokenizer: Tokenizer, template_path: str | None = None
) -> ChatTemplate | None:
    """Return the template in `template_path`, else in the tokenizer's directory, else None."""
    folder = tokenizer_folder(tokenizer_path)
    special_tokens = token_names(tokenizer_path, tokenizer)
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
        with open_regular_file(file) as opened:
            data = opened.read(TEMPLATE_BYTES_MAX + 1)
        if len(data) <= TEMPLATE_BYTES_MAX:
            return data.decode("utf-8-sig")  # A byte order mark is not part of the prompt.
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    except UnicodeDecodeError:
        problem = "is not UTF-8"
    else:
        problem = TOO_LONG
    raise CheckpointError(f"{file} {problem}; give a file with a jinja2 template")


def _template_from_config(file: Path) -> str | None:
    """Return the template in tokenizer_config.json; None if the file has no template.

    From a list of templates, return the template named "default", else the only template.
    """
    text = template = read_json(file).get("chat_template")
    if isinstance(template, list):
        templates = {
            named_template.get("name"): named_template.get("template")
            for named_template in template
            if isinstance(named_template, dict)
            and isinstance(named_template.get("name"), str | None)
        }
        only_template = next(iter(templates.values())) if len(templates) == 1 else None
        text = templates.get("default", only_template) if len(templates) == len(template) else None
    if isinstance(text, str):
        if len(text.encode()) > TEMPLATE_BYTES_MAX:
            raise CheckpointError(f"{file}: chat_template {TOO_LONG}; correct or remove it")
        return text
    if template is None:
        return None
    raise CheckpointError(
        f"{file} has a chat_template that is neither a string nor a list of named templates with "
        "one named 'default'; correct or remove the chat_template"
    )


NO_CONTROL_TOKENS = re.compile("(?!)")


class EscapedMessages:
    """Messages and template variables whose control tokens have a mark after each letter.

    `mark` is this mark. If the prompt must end within the last message, `end_mark` is another mark
    at the end of the message, else None.
    """

    def __init__(
        self,
        messages: list[dict[str, Any]],
        variables: dict[str, Any],
        controls: re.Pattern[str],
        *,
        continue_final_message: bool,
    ) -> None:
        texts = _collect_strings([messages, variables])
        unused_marks = [mark for mark in ESCAPE_MARKS if not any(mark in text for text in texts)]
        if len(unused_marks) < 1 + continue_final_message:
            raise RequestError(
                "the messages contain all of the noncharacters U+FDD0 to U+FDEF, or all but one; "
                "remove two of these characters",
                "messages",
            )
        self.mark = mark = unused_marks[0]
        self.end_mark = unused_marks[1] if continue_final_message else None
        # If two control tokens overlap in a text, `sub` finds only the first one. The marks after
        # its letters also split the second one.
        self.messages, self.variables = _map_strings(
            [messages, variables],
            lambda text: controls.sub(lambda match: mark.join([*match[0], ""]), text),
        )
        if self.end_mark is not None:
            # If the template removes the space, it also removes the message's own final spaces.
            self.messages[-1]["content"] += f"{self.end_mark} "

    def cut_rendered(self, text: str) -> str:
        """Return the part of a rendered chat that is the prompt."""
        if self.end_mark is None:
            return text
        prompt, end_mark, rest = text.rpartition(self.end_mark)
        if not end_mark:
            raise RequestError(
                "the chat template does not render the last message, so it cannot be continued",
                "continue_final_message",
            )
        return prompt if rest.startswith(" ") else prompt.rstrip()

    def remove_marks(self, text: str) -> str:
        return text.replace(self.mark, "").replace(self.end_mark or self.mark, "")


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
        self._splitter = ControlTokenSplitter(self._control_tokens)

    def escape_messages(
        self,
        messages: list[dict[str, Any]],
        variables: Mapping[str, Any] = MappingProxyType({}),
        *,
        continue_final_message: bool = False,
        keep_control_tokens: bool = False,
    ) -> EscapedMessages:
        """Escape the control tokens in the messages and in the variables of the template.

        `continue_final_message`: the prompt must end after the content of the last message.
        `keep_control_tokens`: leave the control tokens as they are, to be parsed.
        """
        return EscapedMessages(
            messages,
            dict(variables),
            NO_CONTROL_TOKENS if keep_control_tokens else self._splitter.pattern,
            continue_final_message=continue_final_message,
        )

    def encode_rendered(self, text: str, mark: str) -> tuple[int, ...]:
        """Encode a rendered template. No BOS token is added, because templates write bos_token."""
        token_ids: list[int] = []
        is_start = True
        for part, control in self._splitter.split(text):
            token_ids += self._encode_text(part, mark, continues_text=not is_start)
            if control is not None:
                token_ids.append(control.id)
            is_start = False
        return tuple(token_ids)

    def _encode_text(self, text: str, mark: str, *, continues_text: bool) -> list[int]:
        text = text.replace(mark, "")
        if not text:
            return []
        encode = self._tokenizer.encode
        continues_text = continues_text and self._tokenizer.continues_after_control
        ids = encode(text, continues_text=continues_text)
        return spell_out_guarded(
            ids, self._guarded_tokens, lambda letter: encode(letter, continues_text=True)
        )
