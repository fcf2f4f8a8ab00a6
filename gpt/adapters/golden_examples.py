"""Golden examples: what an adapter wrote where it was learned, replayed where it is used.

An answer is the same if its tokens are, and its log-probability is, within what rounding makes of
the dtypes. Where another token was about as likely, rounding may choose it: that is a tie, and told
as one. Comparing needs an answer's tokens and scores alone, so a server compares by the same lines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gpt.adapters.card import CARD_BYTES_MAX, GOLDEN_MAX, Adapter, Card, Golden
from gpt.adapters.prompt_template import Template
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import AdapterError, RequestError
from gpt.generation.completions import NEW_TOKENS, Answer, write_answers
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import chunks_of
from gpt.tokenizers.tokenizer import Tokenizer

# Longer answers are kept up to here, so that a replay stays short.
TOKENS_MAX = 64
# Of an example's inputs: so all of them have room in a card.
INPUT_BYTES_MAX = CARD_BYTES_MAX // (4 * GOLDEN_MAX)

# How far the mean log-probability of an answer's tokens may move, in nats. Splits and batches move
# fp32 by less than 1e-5. Measured against fp32, 16 to 24 tokens an answer: a trained model moves by
# 0.003 in bfloat16 and 0.0003 in float16; lively random ones of 4 to 16 layers by up to 0.03 and
# 0.004. Where weights themselves are rounded more (8 bits), who checks gives a tolerance.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 0.02,
    "bfloat16": 0.1,
}
# Two tokens are a tie up to so many tolerances: one token moves more than the mean of them. Choices
# that bfloat16 turned in those random models were within 0.2 nats.
TIE = 4

Result = Literal["same", "tie", "different"]


class Scored(Protocol):
    """A token's log-probability, and the best ones with theirs, best first."""

    @property
    def logprob(self) -> float: ...

    @property
    def tops(self) -> Sequence[tuple[int, float]]: ...


@dataclass(frozen=True)
class Outcome:
    """How one example came out. `why` has no word of its texts."""

    result: Result
    difference: float = 0.0  # Of the mean log-probability of a token, if the tokens are the same.
    why: str = ""


@dataclass(frozen=True)
class Replay:
    """How all of an adapter's golden examples came out."""

    outcomes: tuple[Outcome, ...]
    tolerance: float
    lines: tuple[str, ...] = ()  # For people: each that is not the same, with its texts.

    @property
    def checked(self) -> int:
        return len(self.outcomes)

    @property
    def different(self) -> int:
        return sum(one.result == "different" for one in self.outcomes)

    @property
    def ties(self) -> int:
        return sum(one.result == "tie" for one in self.outcomes)

    @property
    def worst_logprob(self) -> float:
        return max((one.difference for one in self.outcomes), default=0.0)

    @property
    def passed(self) -> bool:
        return not self.different


def tolerance_of(golden: Sequence[Golden], dtype: str) -> float:
    """What rounding may make of examples, of the coarsest dtype that had a part in them."""
    dtypes = {dtype, *(one.dtype for one in golden)}
    return max(TOLERANCES[one] for one in dtypes & TOLERANCES.keys())


def golden_prompt(
    card: Card, tokenizer: Tokenizer, inputs: Mapping[str, str], vocab_size: int, tokens_max: int
) -> list[int]:
    """An example's ids. One that would be cut is refused: it would be cut otherwise elsewhere."""
    rendered = _template(card).render(
        tokenizer, inputs, vocab_size=vocab_size, tokens_max=tokens_max, answer=False
    )
    if rendered.truncated:
        raise RequestError(
            f"the prompt is {rendered.truncated} tokens too long, and would be cut", "inputs"
        )
    if card.kind == "prefix" and len(rendered.ids) == card.virtual_tokens:
        raise RequestError("no text stands behind the prefix, which says nothing alone", "inputs")
    return rendered.ids


