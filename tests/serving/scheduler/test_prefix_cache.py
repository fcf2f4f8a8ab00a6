"""Prefix-cache keys: equal only for equal prefixes of the same tenant and model."""

import pytest

from gpt.sampling_params import SamplingParams
from serving.messages import Submission
from serving.scheduler.block_pool import BlockPool
from serving.scheduler.prefix_cache import PrefixCache
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE, make_adapter_ref, text_ids, virtual_ids

BLOCK_TOKENS = 4


def sequence_with_keys(
    prompt: list[int],
    name: str | None = None,
    *,
    tenant: str = "",
    cache_salt: str = "",
    digest: str = "",
    max_new_tokens: int = 4,
) -> Sequence:
    submission = Submission(
        0,
        prompt,
        SamplingParams(max_new_tokens=max_new_tokens),
        adapter_ref=make_adapter_ref(name, 6) if name else None,
        tenant=tenant,
        cache_salt=cache_salt,
    )
    sequence = Sequence.from_submission(
        submission, arrival_order=0, vocab_size=VOCAB_SIZE, block_tokens=BLOCK_TOKENS, now=0.0
    )
    PrefixCache(BlockPool(9), BLOCK_TOKENS, VOCAB_SIZE, digest).compute_keys(sequence)
    return sequence


def test_keys_are_equal_until_prefixes_diverge() -> None:
    first = sequence_with_keys(text_ids(20))
    second = sequence_with_keys([*text_ids(13), *text_ids(7, 5)])
    assert first.block_keys[:3] == second.block_keys[:3]
    assert not set(first.block_keys[3:]) & set(second.block_keys)


@pytest.mark.parametrize(
    "other",
    [
        sequence_with_keys(text_ids(20), tenant="other"),
        sequence_with_keys(text_ids(20), cache_salt="other"),
        sequence_with_keys(text_ids(20), digest="other"),
        sequence_with_keys([text_ids(20)[0] ^ 1, *text_ids(20)[1:]]),
        sequence_with_keys([*virtual_ids(1), *text_ids(20)[1:]], "task"),
    ],
    ids=["tenant", "salt", "model", "first token", "virtual token"],
)
def test_a_difference_at_the_start_changes_every_key(other: Sequence) -> None:
    assert not set(sequence_with_keys(text_ids(20)).block_keys) & set(other.block_keys)


def test_salts_share_keys_within_a_tenant_only() -> None:
    salted = sequence_with_keys(text_ids(20), cache_salt="other", tenant="a")
    again = sequence_with_keys(text_ids(20), cache_salt="other", tenant="a")
    other_tenant = sequence_with_keys(text_ids(20), cache_salt="other", tenant="b")
    swapped = sequence_with_keys(text_ids(20), cache_salt="a", tenant="other")
    assert salted.block_keys == again.block_keys
    assert not set(salted.block_keys) & {*other_tenant.block_keys, *swapped.block_keys}


def test_keys_of_virtual_tokens_depend_on_the_adapter() -> None:
    prompt = [*text_ids(8), *virtual_ids(3), *text_ids(9, 1)]
    sequence = sequence_with_keys(prompt, "first")
    other = sequence_with_keys(prompt, "second")
    assert sequence.block_keys == sequence_with_keys(prompt, "first").block_keys
    # Only the keys of the text before the virtual tokens do not depend on the adapter.
    assert sequence.block_keys[:2] == other.block_keys[:2]
    assert sequence.block_keys[:2] == sequence_with_keys(text_ids(8)).block_keys
    assert not set(sequence.block_keys[2:]) & set(other.block_keys[2:])


def test_keys_of_different_adapter_rows_differ() -> None:
    first = sequence_with_keys([VOCAB_SIZE, *text_ids(7)], "task")
    second = sequence_with_keys([VOCAB_SIZE + 1, *text_ids(7)], "task")
    assert not set(first.block_keys) & set(second.block_keys)


def test_partial_blocks_have_keys_where_prompts_diverge() -> None:
    # Virtual tokens from 5 to 8, and the last token is 13.
    sequence = sequence_with_keys([*text_ids(5), *virtual_ids(4), *text_ids(5, 1)], "task")
    positions = {
        block_index: [position for position, _ in partial_keys]
        for block_index, partial_keys in sequence.partial_keys.items()
    }
    assert positions == {1: [5], 2: [9], 3: [13]}
    keys = [key for partial_keys in sequence.partial_keys.values() for _, key in partial_keys]
    assert len({*keys, *sequence.block_keys}) == 3 + 3


def test_a_boundary_at_a_block_end_needs_no_partial_key() -> None:
    assert sequence_with_keys(text_ids(9)).partial_keys == {}
    assert sequence_with_keys([*virtual_ids(4), *text_ids(5)], "task").partial_keys == {}


def test_a_sequence_of_a_single_new_token_has_a_key_at_its_prompt_end() -> None:
    def partial_positions(max_new_tokens: int) -> list[int]:
        sequence = sequence_with_keys(text_ids(15), max_new_tokens=max_new_tokens)
        return [
            position
            for partial_keys in sequence.partial_keys.values()
            for position, _ in partial_keys
        ]

    assert partial_positions(1) == [14, 15]
    assert partial_positions(4) == [14]
