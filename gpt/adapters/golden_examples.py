"""Golden examples: recorded outputs of an adapter, which a server replays and compares.

A golden example is recorded after training. The verdict of a replay is one of these:

- "same": the tokens are equal, and the difference of the log-probabilities is within the tolerance
  for rounding errors;
- "tie": the first different token is about as likely as the recorded token, so rounding may have
  caused the change;
- "different": otherwise.

For an example without recorded token ids, only the text is compared. A server's front end has no
`GPT` object; it calls `compare_example` with the text, token ids and scores of a new completion.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gpt.adapters.card import CARD_BYTES_MAX, GOLDEN_EXAMPLES_MAX, Adapter, Card, GoldenExample
from gpt.adapters.prompt_template import PromptTemplate
from gpt.adapters.sequence_adapters import sequence_adapters
from gpt.dtypes import FLOAT_DTYPE_NAMES
from gpt.errors import AdapterError, RequestError
from gpt.generation.completions import NEW_TOKENS_DEFAULT, TextCompletion, complete_prompts
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import model_chunks
from gpt.tokenizers.tokenizer import Tokenizer

# Recorded answers are limited to this length, so that a replay is short.
GOLDEN_TOKENS_MAX = 64
# Limit of an example's inputs, so that the maximum number of examples fits into a card.
INPUT_BYTES_MAX = CARD_BYTES_MAX // (4 * GOLDEN_EXAMPLES_MAX)

# Tolerances of the mean log-probability per token, in nats. Different parallel sizes and batches
# change this mean by less than 1e-5 in fp32. Measured differences from fp32, with 16 to 24 tokens
# per answer: 0.003 in bfloat16 and 0.0003 in float16 for a trained model; up to 0.03 in bfloat16
# and 0.004 in float16 for random models of 4 to 16 layers with large weights. For quantized weights
# (8 bits) the caller passes its own tolerance.
TOLERANCES: Mapping[str, float] = {
    "float64": 1e-3,
    "float32": 1e-3,
    "float16": 0.02,
    "bfloat16": 0.1,
}
# Two tokens tie if their log-probabilities differ by at most TIE_TOLERANCES * tolerance. The factor
# is above 1, because the rounding error of one token is larger than the error of the mean. Wherever
# bfloat16 chose another token than fp32 in the random models above, the log-probabilities of the
# two tokens differed by at most 0.2 nats.
TIE_TOLERANCES = 4

ReplayVerdict = Literal["same", "tie", "different"]


class TokenScore(Protocol):
    """A token's log-probability, and the most likely tokens at its position.

    `tops` has pairs of token id and log-probability, the most likely first.
    """

    @property
    def logprob(self) -> float: ...

    @property
    def tops(self) -> Sequence[tuple[int, float]]: ...


@dataclass(frozen=True)
class ExampleReplay:
    """The comparison of one golden example with its new completion."""

    verdict: ReplayVerdict
    # Absolute difference of the mean log-probability per token, in nats. 0 if the
    # log-probabilities were not compared.
    logprob_difference: float = 0.0
    reason: str = ""  # For a verdict other than "same"; contains no text of the example.


@dataclass(frozen=True)
class GoldenReplay:
    """The comparisons of all golden examples of an adapter."""

    examples: tuple[ExampleReplay, ...]
    tolerance: float
    mismatch_lines: tuple[str, ...] = ()  # For display: one line per verdict except "same".

    @property
    def checked(self) -> int:
        return len(self.examples)

    @property
    def different(self) -> int:
        return sum(example.verdict == "different" for example in self.examples)

    @property
    def ties(self) -> int:
        return sum(example.verdict == "tie" for example in self.examples)

    @property
    def logprob_difference_max(self) -> float:
        return max((example.logprob_difference for example in self.examples), default=0.0)

    @property
    def passed(self) -> bool:
        return not self.different


def golden_tolerance(golden: Sequence[GoldenExample], dtype: str) -> float:
    """Return the largest tolerance of the model's `dtype` and the dtypes of the examples."""
    dtypes = {dtype, *(example.dtype for example in golden)}
    return max(TOLERANCES[name] for name in dtypes & TOLERANCES.keys())


