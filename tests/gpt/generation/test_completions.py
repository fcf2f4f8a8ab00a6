"""Completions: drafts and shared prefixes change no token, and drafts have the right scores."""

from collections.abc import Sequence
from functools import cache

import pytest
import torch
from torch import Tensor

from gpt.attention.kv_cache import BLOCK_TOKENS
from gpt.generation import completions
from gpt.generation.completions import TextCompletion, complete_prompts
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from gpt.tokenizers.tokenizer import NullTokenizer
from tests.support.models import MODERN, build
from tests.support.prefix_adapters import draw_prefix_table
from tests.support.ranks import ranks

VOCABULARY = MODERN.vocab_size
TOKENIZER = NullTokenizer(VOCABULARY)
NEW = 7
VIRTUAL = [VOCABULARY + row for row in range(3)]
COMMON = [*VIRTUAL, *range(20, 20 + BLOCK_TOKENS)]  # A whole KV block and a part of another.
PROMPTS = [[*COMMON, 1, 2, 3], [*COMMON, 4], [*COMMON, 5, 6, 7, 8, 9], [*COMMON, 10, 11], COMMON]


@cache
def model() -> GPT:
    return build(MODERN)


def row_table() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(3, MODERN.hidden_size, generator=generator, dtype=torch.float64)


def complete(prompts: Sequence[Sequence[int]], **options: object) -> list[TextCompletion]:
    arguments: dict[str, object] = {"adapter_table": row_table(), "max_new_tokens": NEW}
    return complete_prompts(model(), TOKENIZER, prompts, **{**arguments, **options})  # type: ignore[arg-type]


def tokens_and_texts(answers: Sequence[TextCompletion]) -> list[tuple[list[int], str, bool]]:
    return [(answer.token_ids, answer.text, answer.is_truncated) for answer in answers]


def drafts_of(answers: Sequence[TextCompletion]) -> list[list[int]]:
    """Drafts that are right, wrong at the start, in the middle and at the end, empty, or long."""
    tokens = [answer.token_ids for answer in answers]
    other = [[(token + 1) % VOCABULARY for token in row] for row in tokens]
    return [
        tokens[0],
        other[1],
        [*tokens[2][:3], *other[2][3:]],
        [],
        [*tokens[4], 1, 2, 3],
    ]


@pytest.mark.parametrize("shares_prefix", [False, True])
def test_drafts_and_shared_prefixes_change_no_token(shares_prefix: bool) -> None:
    plain = complete(PROMPTS)
    drafts = drafts_of(plain)
    drafted = complete(PROMPTS, drafts=drafts, shares_prefix=shares_prefix)
    assert tokens_and_texts(drafted) == tokens_and_texts(plain)
    for draft, answer, plain_answer in zip(drafts, drafted, plain, strict=True):
        assert len(answer.draft_logprobs) == len(draft)
        assert answer.logprob == pytest.approx(plain_answer.logprob, abs=1e-9)


def test_drafts_have_the_scores_of_the_whole_text() -> None:
    drafts = [[3, 1, 4], [], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9, 7], [9]]
    answers = complete(PROMPTS, drafts=drafts, shares_prefix=True)
    for prompt, draft, answer in zip(PROMPTS, drafts, answers, strict=True):
        logits = model().logits(torch.tensor([[*prompt, *draft]]), row_table())[0]
        logprobs = logits.log_softmax(-1)
        expected = [
            float(logprobs[len(prompt) + index - 1, token]) for index, token in enumerate(draft)
        ]
        assert answer.draft_logprobs == pytest.approx(expected, abs=1e-9)


def test_stop_string_in_a_draft_ends_the_answer() -> None:
    plain = complete(PROMPTS)
    stop = TOKENIZER.decode(plain[0].token_ids[2:4])
    options: dict[str, object] = {"stop_strings": [stop]}
    stopped = complete(PROMPTS, **options)
    drafted = complete(PROMPTS, drafts=[answer.token_ids for answer in plain], **options)
    assert tokens_and_texts(drafted) == tokens_and_texts(stopped)
    assert len(drafted[0].token_ids) == 4 and len(drafted[0].draft_logprobs) == NEW


