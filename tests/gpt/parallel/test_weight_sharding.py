"""The sharding table: the ranges of each rank, and complete coverage of every tensor."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpt.config import GPTConfig
from gpt.errors import ConfigError
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import (
    ParameterSpec,
    RankInStage,
    ShardRule,
    ShardSpec,
    check_split,
    expert_number,
    parameter_specs,
    shard_spec,
)
from tests.support.models import CONFIGS, EIGHT_EXPERTS, MODERN


def fc1(config: GPTConfig) -> ParameterSpec:
    return parameter_specs(config)["decoder.layers.0.mlp.linear_fc1.weight"]


def shard_specs(p: ParameterSpec, config: GPTConfig, tp: int) -> list[ShardSpec]:
    return [shard_spec(p, config, rank, tp) for rank in range(tp)]


def test_gated_fc1_gives_each_rank_rows_of_both_halves() -> None:
    # 44 gate rows come before 44 up rows; rank 1 of 2 has the second half of each.
    assert [p.ranges for p in shard_specs(fc1(MODERN), MODERN, 2)] == [
        ((0, 22), (44, 66)),
        ((22, 44), (66, 88)),
    ]


def test_qkv_is_sharded_by_query_groups_or_within_one() -> None:
    # Two groups of four queries, a key and a value of six channels: 36 rows each.
    qkv = parameter_specs(MODERN)["decoder.layers.0.self_attention.linear_qkv.weight"]
    assert [p.ranges for p in shard_specs(qkv, MODERN, 2)] == [((0, 36),), ((36, 72),)]
    assert [p.ranges for p in shard_specs(qkv, MODERN, 4)] == [
        ((0, 12), (24, 36)),
        ((12, 24), (24, 36)),
        ((36, 48), (60, 72)),
        ((48, 60), (60, 72)),
    ]


def test_vocabulary_padding_is_at_the_end() -> None:
    embedding = parameter_specs(MODERN)["embedding.word_embeddings.weight"]
    assert shard_specs(embedding, MODERN, 4) == [
        ShardSpec(0, ((0, 26),), 26),
        ShardSpec(0, ((26, 52),), 26),
        ShardSpec(0, ((52, 78),), 26),
        ShardSpec(0, ((78, 103),), 26),
    ]
    tiny = MODERN.with_fields(vocab_size=5)
    embedding = parameter_specs(tiny)["embedding.word_embeddings.weight"]
    assert shard_specs(embedding, tiny, 4)[3] == ShardSpec(0, ((5, 5),), 2)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_cover_every_tensor_once_except_copied_kv_heads(name: str, tp: int) -> None:
    config = CONFIGS[name]
    for parameter in parameter_specs(config).values():
        parts = shard_specs(parameter, config, tp)
        extent = parameter.shape[parts[0].dim]
        covered = [row for p in parts for start, stop in p.ranges for row in range(start, stop)]
        assert set(covered) == set(range(extent)), parameter
        copies = {ShardRule.REPLICATED, ShardRule.QKV, ShardRule.KV_HEADS} if tp > 1 else set()
        assert len(covered) == extent or parameter.shard_rule in copies, parameter
        assert len({p.size for p in parts}) == 1, parameter


@pytest.mark.parametrize(("tp", "ep"), [*product((1, 2, 4), (1, 2, 4, 8))])
def test_ranks_of_a_stage_hold_every_expert_once(tp: int, ep: int) -> None:
    config = EIGHT_EXPERTS
    stage = [RankInStage(rank, tp, ep) for rank in range(max(tp, ep))]
    for parameter in parameter_specs(config).values():
        shards = [rank.shard(parameter, config) for rank in stage]
        expert_shards = [shard for shard in shards if shard is not None]
        number = expert_number(parameter.name)
        if number is None:
            groups = [shards[first : first + tp] for first in range(0, len(stage), tp)]
            assert all(group == shard_specs(parameter, config, tp) for group in groups)
            continue
        assert [number in rank.local_experts(config) for rank in stage] == [
            shard is not None for shard in shards
        ]
        rows = Counter(
            row for shard in expert_shards for span in shard.ranges for row in range(*span)
        )
        copies = len(expert_shards) if parameter.shard_rule is ShardRule.REPLICATED else 1
        extent = parameter.shape[expert_shards[0].dim]
        assert rows == dict.fromkeys(range(extent), copies), parameter


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [
        (1, 3, r"must divide the 8 experts.* --ep can be 1, 2, 4, 8$"),
        (3, 2, r"a multiple or a divisor of tensor parallel 3; --ep can be 1$"),
        (1, 16, r"--ep can be 1, 2, 4, 8$"),
        (2, 0, r"--ep can be 1, 2, 4, 8$"),
    ],
)
def test_an_impossible_number_of_expert_parallel_ranks_is_refused(
    tp: int, ep: int, message: str
) -> None:
    config = EIGHT_EXPERTS.with_fields(num_attention_heads=12, num_query_groups=12)
    with pytest.raises(ConfigError, match=message):
        check_split(config, tp, 1, ep=ep)


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(ConfigError, match="the model has no experts; remove --ep"):
        check_split(MODERN, 2, 1, ep=2)


def test_whole_experts_need_no_width_that_the_tensor_ranks_divide() -> None:
    config = EIGHT_EXPERTS.with_fields(moe_ffn_hidden_size=7)
    with pytest.raises(ConfigError, match="moe_ffn_hidden_size 7"):
        check_split(config, 2, 1)
    check_split(config, 2, 1, ep=2)


@given(st.integers(1, 60), st.integers(1, 6), st.integers(1, 4))
def test_chunks_cover_the_layers_once_in_forward_order(num_layers: int, pp: int, vpp: int) -> None:
    stages = stage_layers(num_layers, pp, vpp=vpp)
    passed = [n for chunk in range(vpp) for stage in range(pp) for n in stages[stage][chunk]]
    assert passed == list(range(num_layers))


def test_split_error_names_the_widths_of_mlps_and_experts() -> None:
    with pytest.raises(ConfigError, match=r"in 2 query groups, ffn_hidden_size 44; --tp can be"):
        check_split(MODERN, 3, 1)
    experts = CONFIGS["experts"].with_fields(moe_ffn_hidden_size=7)
    widths = "ffn_hidden_size 128, moe_ffn_hidden_size 7, moe_shared_expert_intermediate_size 16"
    with pytest.raises(ConfigError, match=rf"in 2 query groups, {widths}; --tp can be 1$"):
        check_split(experts, 2, 1)
