"""Megatron args of a model, and the refusal of traits that the args cannot express."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_tools.layout.layout import ParallelSplit, stored_vocab_rows
from checkpoints_tools.writers.megatron_args import (
    build_args,
    check_supported,
    load_notes,
    plan_stages,
)
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.mappings.hybrid_args import config_from_args
from gpt.formats.mappings.megatron_args import (
    ARCHITECTURE_ARGS,
    HYBRID_ARGS,
    MegatronArgs,
    WeightShapes,
    complete_fields,
)
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.parallel.weight_sharding import parameter_specs
from tests.support.checkpoints.megatron_expressible import SPARSE, expressible, expressible_by_layer
from tests.support.models import CLASSIC, MODERN, ODD, SIGMOID_EXPERTS, XIELU


def config_of_args(config: GPTConfig, args: Namespace) -> GPTConfig:
    """The reader's config for given args and weight shapes."""
    shapes = {name: [parameter.shape] for name, parameter in parameter_specs(config).items()}
    shapes[EMBEDDING] = [(args.padded_vocab_size, config.hidden_size)]
    layers = getattr(args, "hybrid_layer_pattern", "").replace("|", "")
    weights = WeightShapes(shapes, config.num_layers, False, layers)
    parsed = config_from_args(MegatronArgs(vars(args), "args"), weights)
    assert set(parsed.notes) <= {"rope_scaling"}  # It is applied, with a note.
    return GPTConfig.from_dict({**complete_fields(parsed, {}, "args"), "dtype": config.dtype})


@given(config=expressible())
def test_config_round_trips_through_args(config: GPTConfig) -> None:
    check_supported(config, ParallelSplit())
    assert config_of_args(config, build_args(config, ParallelSplit())) == config


