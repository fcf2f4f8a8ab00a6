"""Admission: from what a caller wants to what the engine runs, or to a refusal.

Everything that can be wrong with a request is found here, before it costs a step or meets others:
each message names the field, what it was, and what is allowed. All surfaces come through here, so
they agree. What a caller gives can name token ids of the vocabulary only; virtual ones are made
from the adapter. Knows no wire and no model, only its sizes.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass

from gpt.errors import RequestError
from gpt.prompts import Template
from gpt.sampling import Sampling
from gpt.tokenizer import Tokenizer
from serving.adapters import Adapters, Resident
from serving.config import ServerConfig
from serving.request import Ask, Request

# A seed that is drawn stays below 2^53, so that JSON and JavaScript can say it back exactly.
SEED_BITS = 53

# More than any context: whether a prompt fits is judged once its ids are known.
TOKENS_MAX = 1 << 31


@dataclass(frozen=True)
class Admission:
    tokenizer: Tokenizer
    adapters: Adapters
    vocab_size: int
    context_tokens_max: int
    config: ServerConfig

    def admit(self, ask: Ask) -> Request:
        """May read the adapters' directory, so it is not for an event loop's own thread."""
        check_ask(ask, self.config, self.vocab_size)
        resident = self.adapters.resolve(ask.adapter) if ask.adapter else None
        wanted = self._wanted(ask, resident)
        prompt = self._prompt(ask, resident, wanted)
        own_stops = resident.adapter.card.stop if resident else ()
        return Request(
            prompt,
            self._sampling(ask, self._fitted(ask, resident, prompt, wanted)),
            stop_strings=ask.stop_strings or own_stops,
            adapter=resident.key if resident else "",
            digest=resident.adapter.digest if resident else "",
            virtual_tokens=sum(token >= self.vocab_size for token in prompt),
        )

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text as a prompt."""
        self._check_text({"text": text})
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return tuple(ids) if bos is None else (bos, *ids)

    def detokenize(self, ids: tuple[int, ...]) -> str:
        _check_ids(ids, "token_ids", self.vocab_size)
        return self.tokenizer.decode(ids)

    def _prompt(self, ask: Ask, resident: Resident | None, wanted: int) -> tuple[int, ...]:
        rows = len(resident.adapter.table) if resident else 0
        match ask.prompt:
            case None:
                raise RequestError("prompt is not set; give text, token_ids or inputs", "prompt")
            case str() as text:
                ids = self._after_rows(text, resident) if resident else self.tokenize(text)
                if not (text or rows):
                    raise RequestError("text is empty; it needs at least one token", "text")
                if not ids:
                    raise RequestError(
                        f"text is {len(text)} characters and no token of this model; it needs at "
                        "least one",
                        "text",
                    )
                return ids
            case tuple() as ids:
                if not ids:
                    raise RequestError("token_ids is empty; it needs at least one", "token_ids")
                _check_ids(ids, "token_ids", self.vocab_size)
                return (*range(self.vocab_size, self.vocab_size + rows), *ids)
            case inputs:
                return self._rendered(ask, inputs, resident, wanted)

    def _after_rows(self, text: str, resident: Resident) -> tuple[int, ...]:
        """All of the adapter's rows, then the text as it is; begun as the adapter learned it."""
        rows = range(self.vocab_size, self.vocab_size + len(resident.adapter.table))
        own, bos = resident.adapter.card.template, self.tokenizer.bos_id
        self._check_text({"text": text})
        ids = self.tokenizer.encode(text)
        # Where the file says nothing it is HF PEFT's or TGIS's: rows before the text's begin.
        place = own.bos if own else "text" if self.tokenizer.adds_bos else "none"
        if place == "none" or bos is None:
            return (*rows, *ids)
        return (bos, *rows, *ids) if place == "first" else (*rows, bos, *ids)

    def _rendered(
        self, ask: Ask, inputs: Mapping[str, str], resident: Resident | None, wanted: int
    ) -> tuple[int, ...]:
        template: Template | None = resident.adapter.card.template if resident else None
        if resident is None:
            raise RequestError(
                "inputs are for an adapter's template, and no adapter is named; name one, "
                "or give text",
                "inputs",
            )
        if template is None:
            raise RequestError(
                f"adapter {resident.key!r} has no template for inputs; give text", "inputs"
            )
        self._check_text(inputs)
        # What can be cut is cut to leave room for the answer; else the room is what is left.
        cut = ask.max_new_tokens is not None or template.truncate_field is not None
        tokens_max = max(1, self.context_tokens_max - (wanted if cut else 1))
        return self._ids(template, inputs, tokens_max)

    def _ids(
        self, template: Template, inputs: Mapping[str, str], tokens_max: int
    ) -> tuple[int, ...]:
        rendered = template.render(
            self.tokenizer, inputs, vocab_size=self.vocab_size, tokens_max=tokens_max, answer=False
        )
        return tuple(rendered.ids)

    def _wanted(self, ask: Ask, resident: Resident | None) -> int:
        """New tokens, before it is known whether there is room."""
        if ask.max_new_tokens is not None:
            return ask.max_new_tokens
        own = resident.adapter.card.max_new_tokens if resident else None
        return own or self.config.new_tokens_default

    def _fitted(
        self, ask: Ask, resident: Resident | None, prompt: tuple[int, ...], wanted: int
    ) -> int:
        """New tokens within the context. A number that nobody asked for is cut to fit."""
        room = self.context_tokens_max - len(prompt)
        if room >= wanted:
            return wanted
        if room > 0 and ask.max_new_tokens is None:
            return room
        virtual = sum(token >= self.vocab_size for token in prompt)
        parts = [f"prompt ({len(prompt) - virtual} tokens)"]
        if resident:
            parts.append(f"adapter {resident.key!r} ({virtual} virtual tokens)")
        parts.append(f"max_new_tokens ({wanted})")
        way = (
            f"ask for at most {room} new tokens"
            if room > 0
            else f"shorten the prompt by {wanted - room} tokens"
        )
        raise RequestError(
            f"{' + '.join(parts)} = {len(prompt) + wanted}, over the model's context of "
            f"{self.context_tokens_max}; {way}",
            "max_new_tokens" if room > 0 else "prompt",
        )

    def _sampling(self, ask: Ask, max_new_tokens: int) -> Sampling:
        ends = dict.fromkeys((*self.tokenizer.stop_ids, *ask.stop_token_ids))
        seed = secrets.randbits(SEED_BITS) if ask.seed is None else ask.seed
        return _rule(ask, max_new_tokens, seed, tuple(ends))

    def _check_text(self, texts: Mapping[str, str]) -> None:
        # Bytes bound what tokenizing can cost; the context bounds the tokens afterwards.
        size = sum(len(text.encode(errors="replace")) for text in texts.values())
        if size > self.config.text_bytes_max:
            raise RequestError(
                f"the text is {size} bytes; this server takes at most {self.config.text_bytes_max}"
                " (text_bytes_max)",
                "text",
            )


