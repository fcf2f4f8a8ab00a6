"""Which family a model is written as, what its config.json says, and what no family can say."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints_tools.writers.huggingface_config import WRITERS, choose
from gpt.config import GPTConfig
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.huggingface.config_json import Fields
from gpt.formats.huggingface.families import FAMILIES
from tests.support.checkpoints.hf_models import edit_json
from tests.support.checkpoints.hf_targets import EXPERTS, GATED, MODELS, PLAIN, ROTARY, SQUARED

CONFIG = "config.json"


def forget_5(record: dict[str, Any]) -> None:
    del record["dtype"]
    record.pop("rope_parameters", None)


def forget_4(record: dict[str, Any]) -> None:
    del record["torch_dtype"]
    for key in ("rope_theta", "rope_scaling", "rotary_emb_base", "rotary_pct"):
        record.pop(key, None)
    if record["model_type"] == "nemotron":
        record.pop("partial_rotary_factor")


@pytest.mark.parametrize("forget", [forget_4, forget_5])
@pytest.mark.parametrize("name", MODELS)
def test_the_spellings_of_either_transformers_are_enough(
    name: str, forget: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    family, config = MODELS[name]
    record = choose(config, Path("model")).record

    def ours() -> GPTConfig:
        fields = FAMILIES[family].defaults | json.loads((tmp_path / CONFIG).read_text())
        return FAMILIES[family].config(Fields(fields, tmp_path / CONFIG))

    def theirs() -> dict[str, Any]:
        found: dict[str, Any] = AutoConfig.from_pretrained(tmp_path).to_dict()
        (found.get("rope_parameters") or {}).pop("type", None)  # It is said twice.
        return found

    (tmp_path / CONFIG).write_text(json.dumps(record))
    whole = ours(), theirs()
    edit_json(tmp_path / CONFIG, forget)
    assert (ours(), theirs()) == whole


class Asked(dict[str, Any]):
    """Notes which of its fields are asked for."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", MODELS)
def test_no_field_is_left_to_the_familys_defaults(name: str) -> None:
    family, config = MODELS[name]
    choice = choose(config, Path("model"))
    asked = Asked({**FAMILIES[family].defaults, **choice.record})
    FAMILIES[family].config(Fields(asked, Path(CONFIG)))
    assert len(asked.names) > 10
    assert asked.names & set(FAMILIES[family].defaults) <= set(choice.record)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("classic", ("resid_pdrop", "embd_pdrop")),
        ("rotary, tanh", ("residual_dropout", "embedding_dropout")),
        ("rotary, erf", ("hidden_dropout",)),
    ],
)
def test_dropout_of_hidden_states_goes_wherever_ours_does(
    name: str, fields: tuple[str, ...]
) -> None:
    config = MODELS[name][1]
    choice = choose(config, Path("model"))
    assert [choice.record[field] for field in fields] == [config.hidden_dropout] * len(fields)
    assert config.hidden_dropout > 0 and choice.notes == ()


