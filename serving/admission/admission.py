"""Admission: validates an `Ask` against the limits and turns it into an engine `Request`.

Errors in a request's fields are raised here, before the engine gets the request; each message names
the field and what the field needs. All protocols share this admission, so they apply the same
rules. Callers can send only token ids of the vocabulary; ids of virtual tokens come from the
adapter. The module is independent of the protocols, and uses only the sizes and the tokenizer of
the model.
"""

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import get_args

from gpt.adapters.adapter_file import parse_name
from gpt.adapters.prompt_template import PromptTemplate
from gpt.errors import PromptTooLongError, RequestError
from gpt.linear_adapter import last_occurrence
from gpt.sampling_params import SamplingParams
from gpt.settings import suggest_nearest
from gpt.tokenizers.tokenizer import IncrementalDetokenizer, Tokenizer, piece_decoder
from serving.adapters.registry import AdapterRegistry, LoadedAdapter
from serving.admission.prompt_tokens import PromptTokenizer, PromptTokens
from serving.config import LimitsConfig
from serving.engine.beam_search import beam_params, check_beam_stops, check_beams
from serving.engine.stream import answer_detokenizer
from serving.messages import Guide, ServiceClass
from serving.request import (
    NO_INFO,
    AnswerSpec,
    Ask,
    DeadlinePassedError,
    RefusedError,
    Request,
    ResumedOutput,
    answer_seed,
)
from serving.worker.guided_decoding import check_guide

# Random seeds stay below 2^53, so that JSON and JavaScript represent them exactly.
SEED_BITS = 53

# Priorities are -100 to 100. A waiting request gains 1 priority per `priority_age_s` seconds.
PRIORITY_MAX = 100
LABEL_BYTES_MAX = 256  # Bytes of a tenant's name or of a cache salt.