def check_ask(ask: Ask, config: ServerConfig, vocab_size: int) -> None:
    """Refuse what no adapter and no weights are needed to refuse."""
    for field, values in (
        ("stops.strings", ask.stop_strings),
        ("stops.token_ids", ask.stop_token_ids),
    ):
        if len(values) > config.stops_max:
            raise RequestError(
                f"{field} has {len(values)}; at most {config.stops_max} may be", field
            )
    for stop in ask.stop_strings:
        size = len(stop.encode(errors="replace"))
        if not 0 < size <= config.stop_bytes_max:
            raise RequestError(
                f"stops.strings has one of {size} bytes; each needs 1 to {config.stop_bytes_max}",
                "stops.strings",
            )
    _check_ids(ask.stop_token_ids, "stops.token_ids", vocab_size)
    # It knows its own bounds; what was not asked for stands in here.
    _rule(ask, 1 if ask.max_new_tokens is None else ask.max_new_tokens, ask.seed or 0, ())


def _rule(ask: Ask, max_new_tokens: int, seed: int, ends: tuple[int, ...]) -> Sampling:
    return Sampling(
        max_new_tokens=max_new_tokens,
        temperature=0.0 if ask.temperature is None else ask.temperature,
        top_k=ask.top_k,
        top_p=1.0 if ask.top_p is None else ask.top_p,
        seed=seed,
        stop_token_ids=ends,
    )


def _check_ids(ids: tuple[int, ...], field: str, vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"{field} has {wrong}; ids of this model are from 0 to {vocab_size - 1}", field
        )