def render_golden_prompt(
    card: Card, tokenizer: Tokenizer, inputs: Mapping[str, str], vocab_size: int, tokens_max: int
) -> list[int]:
    """Return the token ids of an example's prompt.

    A prompt that is too long is refused, because its truncation would depend on the context length.
    """
    rendered = _require_template(card).render(
        tokenizer, inputs, vocab_size=vocab_size, tokens_max=tokens_max, with_answer=False
    )
    if rendered.truncated_tokens:
        raise RequestError(
            f"the prompt is {rendered.truncated_tokens} tokens too long; shorten it", "inputs"
        )
    if card.kind == "prefix" and len(rendered.ids) == card.virtual_tokens:
        raise RequestError("the prompt has no text after the prefix; give some text", "inputs")
    return rendered.ids


def record_golden_examples(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    adapter: Adapter,
    inputs: Sequence[Mapping[str, str]],
) -> tuple[GoldenExample, ...]:
    """Record greedy completions as golden examples.

    All ranks must call this function with equal arguments. At most `GOLDEN_EXAMPLES_MAX` inputs are
    used. Inputs that are too long or lack a field of the template are skipped, and so are
    completions with non-finite logits. The answer field of the inputs is not recorded.
    """
    card = adapter.card
    answer_tokens = _answer_token_limit(card)
    template = _require_template(card)
    config = model_chunks(model)[0].config
    input_fields = [name for name in template.fields if name != template.answer_field]
    example_inputs: list[dict[str, str]] = []
    prompts: list[list[int]] = []
    for candidate in inputs:
        fields = {name: candidate[name] for name in input_fields if name in candidate}
        size = sum(len(text.encode(errors="replace")) for text in fields.values())
        if size > INPUT_BYTES_MAX or len(example_inputs) == GOLDEN_EXAMPLES_MAX:
            continue
        tokens_max = config.max_position_embeddings - answer_tokens
        try:
            prompts.append(
                render_golden_prompt(card, tokenizer, fields, config.vocab_size, tokens_max)
            )
        except RequestError:
            continue
        example_inputs.append(fields)
    completions = _complete_prompts(
        model, tokenizer, adapter, prompts, [answer_tokens] * len(prompts)
    )
    dtype = FLOAT_DTYPE_NAMES[model_chunks(model)[0].dtype]
    return tuple(
        GoldenExample(
            fields,
            completion.text,
            tuple(completion.token_ids),
            min(completion.logprob, 0.0),
            dtype,
        )
        for fields, completion in zip(example_inputs, completions, strict=True)
        if not completion.has_fault
    )


def replay_golden_examples(
    model: GPT, tokenizer: Tokenizer, adapter: Adapter, *, tolerance: float | None = None
) -> GoldenReplay:
    """Replay the adapter's golden examples on this model.

    All ranks must call this function. `tolerance` is in nats per token; None: `golden_tolerance` of
    the examples and the model's dtype.
    """
    card, config = adapter.card, model.config
    if tolerance is None:
        tolerance = golden_tolerance(card.golden, FLOAT_DTYPE_NAMES[model.dtype])
    refusals: list[ExampleReplay | None] = []  # None for an example whose prompt is accepted.
    prompts: list[list[int]] = []
    token_counts: list[int] = []
    for example in card.golden:
        token_count = len(example.token_ids) or _answer_token_limit(card)
        tokens_max = config.max_position_embeddings - token_count
        try:
            prompt = render_golden_prompt(
                card, tokenizer, example.inputs, config.vocab_size, tokens_max
            )
        except RequestError as error:
            refusals.append(ExampleReplay("different", reason=f"its prompt is refused: {error}"))
            continue
        refusals.append(None)
        prompts.append(prompt)
        token_counts.append(token_count)
    completions = iter(_complete_prompts(model, tokenizer, adapter, prompts, token_counts))
    replays: list[ExampleReplay] = []
    mismatch_lines: list[str] = []
    for number, (example, refusal) in enumerate(zip(card.golden, refusals, strict=True), 1):
        text_change = ""
        example_replay = refusal
        if example_replay is None:
            completion = next(completions)
            example_replay = compare_example(
                example, completion.text, completion.token_ids, completion.scores, tolerance
            )
            text_change = f" (was {example.output!r}, is {completion.text!r})"
        replays.append(example_replay)
        if example_replay.verdict != "same":
            mismatch_lines.append(f"example {number}: {example_replay.reason}{text_change}")
    return GoldenReplay(tuple(replays), tolerance, tuple(mismatch_lines))