@dataclass(frozen=True)
class Admission:
    """Validates the asks for one model.

    `kv_tokens` returns the KV cache capacity for one sequence in tokens, or None before the engine
    is up.
    """

    tokenizer: Tokenizer
    adapters: AdapterRegistry
    vocab_size: int
    context_tokens_max: int
    config: LimitsConfig
    kv_tokens: Callable[[], int | None] = lambda: None
    # Raises if the adapter may not be served now.
    check_servable: Callable[[LoadedAdapter], None] = lambda adapter: None
    # Returns the fingerprint of the base model.
    base_fingerprint: Callable[[], str] = lambda: ""

    @cached_property
    def prompt_tokenizer(self) -> PromptTokenizer:
        return PromptTokenizer(self.tokenizer, self.vocab_size, self.config)

    def admit(self, ask: Ask, has_ended: Callable[[], bool] = lambda: False) -> Request:
        """Validate an ask and build the request.

        Tokenizing a long text takes long, so do not call this on an event loop. It reads no files:
        adapters must be loaded before. `has_ended` returns whether the call has ended meanwhile;
        then the work stops before the next prompt.
        """
        check_ask(ask, self.config, self.vocab_size)
        if ask.resume is not None:
            self._check_resumed(ask, ask.resume)
            ask = replace(ask, seed=ask.resume.seed)
        seed = secrets.randbits(SEED_BITS) if ask.seed is None else ask.seed
        adapter_names = ask.adapters or ("",)
        adapters = [
            self._resolve_adapter(name, ask.tenant) if name else None for name in adapter_names
        ]
        if isinstance(ask.prompt, Mapping) and len(adapters) > 1:
            self._check_input_fields(ask.prompt, adapters)
        answers: list[AnswerSpec] = []
        for adapter in adapters:
            if ask.continuations:
                for continuation in ask.continuations:
                    _check_call(has_ended)
                    answers.append(self._build_answer(ask, adapter, seed, continuation))
                continue
            _check_call(has_ended)
            first_answer = self._build_answer(ask, adapter, seed)
            if ask.resume is not None:
                first_answer = self._resume_answer(first_answer, ask.resume.token_ids)
            if ask.beam_width > 1:
                check_beam_stops(first_answer, ask.beam_width, self.vocab_size)
            answers += [
                replace(
                    first_answer,
                    sampling=replace(first_answer.sampling, seed=answer_seed(seed, index)),
                )
                for index in range(ask.answers)
            ]
        if ask.guide is not None:
            self._check_guide(ask.guide, answers[0].sampling.stop_token_ids)
        return Request(
            tuple(answers),
            guide=ask.guide,
            beams=beam_params(ask),
            service=ask.service,
            priority=ask.priority,
            tenant=ask.tenant,
            time_limit_s=ask.time_limit_s,
            cache_salt=ask.cache_salt,
        )

    def _build_answer(
        self, ask: Ask, adapter: LoadedAdapter | None, seed: int, continuation: str = ""
    ) -> AnswerSpec:
        max_new_tokens = self._requested_new_tokens(ask, adapter)
        prompt = self._prompt_ids(ask, adapter, max_new_tokens)
        if (
            adapter is not None
            and adapter.adapter_ref.is_prefix
            and len(prompt) == adapter.adapter_ref.row_count
        ):
            raise RequestError(
                f"the prompt is empty, and adapter {adapter.key!r} is a prefix of keys and values, "
                "which yields no logits by itself; give at least one token of text",
                "prompt",
            )
        continuation_ids = (
            self.prompt_tokenizer.encode(ask, continuation, continues_text=True)
            if continuation
            else ()
        )
        if continuation and not continuation_ids:
            raise RequestError(
                f"continuations has {continuation[:40]!r}, which encodes to no token of this "
                "model; remove it",
                "continuations",
            )
        prompt = (*prompt, *continuation_ids)
        new_tokens = self._fit_new_tokens(ask, adapter, prompt, max_new_tokens)
        adapter_stops = adapter.card.stop if adapter else ()
        return AnswerSpec(
            prompt,
            self._build_sampling(ask, new_tokens, seed),
            stop_strings=ask.stop_strings or adapter_stops,
            stop_in_text=ask.stop_in_text,
            keep_special_tokens=ask.keep_special_tokens,
            text_token_ids=ask.text_token_ids,
            adapter=adapter.key if adapter else "",
            is_private=adapter is not None and adapter.tenant != "",
            adapter_ref=adapter.adapter_ref if adapter else None,
            adapter_info=adapter.info if adapter else NO_INFO,
            virtual_tokens=sum(token >= self.vocab_size for token in prompt),
            continuation_tokens=len(continuation_ids),
            adapted_from=_adapted_from(adapter, prompt),
        )

    def _check_resumed(self, ask: Ask, resume: ResumedOutput) -> None:
        """Raise if this server cannot continue the answer with the tokens it would have had."""
        _check_token_ids(resume.token_ids, "resume.token_ids", self.vocab_size)
        if ask.seed is not None and ask.seed != resume.seed:
            raise RequestError(
                f"resume.seed is {resume.seed}, but the request has the seed {ask.seed}; remove "
                "one of them",
                "resume.seed",
            )
        for name in ask.adapters:
            if name and parse_name(name).version is None:
                raise RequestError(
                    f"resume needs the version of adapter {name!r}, because its current version "
                    "may have changed; give the adapter of the first part of the stream",
                    "adapter",
                )
        if resume.base_fingerprint != self.base_fingerprint():
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                "resume.base_fingerprint is not that of this server's base model, which would "
                "continue the answer differently; send the request without resume",
                "resume.base_fingerprint",
            )

    def _resume_answer(self, answer: AnswerSpec, token_ids: tuple[int, ...]) -> AnswerSpec:
        """Return the answer with its tokens so far; raise if they have ended it."""
        sampling = answer.sampling
        stop_tokens = [token for token in token_ids if token in sampling.stop_token_ids]
        if len(token_ids) >= sampling.max_new_tokens:
            end = f"max_new_tokens is {sampling.max_new_tokens}"
        elif stop_tokens:
            end = f"token {stop_tokens[0]} is a stop token"
        elif stop_string := self._find_stop_string(answer, token_ids):
            end = f"their text has the stop string {stop_string!r}"
        else:
            return replace(answer, resumed_tokens=token_ids)
        raise RequestError(
            f"resume.token_ids has {len(token_ids)} ids, which end the answer, because {end}; do "
            "not resume it",
            "resume.token_ids",
        )

    def _find_stop_string(self, answer: AnswerSpec, token_ids: Sequence[int]) -> str | None:
        if not answer.stop_strings:
            return None
        detokenizer = answer_detokenizer(self.tokenizer, answer)
        for token in token_ids:
            detokenizer.push(token)
            if detokenizer.is_stopped:
                break
        return detokenizer.matched_stop

    def _resolve_adapter(self, name: str, tenant: str) -> LoadedAdapter:
        adapter = self.adapters.lookup(name, tenant)
        self.check_servable(adapter)
        return adapter

    def tokenize(self, ask: Ask) -> PromptTokens:
        """Return the tokens of an ask's text prompt, not truncated and without virtual tokens.

        With several adapters, these are the tokens of the first adapter's prompt.
        """
        tokens = self.prompt_tokenizer.tokenize(ask, _text_of(ask), self._first_adapter(ask))
        return replace(tokens, before=self._without_virtual_tokens(tokens.before))

    def text_ids(self, ask: Ask) -> tuple[int, ...]:
        """Return the token ids of an ask's text prompt, truncated and without virtual tokens.

        With several adapters, these are the ids of the first adapter's prompt.
        """
        adapter = self._first_adapter(ask)
        ids = self.prompt_tokenizer.text_prompt(ask, _text_of(ask), adapter)
        return self._without_virtual_tokens(ids)

    def _first_adapter(self, ask: Ask) -> LoadedAdapter | None:
        if not ask.adapters or not ask.adapters[0]:
            return None
        return self.adapters.lookup(ask.adapters[0], ask.tenant)

    def _without_virtual_tokens(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token for token in ids if token < self.vocab_size)

    def detokenize(self, ids: tuple[int, ...], *, keep_special_tokens: bool = False) -> str:
        """Return the text of ids. `keep_special_tokens`: write control tokens as their texts."""
        if len(ids) > self.config.text_bytes_max:  # A token has at least one byte of text.
            raise RequestError(
                f"token_ids has {len(ids)} ids; this server takes at most "
                f"{self.config.text_bytes_max} (text_bytes_max)",
                "token_ids",
            )
        _check_token_ids(ids, "token_ids", self.vocab_size)
        decoder = piece_decoder(self.tokenizer, keep_special_tokens=keep_special_tokens)
        detokenizer = IncrementalDetokenizer(decoder)
        return "".join(map(detokenizer.push, ids)) + detokenizer.finish()

    @property
    def tokens_max(self) -> int:
        """Limit of prompt and new tokens together: the smaller of context and KV cache capacity."""
        kv_tokens = self.kv_tokens()
        return min(self.context_tokens_max, kv_tokens or self.context_tokens_max)

    def _prompt_ids(
        self, ask: Ask, adapter: LoadedAdapter | None, max_new_tokens: int
    ) -> tuple[int, ...]:
        virtual_ids = self.prompt_tokenizer.virtual_ids(adapter)
        match ask.prompt:
            case None:
                raise RequestError("prompt is not set; give text, token_ids or inputs", "prompt")
            case str() as text:
                ids = self.prompt_tokenizer.text_prompt(ask, text, adapter)
                if not (text or virtual_ids):
                    raise RequestError("text is empty; it needs at least one token", "text")
                if not ids:
                    raise RequestError(
                        f"text has {len(text)} characters but encodes to no token of this model; "
                        "it needs at least one token",
                        "text",
                    )
                return ids
            case tuple() as ids:
                if not ids:
                    raise RequestError("token_ids is empty; it needs at least one id", "token_ids")
                _check_token_ids(ids, "token_ids", self.vocab_size)
                return (*virtual_ids, *self.prompt_tokenizer.truncate(ids, ask))
            case inputs:
                return self._render_inputs(ask, inputs, adapter, max_new_tokens)

    def _render_inputs(
        self,
        ask: Ask,
        inputs: Mapping[str, str],
        adapter: LoadedAdapter | None,
        max_new_tokens: int,
    ) -> tuple[int, ...]:
        template: PromptTemplate | None = adapter.card.template if adapter else None
        if adapter is None:
            raise RequestError(
                "inputs need an adapter's prompt template, but the request names no adapter; name "
                "an adapter, or give text",
                "inputs",
            )
        if template is None:
            raise RequestError(
                f"adapter {adapter.key!r} has no template for inputs; give text", "inputs"
            )
        self.prompt_tokenizer.check_size(inputs)
        if len(ask.adapters) > 1:
            inputs = {name: text for name, text in inputs.items() if name in template.fields}
        # The rendered prompt must leave context for all new tokens if the caller set their number,
        # or if the template can truncate a field. Otherwise context for one new token is enough,
        # because `_fit_new_tokens` reduces the default number.
        reserve_all = ask.max_new_tokens is not None or template.truncate_field is not None
        reserved_tokens = max_new_tokens if reserve_all else 1
        tokens_max = max(1, self.tokens_max - reserved_tokens)
        parse_fields = self.prompt_tokenizer.parses_special_tokens(ask)
        return self._render_template(template, inputs, tokens_max, parse_fields)

    def _check_input_fields(
        self, inputs: Mapping[str, str], adapters: Sequence[LoadedAdapter | None]
    ) -> None:
        """Raise if an input field is in none of the adapters' templates."""
        cards = [adapter.card for adapter in adapters if adapter is not None]
        template_fields = {name for card in cards if card.template for name in card.template.fields}
        for name in inputs:
            if name not in template_fields:
                suggestion = "the templates have no fields"
                if template_fields:
                    suggestion = suggest_nearest(name, sorted(template_fields))
                raise RequestError(
                    f"field {name!r} is in no template of the named adapters; {suggestion}",
                    f"inputs.{name}",
                )

    def _render_template(
        self,
        template: PromptTemplate,
        inputs: Mapping[str, str],
        tokens_max: int,
        parse_fields: bool,
    ) -> tuple[int, ...]:
        try:
            rendered = template.render(
                self.tokenizer,
                inputs,
                vocab_size=self.vocab_size,
                tokens_max=tokens_max,
                with_answer=False,
                parse_fields=parse_fields,
                text_bytes_max=self.config.text_bytes_max,
            )
            return tuple(rendered.ids)
        except RequestError as error:
            # `error.field` is the name of a template field. The prefix `inputs.` distinguishes it
            # from a field of `Ask` with the same name.
            if error.field != "inputs":
                error.field = f"inputs.{error.field}"
            raise

    def _requested_new_tokens(self, ask: Ask, adapter: LoadedAdapter | None) -> int:
        """Return the requested or default number of new tokens, not yet fitted to the context."""
        if ask.max_new_tokens is not None:
            return ask.max_new_tokens
        adapter_default = adapter.card.max_new_tokens if adapter else None
        return adapter_default or self.config.new_tokens_default

    def _fit_new_tokens(
        self, ask: Ask, adapter: LoadedAdapter | None, prompt: tuple[int, ...], max_new_tokens: int
    ) -> int:
        """Return the number of new tokens that fit after the prompt, at most `max_new_tokens`.

        If `max_new_tokens` does not fit, it is reduced under two conditions: at least one new token
        fits, and the caller set no number or set `ask.fit_new_tokens`. Otherwise this raises.
        """
        limit = self.tokens_max
        tokens_left = limit - len(prompt)
        if tokens_left >= max_new_tokens:
            return max_new_tokens
        if tokens_left > 0 and (ask.max_new_tokens is None or ask.fit_new_tokens):
            return tokens_left
        virtual_tokens = sum(token >= self.vocab_size for token in prompt)
        parts = [f"prompt ({len(prompt) - virtual_tokens} tokens)"]
        if adapter:
            parts.append(f"adapter {adapter.key!r} ({virtual_tokens} virtual tokens)")
        parts.append(f"max_new_tokens ({max_new_tokens})")
        advice = (
            f"ask for at most {tokens_left} new tokens"
            if tokens_left > 0
            else f"shorten the prompt by {max_new_tokens - tokens_left} tokens"
        )
        limit_name = "the model's context"
        if limit < self.context_tokens_max:
            limit_name = "this server's KV cache"
        message = (
            f"{' + '.join(parts)} = {len(prompt) + max_new_tokens}, over {limit_name} of {limit} "
            f"tokens; {advice}"
        )
        if tokens_left > 0:
            raise RequestError(message, "max_new_tokens")
        raise PromptTooLongError(message, "prompt")

    def _build_sampling(self, ask: Ask, max_new_tokens: int, seed: int) -> SamplingParams:
        model_stop_ids = () if ask.ignore_ends else self.tokenizer.stop_ids
        stop_token_ids = dict.fromkeys((*model_stop_ids, *ask.stop_token_ids))
        bad_words = dict.fromkeys(
            token_ids for word in ask.bad_words for token_ids in self._bad_word_ids(word)
        )
        sampling = _base_sampling(ask, max_new_tokens, seed)
        return replace(sampling, stop_token_ids=tuple(stop_token_ids), bad_words=tuple(bad_words))

    def _check_guide(self, guide: Guide, stop_token_ids: Sequence[int]) -> None:
        size = len(guide.text.encode(errors="replace"))
        if size > self.config.guide_bytes_max:
            raise RequestError(
                f"guide.{guide.kind} is {size} bytes; this server takes at most "
                f"{self.config.guide_bytes_max} (guide_bytes_max)",
                f"guide.{guide.kind}",
            )
        check_guide(guide, stop_token_ids)

    def _bad_word_ids(self, word: str) -> list[tuple[int, ...]]:
        """Return three encodings of a word: at a text's start, directly after text, after a space.

        Some of the encodings may be equal. Other token sequences of the word are not banned, for
        example sequences with capital letters or with other token boundaries.
        """
        encode = self.tokenizer.encode
        variants = [
            encode(word),
            encode(word, continues_text=True),
            encode(f" {word}", continues_text=True),
        ]
        if not all(variants):
            raise RequestError(
                f"bad_words has {word[:40]!r}, which encodes to no token of this model; remove it",
                "bad_words",
            )
        return [tuple(variant) for variant in variants]


