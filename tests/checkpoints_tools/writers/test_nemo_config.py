"""NeMo's model_config.yaml of a model, and the refusal of traits that it cannot express."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints_tools.layout.layout import ParallelSplit, stored_vocab_rows
from checkpoints_tools.writers.nemo_config import check_supported, load_notes, model_config
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import ConfigError
from gpt.formats.mappings.megatron_args import WeightShapes, complete_fields
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.mappings.nemo_args import config_from_nemo1
from gpt.formats.mappings.nemo_yaml import NemoConfig
from gpt.parallel.weight_sharding import parameter_specs
from tests.support.checkpoints.megatron_expressible import SPARSE, expressible
from tests.support.models import CLASSIC, MODERN, ODD

GEGLU = SPARSE.with_fields(activation="gelu", moe_layers=(True,) * 4, moe_shared_expert_gate=False)


@st.composite
def expressible_configs(draw: st.DrawFn) -> GPTConfig:
    """Configs that Megatron's args can express, with NeMo's additions."""
    config = draw(expressible())
    if config.gated:
        config = config.with_fields(activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])))
    if config.uses_rope and config.rope_scaling is not None and draw(st.booleans()):
        low = draw(st.sampled_from([1.0, 1.5]))
        context = draw(st.sampled_from([64, 8192]))
        scaling = RopeScaling("llama3", draw(st.sampled_from([8.0, 2.5])), low, 4.0, context)
        config = config.with_fields(rope_scaling=scaling)
    return config


def config_of_record(
    config: GPTConfig, record: Mapping[str, Any], rows: int, tokens: int
) -> GPTConfig:
    shapes = {name: [parameter.shape] for name, parameter in parameter_specs(config).items()}
    shapes[EMBEDDING] = [(rows, config.hidden_size)]
    weights = WeightShapes(shapes, config.num_layers, legacy=False)
    parsed = config_from_nemo1(NemoConfig(record, "config"), weights, tokens)
    # The reader always notes that scaled positions may have been ignored in training.
    assert parsed.notes.keys() <= ({"rope_scaling"} if config.rope_scaling else set())
    return GPTConfig.from_dict({**complete_fields(parsed, {}, "config"), "dtype": config.dtype})


@settings(max_examples=60, deadline=None)
@given(
    config=expressible_configs(), multiple=st.sampled_from([1, 8, 128]), has_tokenizer=st.booleans()
)
def test_config_round_trips_through_nemo_config(
    config: GPTConfig, multiple: int, has_tokenizer: bool
) -> None:
    check_supported(config, ParallelSplit())
    tokens = config.vocab_size if has_tokenizer else 0
    config_record = model_config(
        config, ParallelSplit(), vocabulary_multiple=multiple, tokenizer_vocab_size=tokens
    )
    record = yaml.safe_load(yaml.safe_dump(config_record))
    assert record == config_record
    rows = stored_vocab_rows(config, 1, multiple)
    assert config_of_record(config, record, rows, tokens) == config
    # NeMo builds the configured number of rows, or pads its tokenizer's size.
    assert record.get("override_vocab_size", rows) == rows
    assert ("override_vocab_size" in record) is not has_tokenizer


@pytest.mark.parametrize(
    ("config", "pp", "name", "edge_sizes"),
    [
        (CLASSIC, 1, None, (None, None)),
        (CLASSIC, 2, None, (3, None)),
        (CLASSIC, 3, None, (None, 1)),
        (MODERN, 1, "decoder_block_gpt", (None, None)),  # Only this one has norms of queries.
        (SPARSE, 1, "decoder_block_gpt", (None, None)),
        (GEGLU, 2, None, (None, None)),
    ],
)
def test_mixed_layers_and_uneven_stages_use_nemos_fields(
    config: GPTConfig, pp: int, name: str | None, edge_sizes: tuple[int | None, int | None]
) -> None:
    config_record = model_config(config, ParallelSplit(1, pp))
    keys = [f"num_layers_in_{end}_pipeline_stage" for end in ("first", "last")]
    assert (config_record.get("name"), tuple(config_record.get(key) for key in keys)) == (
        name,
        edge_sizes,
    )


INEXPRESSIBLE: dict[str, tuple[GPTConfig, ParallelSplit, str]] = {
    "virtual stages": (
        CLASSIC,
        ParallelSplit(1, 2, 2),
        "does not support virtual stages (--vpp 2)",
    ),
    "expert ranks": (SPARSE, ParallelSplit(ep=2), "does not support expert parallel (--ep 2)"),
    "a split of three": (CLASSIC, ParallelSplit(3), "tensor parallel 3 does not divide the model"),
    "parallel residual": (
        CLASSIC.with_fields(parallel_residual=True),
        ParallelSplit(),
        "parallel_resid",
    ),
    "a factor of the residual": (
        CLASSIC.with_fields(residual_multiplier=0.22),
        ParallelSplit(),
        "no residual_multiplier 0.22",
    ),
    "xIELU": (CLASSIC.with_fields(activation="xielu"), ParallelSplit(), "no xielu"),
    "positions of two kinds": (
        ODD.with_fields(parallel_residual=False),
        ParallelSplit(),
        "no learned_absolute+rope",
    ),
    "plain SiLU": (MODERN.with_fields(gated=False), ParallelSplit(), "no silu without a gate"),
    "biases here and there": (
        CLASSIC.with_fields(proj_bias=False),
        ParallelSplit(),
        "proj_bias False",
    ),
    "tanh without biases": (
        CLASSIC.with_fields(proj_bias=False, mlp_bias=False),
        ParallelSplit(),
        "no gelu_tanh without mlp_bias",
    ),
    "experts with biases": (
        SPARSE.with_fields(proj_bias=True, mlp_bias=True),
        ParallelSplit(),
        "no experts with mlp_bias",
    ),
    "double precision": (CLASSIC.with_fields(dtype="float64"), ParallelSplit(), "float64"),
}


@pytest.mark.parametrize("case", INEXPRESSIBLE)
def test_trait_that_nemo_lacks_is_named(case: str) -> None:
    config, split, message = INEXPRESSIBLE[case]
    with pytest.raises(ConfigError, match=re.escape(message)):
        check_supported(config, split)


def test_features_that_nemos_megatron_may_lack_are_noted() -> None:
    assert "2 query groups on 4 tensor ranks" in load_notes(MODERN, ParallelSplit(4))[0]
    assert "moe_shared_expert_gate" in load_notes(SPARSE, ParallelSplit())[0]
    assert "decoder_block_gpt" in load_notes(MODERN, ParallelSplit())[0]
    assert load_notes(CLASSIC, ParallelSplit(4, 2)) == []