@settings(max_examples=60, deadline=None)
@given(config=expressible_by_layer(), pp=st.integers(1, 4), vpp=st.integers(1, 3))
def test_args_of_every_split_describe_the_same_model(config: GPTConfig, pp: int, vpp: int) -> None:
    split = ParallelSplit(1, min(pp, config.num_layers), vpp)
    if split.pp == 1 or split.pp * vpp > config.num_layers:
        split = ParallelSplit(1, split.pp)
    check_supported(config, split)
    args = build_args(config, split)
    assert config_of_args(config, args) == config
    layers = plan_stages(config, split).layers
    assert _counts(args) == [[len(chunk) for chunk in stage] for stage in layers]
    scaling = config.rope_scaling
    if config.rotary_interleaved or (scaling and scaling.kind != "linear"):
        return  # Refused for a HybridModel.
    check_supported(config, split, "hybrid")
    args = build_args(config, split, model="hybrid")
    assert config_of_args(config, args) == config
    segments = args.hybrid_layer_pattern.split("|")
    if len(segments) == 1:  # Megatron divides the layers equally.
        assert [[len(chunk) for chunk in stage] for stage in layers] == [
            [config.num_layers // split.pp]
        ] * split.pp
        return
    for stage in range(split.pp):
        assert [len(segment) // 2 for segment in segments[stage :: split.pp]] == [
            len(chunk) for chunk in layers[stage]
        ]


def _counts(args: Namespace) -> list[list[int]]:
    """Layers of each stage's chunks, counted as Megatron does from its arguments."""
    pp = args.pipeline_model_parallel_size
    vpp = args.virtual_pipeline_model_parallel_size or 1
    layout = args.pipeline_model_parallel_layout
    if layout is not None:
        assert layout[0] == "E" and layout[-1] == "L"
        chunks = [chunk.count("t") for chunk in layout.split("|")]
        return [chunks[stage::pp] for stage in range(pp)]
    edge_sizes = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    layers_left = args.num_layers - sum(size or 0 for size in edge_sizes)
    middle = pp - sum(size is not None for size in edge_sizes)
    assert layers_left % middle == 0 if middle else layers_left == 0
    totals = [layers_left // middle] * pp if middle else [0] * pp
    for position, size in zip((0, -1), edge_sizes, strict=True):
        totals[position] = totals[position] if size is None else size
    assert all(total % vpp == 0 for total in totals)
    if args.num_layers_per_virtual_pipeline_stage:
        assert args.num_layers_per_virtual_pipeline_stage * vpp == totals[0] == totals[-1]
    return [[total // vpp] * vpp for total in totals]


def test_args_are_complete_and_named_for_every_megatron_version() -> None:
    args = vars(build_args(SPARSE, ParallelSplit(2, 2, 1, 2), vocabulary_multiple=8))
    removed_fields = {"model_parallel_size", "onnx_safe", *HYBRID_ARGS} - {"mtp_num_layers"}
    assert set(ARCHITECTURE_ARGS) - set(args) == removed_fields
    assert args["norm_epsilon"] == args["layernorm_epsilon"] == SPARSE.layernorm_epsilon
    assert args["apply_layernorm_1p"] is args["layernorm_zero_centered_gamma"] is False
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 2)
    assert args["expert_model_parallel_size"] == args["expert_tensor_parallel_size"] == 2
    assert (args["world_size"], args["data_parallel_size"]) == (8, 2)
    assert args["padded_vocab_size"] == 112 == stored_vocab_rows(SPARSE, 2, 8)
    assert (args["vocab_size"], args["make_vocab_size_divisible_by"]) == (100, 8)
    assert args["moe_layer_freq"] == [1, 0, 1, 1]
    assert args["num_experts"] == 4


@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "none"])
def test_position_args_are_accepted_by_megatron(kind: str) -> None:
    args = build_args(CLASSIC.with_fields(position_embedding_type=kind), ParallelSplit())
    assert args.position_embedding_type == kind
    # Megatron refuses `none`, and names the flag that once meant the same.
    assert args.add_position_embedding is (kind != "rope")
    assert args.use_rotary_position_embeddings is (kind == "rope")


def test_query_group_and_window_args_count_as_megatron_does() -> None:
    classic = build_args(CLASSIC, ParallelSplit())
    modern = build_args(MODERN, ParallelSplit())
    assert (classic.group_query_attention, classic.num_query_groups) == (False, 1)
    assert (modern.group_query_attention, modern.num_query_groups) == (True, 2)
    assert (classic.window_size, modern.window_size) == (None, (6, 0))


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("float32", (False, False)), ("bfloat16", (False, True)), ("float16", (True, False))],
)
def test_dtype_is_given_by_flags_and_by_name(dtype: str, flags: tuple[bool, bool]) -> None:
    args = build_args(CLASSIC.with_fields(dtype=dtype), ParallelSplit())
    assert (args.fp16, args.bf16) == flags
    assert args.params_dtype is getattr(torch, dtype)


def test_tokenizer_type_is_given_only_if_megatron_compares_it(tmp_path: Path) -> None:
    assert build_args(CLASSIC, ParallelSplit(), tokenizer=tmp_path).tokenizer_type is None
    (tmp_path / "gpt2-merges.txt").touch()
    assert (
        build_args(CLASSIC, ParallelSplit(), tokenizer=tmp_path).tokenizer_type
        == "GPT2BPETokenizer"
    )
    (tmp_path / "tokenizer.json").touch()
    assert build_args(CLASSIC, ParallelSplit(), tokenizer=tmp_path).tokenizer_type is None
    gpt2 = CLASSIC.with_fields(vocab_size=50257)
    assert (
        build_args(gpt2, ParallelSplit(), tokenizer=tmp_path).tokenizer_type == "GPT2BPETokenizer"
    )


