"""What Megatron's arguments can say of a model is said; what they cannot is refused by name."""

import re
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_tools.layout.layout import Division, padded_vocabulary
from checkpoints_tools.writers.megatron_args import arguments, check, notes, stages
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.mappings.megatron_args import DESCRIBING, Args, Weights, describe, settle
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.parallel.sharding import parameters
from tests.support.checkpoints.megatron_expressible import SPARSE, expressible
from tests.support.models import CLASSIC, MODERN, ODD, SIGMOID_EXPERTS


def described(config: GPTConfig, args: Namespace) -> GPTConfig:
    """What the reader makes of arguments, and of the shapes that weights would have."""
    shapes = {name: [parameter.shape] for name, parameter in parameters(config).items()}
    shapes[EMBEDDING] = [(args.padded_vocab_size, config.hidden_size)]
    answer = describe(Args(vars(args), "args"), Weights(shapes, config.num_layers, legacy=False))
    assert set(answer.notes) <= {"rope_scaling"}  # Obeyed, with a doubt.
    return GPTConfig.from_dict({**settle(answer, {}, "args"), "dtype": config.dtype})


@given(config=expressible())
def test_arguments_say_all_of_a_model_that_they_can_say(config: GPTConfig) -> None:
    check(config, Division())
    assert described(config, arguments(config, Division())) == config


@settings(max_examples=60, deadline=None)
@given(config=expressible(), pp=st.integers(1, 4), vpp=st.integers(1, 3))
def test_arguments_of_every_division_describe_the_same_model(
    config: GPTConfig, pp: int, vpp: int
) -> None:
    division = Division(1, min(pp, config.num_layers), vpp)
    if division.pp == 1 or division.pp * vpp > config.num_layers:
        division = Division(1, division.pp)
    check(config, division)
    args = arguments(config, division)
    assert described(config, args) == config
    assert _counts(args) == [
        [len(chunk) for chunk in stage] for stage in stages(config, division).layers
    ]


