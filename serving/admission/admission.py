"""Admission: from what a caller wants to what the engine runs, or to a refusal.

Everything that can be wrong with a request is found here, before it costs a step or meets others:
each message names the field, what it was, and what is allowed. All surfaces come through here, so
they agree. What a caller gives can name token ids of the vocabulary only; virtual ones are made
from the adapter. Knows no wire and no model, only its sizes.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from gpt.adapters.prompt_template import Template
from gpt.errors import PromptTooLongError, RequestError
from gpt.sampling_params import Sampling
from gpt.settings import nearest
from gpt.tokenizers.tokenizer import Tokenizer
from serving.adapters.registry import Adapters, Resident
from serving.config import ServerConfig
from serving.engine.beam_search import check_beams, check_ends, rule_of
from serving.messages import Guide, ServiceClass
from serving.request import Answer, Ask, Request, seed_of
from serving.worker.guided_decoding import check_guide

# A seed that is drawn stays below 2^53, so that JSON and JavaScript can say it back exactly.
SEED_BITS = 53


# What a caller may say of its own importance; each step is worth what waiting a while is.
PRIORITY_MAX = 100
TENANT_BYTES_MAX = 256


@dataclass(frozen=True)
class Admission:
    """`kv_tokens` tells how many tokens the engine's memory holds, once that is known."""

    tokenizer: Tokenizer
    adapters: Adapters
    vocab_size: int
    context_tokens_max: int
    config: ServerConfig
    kv_tokens: Callable[[], int | None] = lambda: None
    check: Callable[[Resident], None] = lambda resident: None  # Refuses one that is not served now.

    def admit(self, ask: Ask) -> Request:
        """May read the adapters' directory, so it is not for an event loop's own thread."""
        check_ask(ask, self.config, self.vocab_size)
        seed = secrets.randbits(SEED_BITS) if ask.seed is None else ask.seed
        names = ask.adapters or ("",)
        residents = [self._resident(name, ask.tenant) if name else None for name in names]
        if isinstance(ask.prompt, Mapping) and len(residents) > 1:
            self._check_fields(ask.prompt, residents)
        answers: list[Answer] = []
        for resident in residents:
            if ask.continuations:
                answers += [self._answer(ask, resident, seed, more) for more in ask.continuations]
                continue
            first = self._answer(ask, resident, seed)
            if ask.beam_width > 1:
                check_ends(first, ask.beam_width, self.vocab_size)
            answers += [
                replace(first, sampling=replace(first.sampling, seed=seed_of(seed, place)))
                for place in range(ask.answers)
            ]
        if ask.guide is not None:
            self._check_guide(ask.guide, answers[0].sampling.stop_token_ids)
        return Request(
            tuple(answers),
            guide=ask.guide,
            beams=rule_of(ask),
            service=ask.service,
            priority=ask.priority,
            tenant=ask.tenant,
            time_limit_s=ask.time_limit_s,
        )

    def _answer(
        self, ask: Ask, resident: Resident | None, seed: int, continuation: str = ""
    ) -> Answer:
        wanted = self._wanted(ask, resident)
        prompt = self._prompt(ask, resident, wanted)
        if resident is not None and resident.rows.prefix and len(prompt) == resident.rows.count:
            raise RequestError(
                f"the prompt is empty, and adapter {resident.key!r} is keys and values alone, "
                "behind which nothing is computed; give at least one token of text",
                "prompt",
            )
        more = self.tokenizer.encode(continuation, started=True) if continuation else []
        if continuation and not more:
            raise RequestError(
                f"continuations has {continuation[:40]!r}, which is no token of this model; "
                "take it out",
                "continuations",
            )
        prompt = (*prompt, *more)
        new_tokens = self._fitted(ask, resident, prompt, wanted)
        own_stops = resident.card.stop if resident else ()
        return Answer(
            prompt,
            self._sampling(ask, new_tokens, seed),
            stop_strings=ask.stop_strings or own_stops,
            stop_in_text=ask.stop_in_text,
            adapter=resident.key if resident else "",
            private=resident is not None and resident.tenant != "",
            rows=resident.rows if resident else None,
            virtual_tokens=sum(token >= self.vocab_size for token in prompt),
            continued=len(more),
        )

    def _resident(self, name: str, tenant: str) -> Resident:
        resident = self.adapters.resolve(name, tenant)
        self.check(resident)
        return resident

    def tokenize(self, text: str) -> tuple[int, ...]:
        """The ids of a text as a prompt."""
        self._check_text({"text": text})
        ids = self.tokenizer.encode(text)
        bos = self.tokenizer.bos_id if self.tokenizer.adds_bos else None
        return tuple(ids) if bos is None else (bos, *ids)

    def text_ids(self, ask: Ask) -> tuple[int, ...]:
        """The ids of a text as this ask's prompt has them, without the rows of its adapter."""
        assert isinstance(ask.prompt, str)
        if not ask.adapters:
            return self._cut(self.tokenize(ask.prompt), ask)
        resident = self.adapters.resolve(ask.adapters[0], ask.tenant)
        ids = self._after_rows(ask, ask.prompt, resident)
        return tuple(token for token in ids if token < self.vocab_size)

    def detokenize(self, ids: tuple[int, ...]) -> str:
        _check_ids(ids, "token_ids", self.vocab_size)
        return self.tokenizer.decode(ids)

    @property
    def tokens_max(self) -> int:
        """Of a prompt and its answer together."""
        kv_tokens = self.kv_tokens()
        return min(self.context_tokens_max, kv_tokens or self.context_tokens_max)

    def _prompt(self, ask: Ask, resident: Resident | None, wanted: int) -> tuple[int, ...]:
        rows = resident.rows.count if resident else 0
        match ask.prompt:
            case None:
                raise RequestError("prompt is not set; give text, token_ids or inputs", "prompt")
            case str() as text:
                ids = (
                    self._after_rows(ask, text, resident)
                    if resident
                    else self._cut(self.tokenize(text), ask)
                )
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
                return (*range(self.vocab_size, self.vocab_size + rows), *self._cut(ids, ask))
            case inputs:
                return self._rendered(ask, inputs, resident, wanted)

    def _cut(self, ids: tuple[int, ...], ask: Ask) -> tuple[int, ...]:
        """The last ones, and before them the token that begins a text, if it was there."""
        most, begin = ask.truncate_tokens, ids[:1]
        if most is None or len(ids) <= most:
            return ids
        if begin == (self.tokenizer.bos_id,) and self.tokenizer.adds_bos and most > 1:
            return (*begin, *ids[1 - most :])
        return ids[-most:]

    def _after_rows(self, ask: Ask, text: str, resident: Resident) -> tuple[int, ...]:
        """All of the adapter's rows, then the text as it is; begun as the adapter learned it."""
        rows = range(self.vocab_size, self.vocab_size + resident.rows.count)
        own, bos = resident.card.template, self.tokenizer.bos_id
        self._check_text({"text": text})
        ids = self._cut(tuple(self.tokenizer.encode(text)), ask)
        # Where the file says nothing it is HF PEFT's or TGIS's: rows before the text's begin.
        place = own.bos if own else "text" if self.tokenizer.adds_bos else "none"
        if place == "none" or bos is None:
            return (*rows, *ids)
        return (bos, *rows, *ids) if place == "first" else (*rows, bos, *ids)

    def _rendered(
        self, ask: Ask, inputs: Mapping[str, str], resident: Resident | None, wanted: int
    ) -> tuple[int, ...]:
        template: Template | None = resident.card.template if resident else None
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
        if len(ask.adapters) > 1:
            inputs = {name: text for name, text in inputs.items() if name in template.fields}
        # What can be cut is cut to leave room for the answer; else the room is what is left.
        cut = ask.max_new_tokens is not None or template.truncate_field is not None
        tokens_max = max(1, self.tokens_max - (wanted if cut else 1))
        return self._ids(template, inputs, tokens_max)

    def _check_fields(
        self, inputs: Mapping[str, str], residents: Sequence[Resident | None]
    ) -> None:
        """Each of many tasks takes the fields that its template has; one that none has is wrong."""
        cards = [resident.card for resident in residents if resident is not None]
        known = {name for card in cards if card.template for name in card.template.fields}
        for name in inputs:
            if name not in known:
                raise RequestError(
                    f"field {name!r} is in no template of these adapters; "
                    f"{nearest(name, sorted(known)) if known else 'they have none'}",
                    f"inputs.{name}",
                )

    def _ids(
        self, template: Template, inputs: Mapping[str, str], tokens_max: int
    ) -> tuple[int, ...]:
        sizes = {"vocab_size": self.vocab_size, "tokens_max": tokens_max}
        try:
            return tuple(template.render(self.tokenizer, inputs, **sizes, answer=False).ids)
        except RequestError as error:
            if error.field != "inputs":  # A field's own name, which may be one of the ask's too.
                error.field = f"inputs.{error.field}"
            raise

    def _wanted(self, ask: Ask, resident: Resident | None) -> int:
        """New tokens, before it is known whether there is room."""
        if ask.max_new_tokens is not None:
            return ask.max_new_tokens
        own = resident.card.max_new_tokens if resident else None
        return own or self.config.new_tokens_default

    def _fitted(
        self, ask: Ask, resident: Resident | None, prompt: tuple[int, ...], wanted: int
    ) -> int:
        """New tokens within the context. A number that nobody insists on is cut to fit."""
        limit = self.tokens_max
        room = limit - len(prompt)
        if room >= wanted:
            return wanted
        if room > 0 and (ask.max_new_tokens is None or ask.fit_new_tokens):
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
        what = "the model's context"
        if limit < self.context_tokens_max:
            what = "what this server's memory holds of keys and values"
        message = f"{' + '.join(parts)} = {len(prompt) + wanted}, over {what}, {limit}; {way}"
        if room > 0:
            raise RequestError(message, "max_new_tokens")
        raise PromptTooLongError(message, "prompt")

    def _sampling(self, ask: Ask, max_new_tokens: int, seed: int) -> Sampling:
        own = () if ask.ignore_ends else self.tokenizer.stop_ids
        ends = dict.fromkeys((*own, *ask.stop_token_ids))
        words = dict.fromkeys(run for word in ask.bad_words for run in self._runs(word))
        rule = _rule(ask, max_new_tokens, seed)
        return replace(rule, stop_token_ids=tuple(ends), bad_words=tuple(words))

    def _check_guide(self, guide: Guide, stop_token_ids: Sequence[int]) -> None:
        size = len(guide.text.encode(errors="replace"))
        if size > self.config.guide_bytes_max:
            raise RequestError(
                f"guide.{guide.kind} is {size} bytes; this server takes at most "
                f"{self.config.guide_bytes_max} (guide_bytes_max)",
                f"guide.{guide.kind}",
            )
        check_guide(guide, stop_token_ids)

    def _runs(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of a word, at a text's beginning, inside it, and after a space.

        Where the tokenizer does not tell these apart they are one. Other ways to spell the word,
        in capitals or cut elsewhere, are other runs, and are not banned.
        """
        encode = self.tokenizer.encode
        runs = [encode(word), encode(word, started=True), encode(f" {word}", started=True)]
        if not all(runs):
            raise RequestError(
                f"bad_words has {word[:40]!r}, which is no token of this model; take it out",
                "bad_words",
            )
        return [tuple(run) for run in runs]

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
    for field, count, limit in (
        ("stops.strings", len(ask.stop_strings), config.stops_max),
        ("stops.token_ids", len(ask.stop_token_ids), config.stops_max),
        ("logit_bias", len(ask.logit_bias), config.bias_max),
        ("allowed_token_ids", len(ask.allowed_token_ids), config.allowed_max),
        ("bad_words", len(ask.bad_words), config.bad_words_max),
    ):
        if count > limit:
            raise RequestError(f"{field} has {count}; at most {limit} may be", field)
    _check_sizes("stops.strings", ask.stop_strings, config.stop_bytes_max)
    _check_sizes("bad_words", ask.bad_words, config.stop_bytes_max)
    _check_sizes("continuations", ask.continuations, config.text_bytes_max)
    _check_ids(ask.stop_token_ids, "stops.token_ids", vocab_size)
    _check_ids(ask.allowed_token_ids, "allowed_token_ids", vocab_size)
    _check_ids(ask.logit_bias, "logit_bias", vocab_size)
    _check_counts(ask, config)
    _check_tenant(ask.tenant)
    for field in ("truncate_tokens", "time_limit_s"):
        value = getattr(ask, field)
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"{field} is {value}; it must be more than 0, or left out", field)
    if ask.truncate_tokens is not None and isinstance(ask.prompt, Mapping):
        raise RequestError(
            "truncate_tokens does not go with inputs: the adapter's template says what is cut",
            "truncate_tokens",
        )
    if ask.continuations and (ask.max_new_tokens != 0 or ask.prompt_logprobs is None):
        raise RequestError(
            "continuations are scored; ask for prompt_logprobs and for 0 new tokens",
            "continuations",
        )
    if ask.max_new_tokens == 0 and ask.prompt_logprobs is None:
        raise RequestError(
            "max_new_tokens is 0, and nothing else is asked for; it must be at least 1, or ask for "
            "prompt_logprobs",
            "max_new_tokens",
        )
    # It knows its own bounds; what was not asked for stands in here.
    unsaid = max(1, ask.min_new_tokens)
    _rule(ask, unsaid if ask.max_new_tokens is None else ask.max_new_tokens, ask.seed or 0)


def _check_counts(ask: Ask, config: ServerConfig) -> None:
    tasks = len(ask.adapters) or 1
    if ask.answers < 1:
        raise RequestError(f"answers is {ask.answers}; it must be at least 1", "answers")
    check_beams(ask, config.beam_width_max)
    each = max(ask.answers, ask.beam_width, len(ask.continuations))
    if tasks * each > config.answers_max:
        what = f"{tasks} adapters x {each} answers" if tasks > 1 else f"{each}"
        raise RequestError(
            f"answers is {what}; at most {config.answers_max} may be in one request (answers_max)",
            "answers" if each > 1 else "adapters",
        )
    for field in ("logprobs", "prompt_logprobs"):
        asked = getattr(ask, field)
        if asked is not None and not 0 <= asked <= config.logprobs_max:
            raise RequestError(
                f"{field} is {asked}; it must be from 0 to {config.logprobs_max} (logprobs_max)",
                field,
            )
    if ask.service not in get_args(ServiceClass):
        known = ", ".join(get_args(ServiceClass))
        raise RequestError(f"service is {ask.service!r}; known are: {known}", "service")
    if abs(ask.priority) > PRIORITY_MAX:
        raise RequestError(
            f"priority is {ask.priority}; it must be from {-PRIORITY_MAX} to {PRIORITY_MAX}",
            "priority",
        )


def _check_tenant(tenant: str) -> None:
    try:
        size = len(tenant.encode())
    except UnicodeEncodeError:
        raise RequestError(
            "tenant has a lone surrogate; it needs to be valid unicode", "tenant"
        ) from None
    if size > TENANT_BYTES_MAX:
        raise RequestError(f"tenant is {size} bytes; at most {TENANT_BYTES_MAX} may be", "tenant")


def _check_sizes(field: str, texts: Sequence[str], bytes_max: int) -> None:
    for text in texts:
        size = len(text.encode(errors="replace"))
        if not 0 < size <= bytes_max:
            raise RequestError(
                f"{field} has one of {size} bytes; each needs 1 to {bytes_max}", field
            )


def _rule(ask: Ask, max_new_tokens: int, seed: int) -> Sampling:
    return Sampling(
        max_new_tokens=max_new_tokens,
        min_new_tokens=ask.min_new_tokens,
        temperature=0.0 if ask.temperature is None else ask.temperature,
        top_k=ask.top_k,
        top_p=1.0 if ask.top_p is None else ask.top_p,
        min_p=ask.min_p,
        typical_p=ask.typical_p,
        repetition_penalty=ask.repetition_penalty,
        presence_penalty=ask.presence_penalty,
        frequency_penalty=ask.frequency_penalty,
        logit_bias=tuple(ask.logit_bias.items()),
        allowed_token_ids=ask.allowed_token_ids,
        no_repeat_ngram_size=ask.no_repeat_ngram_size,
        length_decay=ask.length_decay,
        seed=seed,
        logprobs=ask.logprobs,
        prompt_logprobs=ask.prompt_logprobs,
    )


def _check_ids(ids: Iterable[int], field: str, vocab_size: int) -> None:
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestError(
            f"{field} has {wrong}; ids of this model are from 0 to {vocab_size - 1}", field
        )