def _adapted_from(adapter: LoadedAdapter | None, prompt: Sequence[int]) -> int:
    """Return the position of the first token on which the adapter's weights act.

    It is the first token of the last occurrence of the invocation, or 0 without an invocation.
    """
    invocation = adapter.card.invocation if adapter else ()
    if adapter is None or not invocation:
        return 0
    position = last_occurrence(prompt, invocation)
    if position is None:
        raise RequestError(
            f"the prompt does not contain the invocation of adapter {adapter.key!r}, the "
            f"{len(invocation)} token ids {list(invocation)[:16]}, from which on the adapter acts; "
            "add the text of the invocation to the prompt",
            "prompt",
        )
    return position


def _text_of(ask: Ask) -> str:
    assert isinstance(ask.prompt, str)
    return ask.prompt


def _check_call(has_ended: Callable[[], bool]) -> None:
    """Stop the admission if the call has ended; nobody receives the error."""
    if has_ended():
        raise DeadlinePassedError("the call ended before its request was admitted")


def check_ask(ask: Ask, config: LimitsConfig, vocab_size: int) -> None:
    """Run the checks of an ask that need neither adapters nor weights."""
    for field, count, limit in (
        ("stops.strings", len(ask.stop_strings), config.stops_max),
        ("stops.token_ids", len(ask.stop_token_ids), config.stops_max),
        ("logit_bias", len(ask.logit_bias), config.bias_max),
        ("allowed_token_ids", len(ask.allowed_token_ids), config.allowed_max),
        ("bad_words", len(ask.bad_words), config.bad_words_max),
    ):
        if count > limit:
            raise RequestError(f"{field} has {count} entries; it may have at most {limit}", field)
    _check_byte_sizes("stops.strings", ask.stop_strings, config.stop_bytes_max)
    _check_byte_sizes("bad_words", ask.bad_words, config.stop_bytes_max)
    _check_byte_sizes("continuations", ask.continuations, config.text_bytes_max)
    _check_token_ids(ask.stop_token_ids, "stops.token_ids", vocab_size)
    _check_token_ids(ask.allowed_token_ids, "allowed_token_ids", vocab_size)
    _check_token_ids(ask.logit_bias, "logit_bias", vocab_size)
    _check_counts(ask, config)
    _check_label("tenant", ask.tenant)
    _check_label("cache_salt", ask.cache_salt)
    for field in ("truncate_tokens", "time_limit_s"):
        value = getattr(ask, field)
        if value is not None and not 0 < value < float("inf"):
            raise RequestError(f"{field} is {value}; it must be more than 0, or unset", field)
    if ask.truncate_tokens is not None and isinstance(ask.prompt, Mapping):
        raise RequestError(
            "truncate_tokens cannot be used with inputs, since the adapter's template defines the "
            "truncation; remove it",
            "truncate_tokens",
        )
    if ask.continuations and (ask.max_new_tokens != 0 or ask.prompt_logprobs is None):
        raise RequestError(
            "continuations are scored, not extended; set max_new_tokens to 0, and set "
            "prompt_logprobs",
            "continuations",
        )
    if ask.max_new_tokens == 0 and ask.prompt_logprobs is None:
        raise RequestError(
            "max_new_tokens is 0, so there is nothing to compute; set it to at least 1, or set "
            "prompt_logprobs",
            "max_new_tokens",
        )
    # SamplingParams checks the sampling fields. Unset fields get valid placeholder values here.
    max_new_tokens = ask.max_new_tokens
    if max_new_tokens is None:
        max_new_tokens = max(1, ask.min_new_tokens)
    _base_sampling(ask, max_new_tokens, ask.seed or 0)