def _counts(args: Namespace) -> list[list[int]]:
    """Layers of each stage's chunks, as Megatron counts them from its arguments."""
    pp, vpp = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size or 1
    drawn = args.pipeline_model_parallel_layout
    if drawn is not None:
        assert drawn[0] == "E" and drawn[-1] == "L"
        chunks = [chunk.count("t") for chunk in drawn.split("|")]
        return [chunks[stage::pp] for stage in range(pp)]
    ends = (args.decoder_first_pipeline_num_layers, args.decoder_last_pipeline_num_layers)
    left = args.num_layers - sum(end or 0 for end in ends)
    middle = pp - sum(end is not None for end in ends)
    assert left % middle == 0 if middle else left == 0
    totals = [left // middle] * pp if middle else [0] * pp
    for place, end in zip((0, -1), ends, strict=True):
        totals[place] = totals[place] if end is None else end
    assert all(total % vpp == 0 for total in totals)
    if args.num_layers_per_virtual_pipeline_stage:
        assert args.num_layers_per_virtual_pipeline_stage * vpp == totals[0] == totals[-1]
    return [[total // vpp] * vpp for total in totals]


def test_all_that_describes_a_network_is_said_and_its_names_of_every_version() -> None:
    args = vars(arguments(SPARSE, Division(2, 2, 1, 2), vocabulary_multiple=8))
    old = {"model_parallel_size", "onnx_safe"}
    assert set(DESCRIBING) - set(args) == old
    assert args["norm_epsilon"] == args["layernorm_epsilon"] == SPARSE.layernorm_epsilon
    assert args["apply_layernorm_1p"] is args["layernorm_zero_centered_gamma"] is False
    assert (args["tensor_model_parallel_size"], args["pipeline_model_parallel_size"]) == (2, 2)
    assert args["expert_model_parallel_size"] == args["expert_tensor_parallel_size"] == 2
    assert (args["world_size"], args["data_parallel_size"]) == (8, 2)
    assert args["padded_vocab_size"] == 112 == padded_vocabulary(SPARSE, 2, 8)
    assert (args["vocab_size"], args["make_vocab_size_divisible_by"]) == (100, 8)
    assert args["moe_layer_freq"] == [1, 0, 1, 1]
    assert args["num_experts"] == 4


@pytest.mark.parametrize("kind", ["learned_absolute", "rope", "none"])
def test_positions_are_said_as_megatron_accepts_them(kind: str) -> None:
    args = arguments(CLASSIC.with_fields(position_embedding_type=kind), Division())
    assert args.position_embedding_type == kind
    # It refuses `none` with the flag that once meant the same.
    assert args.add_position_embedding is (kind != "rope")
    assert args.use_rotary_position_embeddings is (kind == "rope")


def test_groups_and_windows_are_said_as_megatron_counts_them() -> None:
    classic, modern = arguments(CLASSIC, Division()), arguments(MODERN, Division())
    assert (classic.group_query_attention, classic.num_query_groups) == (False, 1)
    assert (modern.group_query_attention, modern.num_query_groups) == (True, 2)
    assert (classic.window_size, modern.window_size) == (None, (6, 0))


@pytest.mark.parametrize(
    ("dtype", "flags"),
    [("float32", (False, False)), ("bfloat16", (False, True)), ("float16", (True, False))],
)
def test_the_dtype_is_said_by_flags_and_by_name(dtype: str, flags: tuple[bool, bool]) -> None:
    args = arguments(CLASSIC.with_fields(dtype=dtype), Division())
    assert (args.fp16, args.bf16) == flags
    assert args.params_dtype is getattr(torch, dtype)


def test_the_kind_of_tokenizer_is_said_only_where_megatron_compares_it(tmp_path: Path) -> None:
    assert arguments(CLASSIC, Division(), tokenizer=tmp_path).tokenizer_type is None
    (tmp_path / "gpt2-merges.txt").touch()
    assert arguments(CLASSIC, Division(), tokenizer=tmp_path).tokenizer_type == "GPT2BPETokenizer"
    (tmp_path / "tokenizer.json").touch()
    assert arguments(CLASSIC, Division(), tokenizer=tmp_path).tokenizer_type is None
    gpt2 = CLASSIC.with_fields(vocab_size=50257)
    assert arguments(gpt2, Division(), tokenizer=tmp_path).tokenizer_type == "GPT2BPETokenizer"


REFUSED: dict[str, tuple[GPTConfig, str]] = {
    "parallel residual": (CLASSIC.with_fields(parallel_residual=True), "no parallel_residual"),
    "two kinds of positions": (
        ODD.with_fields(parallel_residual=False),
        "no learned_absolute.rope",
    ),
    "gated GELU": (MODERN.with_fields(activation="gelu"), "no gated gelu: gated is silu only"),
    "plain SiLU": (MODERN.with_fields(gated=False), "no silu that is not gated"),
    "bias of one projection": (
        CLASSIC.with_fields(proj_bias=False),
        "no biases as qkv_bias True, proj_bias False, mlp_bias True: all have one, or none",
    ),
    "all biases but QKV's": (CLASSIC.with_fields(qkv_bias=False), "no biases as qkv_bias False"),
    "tanh without biases": (
        CLASSIC.with_fields(proj_bias=False, mlp_bias=False),
        "no gelu_tanh without mlp_bias",
    ),
    "positions stretched in another way": (
        MODERN.with_fields(
            rope_scaling=RopeScaling("llama3", 8.0, original_max_position_embeddings=4096)
        ),
        "no llama3 rope_scaling from 4096 positions .*: 8192, 1.0 and 4.0 stand in its code",
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
    "double precision": (CLASSIC.with_fields(dtype="float64"), "no weights in float64; convert to"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_trait_that_megatron_does_not_have_is_refused_by_its_name(case: str) -> None:
    config, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        check(config, Division())


@pytest.mark.parametrize(
    ("layers", "division", "said"),
    [
        (4, Division(pp=2), ""),
        (8, Division(pp=2, vpp=2), ""),
        (5, Division(pp=2), "have 3, 2 layers; .* --decoder-first-pipeline-num-layers 3"),
        (5, Division(pp=3), "have 2, 2, 1 layers; .* --decoder-last-pipeline-num-layers 1"),
        (5, Division(pp=2, vpp=2), "--pipeline-model-parallel-layout 'Et|tt|t|tL'"),
        (6, Division(pp=4), "1, 2, 2, 1 layers; .*first-pipeline-num-layers 1 .*last.* 1"),
    ],
)
def test_stages_that_are_not_even_are_noted_with_what_to_type(
    layers: int, division: Division, said: str
) -> None:
    config = CLASSIC.with_fields(num_layers=layers, moe_layers=())
    found = notes(config, division)
    assert len(found) == (1 if said else 0)
    for text in found:
        assert re.search(said.replace("|", r"\|"), text), text


def test_what_older_versions_lack_is_noted() -> None:
    assert any("query groups on 4 tensor ranks" in note for note in notes(MODERN, Division(4)))
    assert any("moe_shared_expert_gate" in note for note in notes(SPARSE, Division()))
    assert any("--no-position-embedding" in note for note in notes(MODERN, Division()))
    assert any("--transformer-impl local" in note for note in notes(CLASSIC, Division(), "local"))
    assert notes(CLASSIC, Division(4)) == []
