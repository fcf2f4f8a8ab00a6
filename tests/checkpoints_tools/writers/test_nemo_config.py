"""What NeMo's config can say of a model is said; what it cannot is refused by name."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_tools.layout.layout import Division, padded_vocabulary
from checkpoints_tools.writers.nemo_config import check, model_config, notes
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.mappings.megatron_args import Weights, settle
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.mappings.nemo_args import describe_nemo_1
from gpt.formats.mappings.nemo_yaml import Fields
from gpt.parallel.sharding import parameters
from tests.support.checkpoints.megatron_expressible import SPARSE, expressible
from tests.support.models import CLASSIC, MODERN, ODD

GEGLU = SPARSE.with_fields(activation="gelu", moe_layers=(True,) * 4, moe_shared_expert_gate=False)


@st.composite
def sayable(draw: st.DrawFn) -> GPTConfig:
    """What Megatron's arguments can say, and what NeMo adds."""
    config = draw(expressible())
    if config.gated:
        config = config.with_fields(activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])))
    if config.rotary and config.rope_scaling is not None and draw(st.booleans()):
        low, context = draw(st.sampled_from([1.0, 1.5])), draw(st.sampled_from([64, 8192]))
        scaling = RopeScaling("llama3", draw(st.sampled_from([8.0, 2.5])), low, 4.0, context)
        config = config.with_fields(rope_scaling=scaling)
    return config


def described(config: GPTConfig, record: Mapping[str, Any], rows: int, tokens: int) -> GPTConfig:
    shapes = {name: [parameter.shape] for name, parameter in parameters(config).items()}
    shapes[EMBEDDING] = [(rows, config.hidden_size)]
    weights = Weights(shapes, config.num_layers, legacy=False)
    answer = describe_nemo_1(Fields(record, "config"), weights, tokens)
    # Whether scaled positions were obeyed is a doubt that the reader tells of whoever wrote it.
    assert answer.notes.keys() <= ({"rope_scaling"} if config.rope_scaling else set())
    return GPTConfig.from_dict({**settle(answer, {}, "config"), "dtype": config.dtype})


@settings(max_examples=60, deadline=None)
@given(config=sayable(), multiple=st.sampled_from([1, 8, 128]), known=st.booleans())
def test_a_config_says_all_of_a_model_that_it_can_say(
    config: GPTConfig, multiple: int, known: bool
) -> None:
    check(config, Division())
    tokens = config.vocab_size if known else 0
    made = model_config(config, Division(), vocabulary_multiple=multiple, tokens=tokens)
    record = yaml.safe_load(yaml.safe_dump(made))
    assert record == made
    rows = padded_vocabulary(config, 1, multiple)
    assert described(config, record, rows, tokens) == config
    # NeMo builds as many rows as it is told, or as its tokenizer's size is padded to.
    assert record.get("override_vocab_size", rows) == rows
    assert ("override_vocab_size" in record) is not known


@pytest.mark.parametrize(
    ("config", "pp", "name", "ends"),
    [
        (CLASSIC, 1, None, (None, None)),
        (CLASSIC, 2, None, (3, None)),
        (CLASSIC, 3, None, (None, 1)),
        (MODERN, 1, "decoder_block_gpt", (None, None)),  # It alone has norms of queries.
        (SPARSE, 1, "decoder_block_gpt", (None, None)),
        (GEGLU, 2, None, (None, None)),
    ],
)
def test_layers_of_several_kinds_and_uneven_stages_are_said_as_nemo_builds_them(
    config: GPTConfig, pp: int, name: str | None, ends: tuple[int | None, int | None]
) -> None:
    made = model_config(config, Division(1, pp))
    keys = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    assert (made.get("name"), tuple(made.get(key) for key in keys)) == (name, ends)


REFUSED: dict[str, tuple[GPTConfig, Division, str]] = {
    "virtual stages": (CLASSIC, Division(1, 2, 2), "no virtual pipeline (--vpp 2)"),
    "expert ranks": (SPARSE, Division(ep=2), "no expert ranks (--ep 2)"),
    "a split of three": (CLASSIC, Division(3), "tensor parallel 3 does not divide the model"),
    "parallel residual": (
        CLASSIC.with_fields(parallel_residual=True),
        Division(),
        "parallel_resid",
    ),
    "positions of two kinds": (
        ODD.with_fields(parallel_residual=False),
        Division(),
        "no learned_absolute+rope",
    ),
    "plain SiLU": (MODERN.with_fields(gated=False), Division(), "no silu that is not gated"),
    "biases here and there": (CLASSIC.with_fields(proj_bias=False), Division(), "proj_bias False"),
    "tanh without biases": (
        CLASSIC.with_fields(proj_bias=False, mlp_bias=False),
        Division(),
        "no gelu_tanh without mlp_bias",
    ),
    "experts with biases": (
        SPARSE.with_fields(proj_bias=True, mlp_bias=True),
        Division(),
        "no experts with mlp_bias",
    ),
    "double precision": (CLASSIC.with_fields(dtype="float64"), Division(), "float64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_nemo_cannot_be_is_refused_by_its_name(case: str) -> None:
    config, division, message = REFUSED[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        check(config, division)


def test_what_its_megatron_may_not_read_is_noted() -> None:
    assert "2 query groups on 4 tensor ranks" in notes(MODERN, Division(4))[0]
    assert "moe_shared_expert_gate" in notes(SPARSE, Division())[0]
    assert "decoder_block_gpt" in notes(MODERN, Division())[0]
    assert notes(CLASSIC, Division(4, 2)) == []
