"""The table of splits: what each rank holds can be read off the page, and nothing is lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.parallel.sharding import Parameter, Part, Split, parameters, part, stage_layers
from tests.support.models import CONFIGS, MODERN


def fc1(config: GPTConfig) -> Parameter:
    return parameters(config)["decoder.layers.0.mlp.linear_fc1.weight"]


def held(p: Parameter, config: GPTConfig, tp: int) -> list[Part]:
    return [part(p, config, rank, tp) for rank in range(tp)]


def test_gated_fc1_gives_each_rank_rows_of_both_halves() -> None:
    # 44 gates stand above 44 ups; rank 1 of 2 has the second half of each.
    assert [p.ranges for p in held(fc1(MODERN), MODERN, 2)] == [
        ((0, 22), (44, 66)),
        ((22, 44), (66, 88)),
    ]


def test_qkv_gives_each_rank_whole_groups_or_part_of_one_with_its_key_and_value() -> None:
    # Two groups of four queries, a key and a value of six channels: 36 rows each.
    qkv = parameters(MODERN)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [p.ranges for p in held(qkv, MODERN, 2)] == [((0, 36),), ((36, 72),)]
    assert [p.ranges for p in held(qkv, MODERN, 4)] == [
        ((0, 12), (24, 36)),
        ((12, 24), (24, 36)),
        ((36, 48), (60, 72)),
        ((48, 60), (60, 72)),
    ]


def test_the_vocabulary_is_padded_at_its_end_only() -> None:
    words = parameters(MODERN)["embedding.word_embeddings.weight"]
    assert held(words, MODERN, 4) == [
        Part(0, ((0, 26),), 26),
        Part(0, ((26, 52),), 26),
        Part(0, ((52, 78),), 26),
        Part(0, ((78, 103),), 26),
    ]
    tiny = MODERN.with_fields(vocab_size=5)
    words = parameters(tiny)["embedding.word_embeddings.weight"]
    assert held(words, tiny, 4)[3] == Part(0, ((5, 5),), 2)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_the_ranks_together_hold_everything_once_but_for_copied_keys_and_values(
    name: str, tp: int
) -> None:
    config = CONFIGS[name]
    for parameter in parameters(config).values():
        parts = held(parameter, config, tp)
        extent = parameter.shape[parts[0].dim]
        covered = [row for p in parts for start, stop in p.ranges for row in range(start, stop)]
        assert set(covered) == set(range(extent)), parameter
        copies = {Split.WHOLE, Split.QKV} if tp > 1 else set()
        assert len(covered) == extent or parameter.split in copies, parameter
        assert len({p.size for p in parts}) == 1, parameter


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_chunks_cover_the_layers_once_in_the_order_that_tokens_pass_them(
    num_layers: int, pp: int, vpp: int
) -> None:
    stages = stage_layers(num_layers, pp, vpp=vpp)
    passed = [n for chunk in range(vpp) for stage in range(pp) for n in stages[stage][chunk]]
    assert passed == list(range(num_layers))