REFUSED: dict[str, tuple[GPTConfig, str]] = {
    "swiglu with learned positions": (
        GATED.with_fields(position_embedding_type="learned_absolute"),
        "the nearest, llama, has no place for learned positions",
    ),
    "gated with learned positions and LayerNorm": (
        PLAIN.with_fields(gated=True),
        r"the nearest, gpt2, has no place for a gated MLP \(gelu_tanh\)",
    ),
    "learned and rotary positions": (
        ROTARY.with_fields(position_embedding_type="learned_absolute+rope"),
        "the nearest, gpt2, has no place for learned and rotary positions together",
    ),
    "no positions": (
        GATED.with_fields(position_embedding_type="none"),
        "llama, has no place for a model without positions",
    ),
    "interleaved": (
        GATED.with_fields(rotary_interleaved=True),
        r"llama, has no place for interleaved rotary channels \(rotary_interleaved\)",
    ),
    "partly rotary with RMSNorm": (
        GATED.with_fields(rotary_percent=0.5),
        "llama, has no place for rotary_percent 0.5",
    ),
    "window with learned positions": (
        PLAIN.with_fields(window_size=9),
        "gpt2, has no place for window_size 9",
    ),
    "window with LayerNorm1P": (
        SQUARED.with_fields(window_size=9),
        "nemotron, has no place for window_size 9",
    ),
    "squared ReLU with RMSNorm": (
        GATED.with_fields(activation="relu2", gated=False),
        r"llama, has no place for an MLP without a gate \(relu2\)",
    ),
    "stored minus one, with RMSNorm": (
        GATED.with_fields(layernorm_zero_centered_gamma=True),
        r"llama, .* stored weight is gamma - 1 \(layernorm_zero_centered_gamma\)",
    ),
    "stored minus one, with learned positions": (
        PLAIN.with_fields(layernorm_zero_centered_gamma=True),
        r"gpt2, .* stored weight is gamma - 1 \(layernorm_zero_centered_gamma\)",
    ),
    "groups with learned positions": (
        PLAIN.with_fields(num_query_groups=2),
        "gpt2, has no place for 2 query groups of 4 heads",
    ),
    "wide heads with learned positions": (
        PLAIN.with_fields(kv_channels=20),
        "gpt2, has no place for heads of 20 channels at a hidden_size of 48",
    ),
    "wide heads, partly rotary": (
        ROTARY.with_fields(kv_channels=20, rotary_percent=0.5),
        "gpt_neox, has no place for heads of 20 channels at a hidden_size of 48",
    ),
    "heads that do not divide, with learned positions": (
        PLAIN.with_fields(hidden_size=50),
        "gpt2, has no place for a hidden_size of 50, which 4 heads do not divide",
    ),
    "norms of queries with LayerNorm": (
        ROTARY.with_fields(qk_layernorm=True),
        "gpt_neox, has no place for norms of queries and keys",
    ),
    "biases of half the attention": (
        GATED.with_fields(proj_bias=True),
        "llama, has no place for a bias of attention's output",
    ),
    "no biases with learned positions": (
        PLAIN.with_fields(mlp_bias=False),
        "gpt2, has no place for an MLP without biases",
    ),
    "parallel residual with groups": (
        GATED.with_fields(parallel_residual=True),
        "llama, has no place for parallel_residual",
    ),
    "experts in some layers": (
        EXPERTS.with_fields(moe_layers=(True, False, True)),
        "mixtral, has no place for experts in some of the layers only",
    ),
    "experts without a gate": (
        EXPERTS.with_fields(gated=False),
        "mixtral, has no place for an MLP without a gate",
    ),
    "biases of experts": (
        EXPERTS.with_fields(mlp_bias=True),
        "mixtral, has no place for biases in the MLP",
    ),
    "softmax before the choice": (
        EXPERTS.with_fields(moe_router_pre_softmax=True),
        r"mixtral, .* a softmax before experts are chosen \(moe_router_pre_softmax True\)",
    ),
    "sigmoid scores": (
        EXPERTS.with_fields(moe_router_score_function="sigmoid"),
        r"mixtral, .* \(moe_router_score_function sigmoid\)",
    ),
    "a bias for choosing": (
        EXPERTS.with_fields(moe_router_expert_bias=True),
        r"mixtral, .* a bias for choosing experts \(moe_router_expert_bias True\)",
    ),
    "scaled weights": (
        EXPERTS.with_fields(moe_router_topk_scaling_factor=2.5),
        r"mixtral, .* scaled weights of experts \(moe_router_topk_scaling_factor 2.5\)",
    ),
    "shared experts": (
        EXPERTS.with_fields(moe_shared_expert_intermediate_size=16, moe_shared_expert_gate=True),
        r"mixtral, .* shared experts \(moe_shared_expert_intermediate_size 16\)",
    ),
}


@pytest.mark.parametrize("trait", REFUSED)
def test_what_no_family_can_say_is_refused_by_its_name(trait: str) -> None:
    config, message = REFUSED[trait]
    with pytest.raises(CheckpointError, match=message) as caught:
        choose(config, Path("model"))
    assert str(caught.value).startswith("model cannot be written for Hugging Face: ")


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("gated", "gpt2", r"gpt2, has no place for rotary positions, RMSNorm, .* and \d more"),
        ("gated, window", "llama", "llama, has no place for window_size 9; choose another one"),
        ("gated, qkv bias", "mistral", "mistral, has no place for biases of q, k and v"),
        ("gated", "qwen3", "qwen3, has no place for queries and keys without norms"),
        ("gated", "qwen2", "qwen2, has no place for q, k and v without biases"),
        ("gated", "mixtral", "mixtral, has no place for an MLP without experts"),
        ("experts", "llama", "llama, has no place for experts;"),
        ("layernorm1p", "starcoder2", "has no place for rotary_percent 0.5, norms whose stored"),
        ("rotary, tanh", "nemotron", "nemotron, has no place for norms whose stored weight is"),
        ("classic", "gpt_neox", "gpt_neox, has no place for learned positions"),
        ("gated, heads that do not divide", "llama", "a hidden_size of 50, which 4 heads do not"),
    ],
)
def test_a_family_that_is_asked_for_and_cannot_hold_the_model_is_refused(
    name: str, family: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        choose(MODELS[name][1], Path("model"), family)


def test_a_head_that_cannot_be_turned_is_named() -> None:
    odd = GATED.with_fields(position_embedding_type="learned_absolute", kv_channels=5)
    with pytest.raises(CheckpointError, match="llama, has no place for heads of 5 channels at a"):
        choose(odd, Path("model"), "llama")


def test_an_unknown_family_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"family 'bloom' is none .*: llama, mistral"):
        choose(PLAIN, Path("model"), "bloom")


def test_what_the_reader_knows_can_be_written() -> None:
    assert set(WRITERS) == set(FAMILIES)