def compare_example(
    example: GoldenExample,
    text: str,
    token_ids: Sequence[int],
    scores: Sequence[TokenScore],
    tolerance: float,
) -> ExampleReplay:
    """Compare a new completion with the recorded completion of an example."""
    expected_ids = example.token_ids
    if not expected_ids:
        is_same_text = text == example.output
        return (
            ExampleReplay("same")
            if is_same_text
            else ExampleReplay("different", reason="its text differs")
        )
    if len(scores) != len(token_ids):
        return ExampleReplay("different", reason="the logits are not finite")
    pairs = zip(expected_ids, token_ids, strict=False)
    mismatch = next(
        (index for index, (expected_id, token_id) in enumerate(pairs) if expected_id != token_id),
        None,
    )
    if mismatch is not None:
        score = scores[mismatch]
        tops = score.tops or [(token_ids[mismatch], score.logprob)]
        best_logprob = tops[0][1]
        logprob_gap = next(
            (
                best_logprob - logprob
                for token_id, logprob in tops[1:]
                if token_id == expected_ids[mismatch]
            ),
            None,
        )
        if logprob_gap is not None and logprob_gap <= TIE_TOLERANCES * tolerance:
            return ExampleReplay(
                "tie",
                reason=f"its token {mismatch + 1} differs, but the log-probabilities of the "
                f"recorded and the new token differ by only {logprob_gap:.1g} nats",
            )
        return ExampleReplay("different", reason=f"its token {mismatch + 1} differs")
    if len(token_ids) != len(expected_ids):
        length_change = f"it ends after {len(token_ids)} tokens, not {len(expected_ids)}"
        return ExampleReplay("different", reason=length_change)
    if example.logprob is None:
        return ExampleReplay("same")
    difference = abs(sum(score.logprob for score in scores) - example.logprob) / len(expected_ids)
    if not difference <= tolerance:
        return ExampleReplay(
            "different",
            difference,
            "its tokens are the same, but their log-probabilities differ from the recorded ones by "
            f"{difference:.2g} nats per token",
        )
    return ExampleReplay("same", difference)


def _require_template(card: Card) -> PromptTemplate:
    if card.template is None:
        raise AdapterError(
            f"the card of {card.name!r} has no template to render golden examples; add a template "
            "with `preamble adapters import --template`"
        )
    return card.template


def _answer_token_limit(card: Card) -> int:
    return min(card.max_new_tokens or NEW_TOKENS_DEFAULT, GOLDEN_TOKENS_MAX)


def _complete_prompts(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    token_counts: Sequence[int],
) -> list[TextCompletion]:
    return complete_prompts(
        model,
        tokenizer,
        prompts,
        adapter_table=adapter.table.to(model_chunks(model)[0].mesh.device),
        adapter_kind=adapter.card.kind,
        adapters=sequence_adapters(adapter, model, prompts),
        max_new_tokens=token_counts,
        stop_strings=adapter.card.stop,
        with_scores=True,
    )