def _check_counts(ask: Ask, config: LimitsConfig) -> None:
    if ask.answers < 1:
        raise RequestError(f"answers is {ask.answers}; it must be at least 1", "answers")
    check_beams(ask, config.beam_width_max)
    _check_answer_count(ask, config.answers_max)
    _check_resumable(ask)
    for field in ("logprobs", "prompt_logprobs"):
        alternatives = getattr(ask, field)
        if alternatives is not None and not 0 <= alternatives <= config.logprobs_max:
            raise RequestError(
                f"{field} is {alternatives}; it must be from 0 to {config.logprobs_max} "
                "(logprobs_max)",
                field,
            )
    if ask.service not in get_args(ServiceClass):
        service_classes = ", ".join(get_args(ServiceClass))
        raise RequestError(
            f"service is {ask.service!r}; choose one of: {service_classes}", "service"
        )
    if abs(ask.priority) > PRIORITY_MAX:
        raise RequestError(
            f"priority is {ask.priority}; it must be from {-PRIORITY_MAX} to {PRIORITY_MAX}",
            "priority",
        )


def _check_answer_count(ask: Ask, answers_max: int) -> None:
    """Check the total number of answers, over all adapters.

    Each beam and each continuation counts as one answer.
    """
    prompts = len(ask.adapters) or 1  # Each adapter has its own prompt.
    answers_per_prompt = max(ask.answers, ask.beam_width, len(ask.continuations))
    if prompts * answers_per_prompt <= answers_max:
        return
    if answers_per_prompt == ask.answers:
        count_text = f"answers is {answers_per_prompt}"
    elif answers_per_prompt == ask.beam_width:
        count_text = f"beam_width is {answers_per_prompt}"
    else:
        count_text = f"continuations has {answers_per_prompt} entries"
    if prompts > 1:
        count_text += f" for each of {prompts} adapters"
    raise RequestError(
        f"{count_text}; a request may have at most {answers_max} answers in total (answers_max)",
        "answers" if answers_per_prompt > 1 else "adapters",
    )