def test_drafts_follow_a_prefix_of_keys_and_values() -> None:
    table = draw_prefix_table(MODERN, 3).double()
    prompts = [[*VIRTUAL, 1, 2], [3, 4, 5], [*VIRTUAL, 6]]
    options: dict[str, object] = {"adapter_table": table, "adapter_kind": "prefix"}
    plain = complete(prompts, **options)
    drafts = [plain[0].token_ids, plain[1].token_ids[:4], [1, 2]]
    drafted = complete(prompts, drafts=drafts, shares_prefix=True, **options)
    assert tokens_and_texts(drafted) == tokens_and_texts(plain)


def test_common_prefixes_of_any_length_are_shared() -> None:
    block_ids = COMMON[:BLOCK_TOKENS]
    for prompts in (
        [PROMPTS[0]],
        [PROMPTS[1]] * 3,
        [COMMON[:2], COMMON[:1]],
        [[*COMMON[:5], 1], [*COMMON[:5], 2, 3]],
        [block_ids, [*block_ids, 1]],
        [[*block_ids, 1], [*block_ids, 2]],
        [[1, 2], [3]],
    ):
        assert tokens_and_texts(complete(prompts, shares_prefix=True)) == tokens_and_texts(
            complete(prompts)
        )


def test_batches_limit_the_logits_of_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completions, "DRAFT_LOGITS_MAX", 8 * VOCABULARY)
    drafts = [[1] * 5, [2] * 5, [3] * 3, [4] * 20, []]
    batches = list(completions._length_sorted_batches([9, 8, 7, 6, 5], 100, drafts, 8))
    assert batches == [[0], [1, 2], [3], [4]]
    assert [len(answer.draft_logprobs) for answer in complete(PROMPTS, drafts=drafts)] == [
        *(5, 5, 3, 20, 0)
    ]


def test_draft_is_cut_at_the_end_of_the_context() -> None:
    context = MODERN.max_position_embeddings
    prompts = [[1] * (context - 2), [1, 2]]
    answers = complete(prompts, drafts=[[3] * 9, [3] * 9])
    assert [len(answer.draft_logprobs) for answer in answers] == [3, 9]
    assert tokens_and_texts(answers) == tokens_and_texts(complete(prompts))


def test_progress_counts_complete_prompts() -> None:
    counts: list[int] = []
    complete(PROMPTS, tokens_max=60, report_progress=counts.append)
    assert counts == sorted(counts) and counts[-1] == len(PROMPTS)
    assert len(set(counts)) > 1


def _complete_on_rank(rank: int, size: int, tp: int) -> list[tuple[list[int], list[float]]]:
    torch.set_num_threads(1)
    shard = build(MODERN, Mesh.create(tp=tp, pp=size // tp))
    plain = complete_prompts(
        shard, TOKENIZER, PROMPTS, adapter_table=row_table(), max_new_tokens=NEW
    )
    answers = complete_prompts(
        shard,
        TOKENIZER,
        PROMPTS,
        adapter_table=row_table(),
        max_new_tokens=NEW,
        drafts=drafts_of(plain),
        shares_prefix=True,
    )
    return [(answer.token_ids, answer.draft_logprobs) for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
def test_drafts_are_verified_at_every_split(tp: int) -> None:
    plain = complete(PROMPTS)
    expected = complete(PROMPTS, drafts=drafts_of(plain))
    for answers in ranks(2, _complete_on_rank, 2, tp):
        assert [tokens for tokens, _ in answers] == [answer.token_ids for answer in plain]
        for (_, logprobs), answer in zip(answers, expected, strict=True):
            assert logprobs == pytest.approx(answer.draft_logprobs, abs=1e-9)
