"""Keys of prefixes: equal for equal prefixes of one tenant and one model, and for nothing else."""

import pytest

from gpt.sampling_params import Sampling
from serving.messages import Submission
from serving.scheduler.block_pool import Blocks
from serving.scheduler.prefix_cache import Prefixes
from serving.scheduler.sequence import Sequence
from tests.support.fake_ranks import VOCAB_SIZE, adapter, text, virtual

SIZE = 4


def keys(
    prompt: list[int], name: str | None = None, *, tenant: str = "", digest: str = "", new: int = 4
) -> Sequence:
    rows = adapter(name, 6) if name else None
    one = Submission(0, prompt, Sampling(max_new_tokens=new), rows=rows, tenant=tenant)
    places = [place for place, token in enumerate(prompt) if token >= VOCAB_SIZE]
    sequence = Sequence(
        one,
        order=0,
        tokens=list(prompt),
        prompt=len(prompt),
        most=len(prompt) + new,
        latency=True,
        queued_at=0.0,
        virtual_start=places[0] if places else 0,
        virtual_end=places[-1] + 1 if places else 0,
    )
    Prefixes(Blocks(9), SIZE, VOCAB_SIZE, digest).enter(sequence)
    return sequence


def test_equal_prefixes_have_equal_keys_up_to_where_they_part() -> None:
    one, two = keys(text(20)), keys([*text(13), *text(7, 5)])
    assert one.keys[:3] == two.keys[:3]
    assert not set(one.keys[3:]) & set(two.keys)


@pytest.mark.parametrize(
    "other",
    [
        keys(text(20), tenant="other"),
        keys(text(20), digest="other"),
        keys([text(20)[0] ^ 1, *text(20)[1:]]),
        keys([*virtual(1), *text(20)[1:]], "task"),
    ],
    ids=["tenant", "model", "first token", "virtual token"],
)
def test_what_differs_at_the_root_differs_everywhere(other: Sequence) -> None:
    assert not set(keys(text(20)).keys) & set(other.keys)


def test_virtual_tokens_are_their_adapters() -> None:
    one = keys([*text(8), *virtual(3), *text(9, 1)], "one")
    same = keys([*text(8), *virtual(3), *text(9, 1)], "one")
    two = keys([*text(8), *virtual(3), *text(9, 1)], "two")
    assert one.keys == same.keys
    assert one.keys[:2] == two.keys[:2]  # The text before them is anybody's,
    assert not set(one.keys[2:]) & set(two.keys[2:])  # and what follows is theirs.
    assert one.keys[:2] == keys(text(8)).keys


def test_a_row_is_told_from_any_other_row() -> None:
    first = keys([VOCAB_SIZE, *text(7)], "task")
    second = keys([VOCAB_SIZE + 1, *text(7)], "task")
    assert not set(first.keys) & set(second.keys)


def test_parts_of_blocks_have_keys_where_prompts_part() -> None:
    # Virtual tokens from 5 to 8, and the last token is 13.
    sequence = keys([*text(5), *virtual(4), *text(5, 1)], "task")
    places = {place: [position for position, _ in parts] for place, parts in sequence.tails.items()}
    assert places == {1: [5], 2: [9], 3: [13]}
    every = [key for parts in sequence.tails.values() for _, key in parts]
    assert len({*every, *sequence.keys}) == 3 + 3


def test_a_boundary_between_blocks_needs_no_part() -> None:
    assert keys(text(9)).tails == {}
    assert keys([*virtual(4), *text(5)], "task").tails == {}


def test_one_that_asks_for_a_single_token_can_be_gone_on_from_its_end() -> None:
    parts = [position for tail in keys(text(15), new=1).tails.values() for position, _ in tail]
    assert parts == [14, 15]
    assert [at for tail in keys(text(15)).tails.values() for at, _ in tail] == [14]
