"""Answers to many prompts by a model in process, cut where a server would cut them.

Greedy, some prompts at a time so that memory is bounded, on any split: every rank calls alike and
gets all of it. Where a text ends, by a token or a stop string, is `CertainText`'s business, as in a
server. Knows no adapters: ids at or above the vocabulary are rows of the table that it is given,
whose kind is as a card says it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gpt.generation.generate import stream
from gpt.generation.reference_sampler import Score
from gpt.generation.stop_strings import CertainText
from gpt.model.gpt_model import GPT
from gpt.model.pipeline import chunks_of
from gpt.sampling_params import Sampling
from gpt.tokenizers.tokenizer import Tokenizer

# Where neither a card nor settings say, as in a server.
NEW_TOKENS = 128
# Of prompts and the longest answers to them, at once.
TOKENS_MAX = 8192


@dataclass
class Answer:
    """What greedy decoding wrote, with the token that stopped it, if one did."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)  # With the two best, if they are asked for.
    logprob: float = 0.0  # The sum over the tokens.
    cut: bool = False  # It was ended by max_new_tokens.
    fault: bool = False  # The model's numbers were not finite.


def write_answers(
    model: GPT | Sequence[GPT],
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    table: Tensor | None = None,
    kind: str = "rows",
    max_new_tokens: int | Sequence[int] = NEW_TOKENS,
    stops: Sequence[str] = (),
    scored: bool = False,
    tokens_max: int = TOKENS_MAX,
) -> list[Answer]:
    """One for each prompt, in order. A maximum that has no room in the context is cut to it."""
    given = max_new_tokens
    most = [given] * len(prompts) if isinstance(given, int) else list(given)
    context = chunks_of(model)[0].config.max_position_embeddings
    rules = [
        Sampling(
            max_new_tokens=max(1, min(limit, context - len(prompt))),
            stop_token_ids=tokenizer.stop_ids,
            logprobs=2 if scored else None,
        )
        for prompt, limit in zip(prompts, most, strict=True)
    ]
    answers = [Answer() for _ in prompts]
    sizes = [len(prompt) + rule.max_new_tokens for prompt, rule in zip(prompts, rules, strict=True)]
    for some in _portions(sizes, tokens_max):
        texts = [CertainText(tokenizer, stops) for _ in some]
        over: set[int] = set()
        chosen = [prompts[place] for place in some], [rules[place] for place in some]
        for pieces in stream(model, *chosen, table=table, kind=kind, dropped=over):
            for piece in pieces:
                answer, text = answers[some[piece.row]], texts[piece.row]
                answer.token_ids.append(piece.token_id)
                answer.logprob += piece.logprob
                answer.scores += [piece.score] if piece.score else []
                answer.fault |= piece.finish_reason == "fault"
                if piece.finish_reason != "stop":
                    answer.text += text.push(piece.token_id)
                if text.stopped:
                    over.add(piece.row)
                elif piece.finish_reason is not None:
                    answer.text += text.finish()
                    answer.cut = piece.finish_reason == "length" and not text.stopped
    return answers


def _portions(sizes: Sequence[int], tokens_max: int) -> Iterator[list[int]]:
    """Places, the long ones together: a batch runs as long as its longest answer."""
    order = sorted(range(len(sizes)), key=lambda place: -sizes[place])
    portion: list[int] = []
    room = tokens_max
    for place in order:
        if portion and sizes[place] > room:
            yield portion
            portion, room = [], tokens_max
        portion.append(place)
        room -= sizes[place]
    if portion:
        yield portion