def make_golden(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    adapter: Adapter,
    inputs: Sequence[Mapping[str, str]],
) -> tuple[Golden, ...]:
    """Examples of what the adapter writes now. Every rank calls alike.

    Inputs that are too long for one, or without a finite answer, are passed over; the first
    `GOLDEN_MAX` of the others are made. An answer's own field in them is left out.
    """
    card, answer_tokens = adapter.card, _answer_tokens(adapter.card)
    template, config = _template(card), chunks_of(model)[0].config
    wanted = [name for name in template.fields if name != template.answer_field]
    kept: list[dict[str, str]] = []
    prompts: list[list[int]] = []
    for record in inputs:
        own = {name: record[name] for name in wanted if name in record}
        size = sum(len(text.encode(errors="replace")) for text in own.values())
        if size > INPUT_BYTES_MAX or len(kept) == GOLDEN_MAX:
            continue
        tokens_max = config.max_position_embeddings - answer_tokens
        try:
            prompts.append(golden_prompt(card, tokenizer, own, config.vocab_size, tokens_max))
        except RequestError:
            continue
        kept.append(own)
    answers = _answers(model, tokenizer, adapter, prompts, [answer_tokens] * len(prompts))
    dtype = FLOAT_NAMES[chunks_of(model)[0].dtype]
    return tuple(
        Golden(own, answer.text, tuple(answer.token_ids), min(answer.logprob, 0.0), dtype)
        for own, answer in zip(kept, answers, strict=True)
        if not answer.fault
    )


def replay(
    model: GPT, tokenizer: Tokenizer, adapter: Adapter, *, tolerance: float | None = None
) -> Replay:
    """The adapter's own examples, by this model. Every rank calls alike."""
    card, config = adapter.card, model.config
    if tolerance is None:
        tolerance = tolerance_of(card.golden, FLOAT_NAMES[model.dtype])
    outcomes: list[Outcome | None] = []
    prompts: list[list[int]] = []
    lengths: list[int] = []
    for one in card.golden:
        length = len(one.token_ids) or _answer_tokens(card)
        tokens_max = config.max_position_embeddings - length
        try:
            prompt = golden_prompt(card, tokenizer, one.inputs, config.vocab_size, tokens_max)
        except RequestError as error:
            outcomes.append(Outcome("different", why=f"it cannot be asked: {error}"))
            continue
        outcomes.append(None)
        prompts.append(prompt)
        lengths.append(length)
    answers = iter(_answers(model, tokenizer, adapter, prompts, lengths))
    found: list[Outcome] = []
    lines: list[str] = []
    for number, (one, refused) in enumerate(zip(card.golden, outcomes, strict=True), 1):
        wrote = ""
        outcome = refused
        if outcome is None:
            answer = next(answers)
            outcome = compare(one, answer.text, answer.token_ids, answer.scores, tolerance)
            wrote = f" (was {one.output!r}, is {answer.text!r})"
        found.append(outcome)
        if outcome.result != "same":
            lines.append(f"example {number}: {outcome.why}{wrote}")
    return Replay(tuple(found), tolerance, tuple(lines))


def compare(
    golden: Golden,
    text: str,
    token_ids: Sequence[int],
    scores: Sequence[Scored],
    tolerance: float,
) -> Outcome:
    """What was written now against what was written then."""
    then = golden.token_ids
    if not then:
        same = text == golden.output
        return Outcome("same") if same else Outcome("different", why="its text is another")
    if len(scores) != len(token_ids):
        return Outcome("different", why="its numbers are not finite")
    pairs = zip(then, token_ids, strict=False)
    place = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if place is not None:
        (_, best), *others = scores[place].tops or [(token_ids[place], scores[place].logprob)]
        gap = next((best - other for token, other in others if token == then[place]), None)
        if gap is not None and gap <= TIE * tolerance:
            return Outcome("tie", why=f"its token {place + 1} is another, by {gap:.1g} nats")
        return Outcome("different", why=f"its token {place + 1} is another")
    if len(token_ids) != len(then):
        what = f"it ends after {len(token_ids)} tokens, not {len(then)}"
        return Outcome("different", why=what)
    if golden.logprob is None:
        return Outcome("same")
    difference = abs(sum(one.logprob for one in scores) - golden.logprob) / len(then)
    if not difference <= tolerance:
        return Outcome("different", difference, f"its tokens are off by {difference:.2g} nats each")
    return Outcome("same", difference)


def _template(card: Card) -> Template:
    if card.template is None:
        raise AdapterError(
            f"the card of {card.name!r} has no template to make prompts of golden examples; give "
            "it one (preamble adapters import --template)"
        )
    return card.template


def _answer_tokens(card: Card) -> int:
    return min(card.max_new_tokens or NEW_TOKENS, TOKENS_MAX)


def _answers(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
) -> list[Answer]:
    return write_answers(
        model,
        tokenizer,
        prompts,
        table=adapter.table.to(chunks_of(model)[0].mesh.device),
        kind=adapter.card.kind,
        max_new_tokens=lengths,
        stops=adapter.card.stop,
        scored=True,
    )