INEXPRESSIBLE: dict[str, tuple[GPTConfig, str]] = {
    "parallel residual": (CLASSIC.with_fields(parallel_residual=True), "no parallel_residual"),
    "a factor of the residual": (
        CLASSIC.with_fields(residual_multiplier=0.22),
        "no residual_multiplier 0.22",
    ),
    "divided logits": (CLASSIC.with_fields(logits_scaling=16.0), "no logits_scaling 16.0"),
    "a factor of the embeddings": (
        CLASSIC.with_fields(embedding_multiplier=12.0),
        "no embedding_multiplier 12.0",
    ),
    "queries scaled by position": (
        CLASSIC.with_fields(query_scaling_beta=0.1, query_scaling_length=16),
        "no query_scaling_beta 0.1",
    ),
    "xIELU": (CLASSIC.with_fields(activation="xielu"), "no xielu"),
    "longrope": (
        XIELU.with_fields(activation="relu2", query_scaling_beta=0.0),
        "no longrope rope_scaling",
    ),
    "two kinds of positions": (
        ODD.with_fields(parallel_residual=False),
        "no learned_absolute.rope",
    ),
    "gated GELU": (MODERN.with_fields(activation="gelu"), "no gated gelu: only silu and"),
    "plain SiLU": (MODERN.with_fields(gated=False), "no silu without a gate"),
    "bias of one projection": (
        CLASSIC.with_fields(proj_bias=False),
        "no combination of qkv_bias True, proj_bias False and mlp_bias True: biases are on",
    ),
    "all biases but QKV's": (
        CLASSIC.with_fields(qkv_bias=False),
        "no combination of qkv_bias False",
    ),
    "tanh without biases": (
        CLASSIC.with_fields(proj_bias=False, mlp_bias=False),
        "no gelu_tanh without mlp_bias",
    ),
    "positions stretched in another way": (
        MODERN.with_fields(
            rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=4096)
        ),
        "no llama3 rope_scaling with original_max_position_embeddings 4096, .*: Megatron's code "
        "fixes these at 8192, 1.0 and 4.0",
    ),
    "experts with biases": (
        SPARSE.with_fields(proj_bias=True, mlp_bias=True),
        "no experts with mlp_bias",
    ),
    "one expert of equal weight": (
        SPARSE.with_fields(moe_router_topk=1),
        "no moe_router_topk 1 without moe_router_pre_softmax",
    ),
    "a bias for choosing by softmax": (
        SIGMOID_EXPERTS.with_fields(
            moe_router_score_function="softmax", activation="silu", proj_bias=False
        ),
        "no moe_router_expert_bias with softmax",
    ),
    "double precision": (CLASSIC.with_fields(dtype="float64"), "no dtype float64; choose one of"),
}


@pytest.mark.parametrize("case", INEXPRESSIBLE)
def test_trait_that_megatron_lacks_is_named(case: str) -> None:
    config, message = INEXPRESSIBLE[case]
    with pytest.raises(ConfigError, match=message):
        check_supported(config, ParallelSplit())


@pytest.mark.parametrize(
    ("layers", "split", "message"),
    [
        (4, ParallelSplit(pp=2), ""),
        (8, ParallelSplit(pp=2, vpp=2), ""),
        (
            5,
            ParallelSplit(pp=2),
            "unequal numbers of layers: 3, 2; .* --decoder-first-pipeline-num-layers 3",
        ),
        (
            5,
            ParallelSplit(pp=3),
            "unequal numbers of layers: 2, 2, 1; .* --decoder-last-pipeline-num-layers 1",
        ),
        (5, ParallelSplit(pp=2, vpp=2), "--pipeline-model-parallel-layout 'Et|tt|t|tL'"),
        (6, ParallelSplit(pp=4), "1, 2, 2, 1; .*first-pipeline-num-layers 1 .*last.* 1"),
    ],
)
def test_uneven_stages_are_noted_with_the_flags_to_use(
    layers: int, split: ParallelSplit, message: str
) -> None:
    config = CLASSIC.with_fields(num_layers=layers, moe_layers=())
    notes = load_notes(config, split)
    assert len(notes) == (1 if message else 0)
    for text in notes:
        assert re.search(message.replace("|", r"\|"), text), text


def test_features_that_older_versions_lack_are_noted() -> None:
    assert any(
        "query groups on 4 tensor ranks" in note for note in load_notes(MODERN, ParallelSplit(4))
    )
    assert any("moe_shared_expert_gate" in note for note in load_notes(SPARSE, ParallelSplit()))
    assert any("--no-position-embedding" in note for note in load_notes(MODERN, ParallelSplit()))
    assert any(
        "--transformer-impl local" in note for note in load_notes(CLASSIC, ParallelSplit(), "local")
    )
    assert load_notes(CLASSIC, ParallelSplit(4)) == []
