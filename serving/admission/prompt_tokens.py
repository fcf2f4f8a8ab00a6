"""Prompt tokens: converts the texts of an `Ask` to token ids, for every protocol.

This is the only place where the text of a request becomes tokens. It decides whether control tokens
in a text are parsed (become their ids), adds BOS and EOS, puts the virtual tokens of an adapter in
front, and truncates. Ids of virtual tokens come only from an adapter, never from a text. The module
is independent of the protocols and of the engine.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from gpt.errors import RequestError
from gpt.tokenizers.tokenizer import Tokenizer
from serving.adapters.registry import LoadedAdapter
from serving.config import LimitsConfig
from serving.request import Ask


@dataclass(frozen=True)
class PromptTokens:
    """The token ids of a text prompt in three parts."""

    before: tuple[int, ...]  # Virtual tokens, and the control tokens added before the text.
    text: tuple[int, ...]
    after: tuple[int, ...] = ()  # The control tokens added after the text.

    @property
    def ids(self) -> tuple[int, ...]:
        return (*self.before, *self.text, *self.after)


@dataclass(frozen=True)
class PromptTokenizer:
    """Tokenizes the texts of requests for one model.

    `vocab_size`: the size of the model's vocabulary; ids from there on are virtual tokens.
    """

    tokenizer: Tokenizer
    vocab_size: int
    config: LimitsConfig

    def parses_special_tokens(self, ask: Ask) -> bool:
        """Return whether control tokens in the texts of the ask become their ids.

        Only a text prompt has the default of its protocol: the fields of a template stay plain text
        unless the caller sets `parse_special_tokens`.
        """
        if ask.parse_special_tokens is not None:
            self.check_parsing(ask.parse_special_tokens)
            return ask.parse_special_tokens
        is_text = isinstance(ask.prompt, str)
        return is_text and ask.parse_by_default and self.config.parse_special_tokens != "never"

    def check_parsing(self, parse_special_tokens: bool) -> None:
        """Raise if a request asks to parse special tokens, but a setting turns parsing off."""
        if parse_special_tokens and self.config.parse_special_tokens == "never":
            raise RequestError(
                "parse_special_tokens is true, but this server never parses special tokens in "
                "texts (its setting parse_special_tokens is never); remove it, or send token ids",
                "parse_special_tokens",
            )

    def encode(self, ask: Ask, text: str, *, continues_text: bool = False) -> tuple[int, ...]:
        """Return the ids of a text alone."""
        self.check_size({"text": text})
        allow_special = self.parses_special_tokens(ask)
        encode = self.tokenizer.encode
        return tuple(encode(text, allow_special=allow_special, continues_text=continues_text))

    def add_special_tokens(self, ids: tuple[int, ...]) -> PromptTokens:
        """Return the ids with the control tokens that the tokenizer adds around a text."""
        return PromptTokens(self.tokenizer.prefix_ids, ids, self.tokenizer.suffix_ids)

    def tokenize(self, ask: Ask, text: str, adapter: LoadedAdapter | None) -> PromptTokens:
        """Return the tokens of a text prompt, not truncated.

        With an adapter, BOS has the same position as in the training of the adapter.
        """
        ids = self.encode(ask, text)
        if adapter is None:
            return self.add_special_tokens(ids) if ask.add_special_tokens else PromptTokens((), ids)
        virtual_ids = self.virtual_ids(adapter)
        bos_id = self.tokenizer.bos_id
        bos_position = self._bos_position(adapter) if ask.add_special_tokens else "none"
        if bos_position == "none" or bos_id is None:
            return PromptTokens(virtual_ids, ids)
        if bos_position == "first":
            return PromptTokens((bos_id, *virtual_ids), ids)
        return PromptTokens((*virtual_ids, bos_id), ids)

    def text_prompt(self, ask: Ask, text: str, adapter: LoadedAdapter | None) -> tuple[int, ...]:
        """Return the ids of a text prompt, truncated to `ask.truncate_tokens`.

        The limit includes the added control tokens if there is no adapter, but neither virtual
        tokens nor BOS of an adapter's prompt.
        """
        tokens = self.tokenize(ask, text, adapter)
        if adapter is None:
            return self.truncate(tokens.ids, ask)
        return (*tokens.before, *self.truncate(tokens.text, ask))

    def virtual_ids(self, adapter: LoadedAdapter | None) -> tuple[int, ...]:
        """Return the ids of the adapter's virtual tokens."""
        rows = adapter.adapter_ref.row_count if adapter else 0
        return tuple(range(self.vocab_size, self.vocab_size + rows))

    def truncate(self, ids: tuple[int, ...], ask: Ask) -> tuple[int, ...]:
        """Return the last `ask.truncate_tokens` ids, or all ids if that is None.

        If the ids begin with the control tokens that the tokenizer adds before a text (BOS), these
        are kept, and fewer of the other ids.
        """
        limit = ask.truncate_tokens
        if limit is None or len(ids) <= limit:
            return ids
        prefix = self.tokenizer.prefix_ids
        if len(prefix) < limit and ids[: len(prefix)] == prefix:
            return (*prefix, *ids[len(ids) - limit + len(prefix) :])
        return ids[-limit:]

    def check_size(self, texts: Mapping[str, str]) -> None:
        """Raise if the texts are over `text_bytes_max`, which bounds the cost of tokenization."""
        size = sum(len(text.encode(errors="replace")) for text in texts.values())
        if size > self.config.text_bytes_max:
            raise RequestError(
                f"the text is {size} bytes; this server takes at most {self.config.text_bytes_max}"
                " (text_bytes_max)",
                "text",
            )

    def _bos_position(self, adapter: LoadedAdapter) -> str:
        template = adapter.card.template
        if template is not None:
            return template.bos
        # Adapters without a template come from HF PEFT or TGIS. Their virtual tokens precede BOS.
        return "text" if self.tokenizer.adds_bos else "none"