def _check_resumable(ask: Ask) -> None:
    if ask.resume is None:
        return
    problem = ""
    if ask.beam_width > 1:
        problem = "a beam search"
    elif max(ask.answers, len(ask.adapters)) > 1:
        problem = "several answers"
    elif ask.continuations or ask.max_new_tokens == 0:
        problem = "scores"
    if problem:
        raise RequestError(
            f"resume continues one answer, but the request is for {problem}; send it without "
            "resume",
            "resume",
        )


def _check_label(field: str, label: str) -> None:
    """Check a text that only identifies a tenant or a group of requests."""
    try:
        size = len(label.encode())
    except UnicodeEncodeError:
        raise RequestError(
            f"{field} has a lone surrogate; it needs to be valid unicode", field
        ) from None
    if size > LABEL_BYTES_MAX:
        raise RequestError(f"{field} is {size} bytes; it may be at most {LABEL_BYTES_MAX}", field)


def _check_byte_sizes(field: str, texts: Sequence[str], bytes_max: int) -> None:
    for text in texts:
        size = len(text.encode(errors="replace"))
        if not 0 < size <= bytes_max:
            raise RequestError(
                f"{field} has an entry of {size} bytes; each must be 1 to {bytes_max} bytes", field
            )


def _base_sampling(ask: Ask, max_new_tokens: int, seed: int) -> SamplingParams:
    return SamplingParams(
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


def _check_token_ids(ids: Iterable[int], field: str, vocab_size: int) -> None:
    invalid_id = next((token for token in ids if not 0 <= token < vocab_size), None)
    if invalid_id is not None:
        raise RequestError(
            f"{field} has {invalid_id}; token ids of this model are 0 to {vocab_size - 1}", field
        )
