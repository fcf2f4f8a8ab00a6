"""The choice of a Hugging Face family, its config.json, and models that no family can express."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints_tools.writers.huggingface_config import FAMILY_WRITERS, choose_family
from gpt.config import GPTConfig, RopeScaling
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.huggingface.families.config_json import ConfigJson
from gpt.formats.huggingface.families.registry import FAMILIES
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
def test_fields_of_transformers_4_or_5_alone_are_enough(
    name: str, forget: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    from transformers import AutoConfig

    family, config = MODELS[name]
    record = choose_family(config, Path("model")).record

    def read_by_us() -> GPTConfig:
        fields = FAMILIES[family].defaults | json.loads((tmp_path / CONFIG).read_text())
        return FAMILIES[family].to_gpt_config(ConfigJson(fields, tmp_path / CONFIG))

    def read_by_transformers() -> dict[str, Any]:
        fields: dict[str, Any] = AutoConfig.from_pretrained(tmp_path).to_dict()
        (fields.get("rope_parameters") or {}).pop("type", None)  # A duplicate of rope_type.
        return fields

    (tmp_path / CONFIG).write_text(json.dumps(record))
    full_config = read_by_us(), read_by_transformers()
    edit_json(tmp_path / CONFIG, forget)
    assert (read_by_us(), read_by_transformers()) == full_config


class FieldRecorder(dict[str, Any]):
    """Records which of its fields are read."""

    def __init__(self, record: dict[str, Any]) -> None:
        super().__init__(record)
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("name", MODELS)
def test_no_field_relies_on_the_familys_defaults(name: str) -> None:
    family, config = MODELS[name]
    choice = choose_family(config, Path("model"))
    recorded_fields = FieldRecorder({**FAMILIES[family].defaults, **choice.record})
    FAMILIES[family].to_gpt_config(ConfigJson(recorded_fields, Path(CONFIG)))
    assert len(recorded_fields.names) > 10
    assert recorded_fields.names & set(FAMILIES[family].defaults) <= set(choice.record)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("classic", ("resid_pdrop", "embd_pdrop")),
        ("rotary, tanh", ("residual_dropout", "embedding_dropout")),
        ("rotary, erf", ("hidden_dropout",)),
    ],
)
def test_hidden_dropout_is_written_to_every_dropout_field(
    name: str, fields: tuple[str, ...]
) -> None:
    config = MODELS[name][1]
    choice = choose_family(config, Path("model"))
    assert [choice.record[field] for field in fields] == [config.hidden_dropout] * len(fields)
    assert config.hidden_dropout > 0 and choice.notes == ()


INEXPRESSIBLE: dict[str, tuple[GPTConfig, str]] = {
    "swiglu with learned positions": (
        GATED.with_fields(position_embedding_type="learned_absolute"),
        "the nearest, llama, cannot express learned positions",
    ),
    "gated with learned positions and LayerNorm": (
        PLAIN.with_fields(gated=True),
        r"the nearest, gpt2, cannot express a gated MLP \(gelu_tanh\)",
    ),
    "learned and rotary positions": (
        ROTARY.with_fields(position_embedding_type="learned_absolute+rope"),
        "the nearest, gpt2, cannot express learned and rotary positions together",
    ),
    "no positions": (
        GATED.with_fields(position_embedding_type="none"),
        "llama, cannot express a model without position embeddings",
    ),
    "interleaved": (
        GATED.with_fields(rotary_interleaved=True),
        r"llama, cannot express interleaved rotary channels \(rotary_interleaved\)",
    ),
    "partly rotary with RMSNorm": (
        GATED.with_fields(rotary_percent=0.5, qk_layernorm=True),
        "qwen3, cannot express rotary_percent 0.5",
    ),
    "window with learned positions": (
        PLAIN.with_fields(window_size=9),
        "gpt2, cannot express a window of 9 in all layers",
    ),
    "window with LayerNorm1P": (
        SQUARED.with_fields(window_size=9),
        "nemotron, cannot express a window of 9 in all layers",
    ),
    "squared ReLU with RMSNorm": (
        GATED.with_fields(activation="relu2", gated=False),
        r"llama, cannot express an MLP without a gate \(relu2\)",
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
        "gpt2, cannot express 2 query groups of 4 heads",
    ),
    "wide heads with learned positions": (
        PLAIN.with_fields(kv_channels=20),
        "gpt2, cannot express heads of 20 channels at a hidden_size of 48",
    ),
    "wide heads, partly rotary": (
        ROTARY.with_fields(kv_channels=20, rotary_percent=0.5),
        "gpt_neox, cannot express heads of 20 channels at a hidden_size of 48",
    ),
    "heads that do not divide, with learned positions": (
        PLAIN.with_fields(hidden_size=50),
        "gpt2, cannot express a hidden_size of 50, which 4 heads do not divide",
    ),
    "norms of queries with LayerNorm": (
        ROTARY.with_fields(qk_layernorm=True),
        "gpt_neox, cannot express norms of queries and keys",
    ),
    "biases of half the attention": (
        GATED.with_fields(proj_bias=True),
        "llama, cannot express a bias of attention's output",
    ),
    "no biases with learned positions": (
        PLAIN.with_fields(mlp_bias=False),
        "gpt2, cannot express an MLP without biases",
    ),
    "a factor of the residual with learned positions": (
        PLAIN.with_fields(residual_multiplier=0.5),
        r"gpt2, .* outputs of attention and MLP \(residual_multiplier 0.5\)",
    ),
    "divided logits, partly rotary": (
        GATED.with_fields(logits_scaling=8.0, rotary_percent=0.5),
        r"phi3, cannot express this divisor of the logits \(logits_scaling 8.0\)",
    ),
    "xIELU with learned positions": (
        PLAIN.with_fields(activation="xielu"),
        "gpt2, cannot express the activation xielu",
    ),
    "queries scaled from another position than YaRN": (
        GATED.with_fields(
            query_scaling_beta=0.1,
            query_scaling_length=9,
            rope_scaling=RopeScaling("yarn", 4.0, original_max_position_embeddings=16),
        ),
        r"cannot express queries scaled by position \(query_scaling_beta 0.1\)",
    ),
    "parallel residual with groups": (
        GATED.with_fields(parallel_residual=True),
        "llama, cannot express parallel_residual",
    ),
    "experts in some layers": (
        EXPERTS.with_fields(moe_layers=(True, False, True)),
        "mixtral, cannot express experts in some of the layers only",
    ),
    "experts without a gate": (
        EXPERTS.with_fields(gated=False),
        "mixtral, cannot express an MLP without a gate",
    ),
    "biases of experts": (
        EXPERTS.with_fields(mlp_bias=True),
        "mixtral, cannot express biases in the MLP",
    ),
    "softmax before the choice": (
        EXPERTS.with_fields(moe_router_pre_softmax=True),
        r"mixtral, .* order of softmax and top-k in the router \(moe_router_pre_softmax True\)",
    ),
    "sigmoid scores": (
        EXPERTS.with_fields(moe_router_score_function="sigmoid"),
        r"mixtral, .* \(moe_router_score_function sigmoid\)",
    ),
    "a bias for choosing": (
        EXPERTS.with_fields(moe_router_expert_bias=True),
        r"mixtral, .* an expert bias in the router \(moe_router_expert_bias True\)",
    ),
    "scaled weights": (
        EXPERTS.with_fields(moe_router_topk_scaling_factor=2.5),
        r"mixtral, .* scaled expert weights \(moe_router_topk_scaling_factor 2.5\)",
    ),
    "shared experts": (
        EXPERTS.with_fields(moe_shared_expert_intermediate_size=16),
        r"mixtral, .* shared experts \(moe_shared_expert_intermediate_size 16\)",
    ),
}


@pytest.mark.parametrize("trait", INEXPRESSIBLE)
def test_trait_that_no_family_expresses_is_named(trait: str) -> None:
    config, message = INEXPRESSIBLE[trait]
    with pytest.raises(CheckpointError, match=message) as caught:
        choose_family(config, Path("model"))
    assert str(caught.value).startswith("model cannot be written for Hugging Face: ")


@pytest.mark.parametrize(
    ("name", "family", "message"),
    [
        ("gated", "gpt2", r"gpt2 cannot express rotary positions, RMSNorm, .* and \d more"),
        (
            "gated, window",
            "llama",
            "llama cannot express a window of 9 in all layers .*; choose another",
        ),
        ("gated, qkv bias", "mistral", "mistral cannot express biases of q, k and v"),
        ("gated", "qwen3", "qwen3 cannot express queries and keys without norms"),
        ("gated", "qwen2", "qwen2 cannot express q, k and v without biases"),
        ("gated", "mixtral", "mixtral cannot express an MLP without experts"),
        ("experts", "llama", "llama cannot express experts;"),
        ("layernorm1p", "starcoder2", "cannot express rotary_percent 0.5, norms whose stored"),
        ("rotary, tanh", "nemotron", "nemotron cannot express norms whose stored weight is"),
        ("classic", "gpt_neox", "gpt_neox cannot express learned positions"),
        ("gated, heads that do not divide", "llama", "a hidden_size of 50, which 4 heads do not"),
        (
            "gated, attention bias, llama3",
            "phi3",
            r"RoPE scaling \(RopeScaling\(kind='llama3'",
        ),
        ("experts, one of five, window", "minimax_m2", r"experts per token \(moe_router_topk 1\)"),
    ],
)
def test_requested_family_that_cannot_express_the_model_is_refused(
    name: str, family: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        choose_family(MODELS[name][1], Path("model"), family)


@pytest.mark.parametrize(
    ("fields", "family", "message"),
    [
        ({"residual_multiplier": 0.5}, "llama", r"\(residual_multiplier 0.5\)"),
        ({"logits_scaling": 8.0}, "llama", r"divisor of the logits \(logits_scaling 8.0\)"),
        ({"query_scaling_beta": 0.1, "query_scaling_length": 9}, "granite", "scaled by position"),
        ({"activation": "xielu", "gated": False}, "llama", "the activation xielu"),
        (
            {"embedding_multiplier": 2.0},
            "granite",
            r"factor of the virtual tokens \(embedding_multiplier_scope token_ids\)",
        ),
    ],
)
def test_setting_that_the_requested_family_lacks_is_named(
    fields: dict[str, Any], family: str, message: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{family} cannot express .*{message}"):
        choose_family(GATED.with_fields(**fields), Path("model"), family)


def test_impossible_head_width_is_named() -> None:
    odd = GATED.with_fields(position_embedding_type="learned_absolute", kv_channels=5)
    with pytest.raises(CheckpointError, match="llama cannot express heads of 5 channels at a"):
        choose_family(odd, Path("model"), "llama")


def test_rope_scaling_of_other_families_is_named() -> None:
    scaling = RopeScaling("longrope", 1.0, frequency_factors=(1.0,) * (GATED.kv_channels // 2))
    with pytest.raises(CheckpointError, match=r"llama cannot express this RoPE scaling .*longrope"):
        choose_family(GATED.with_fields(rope_scaling=scaling), Path("model"), "llama")


def test_attention_scale_above_the_range_of_a_family_is_named() -> None:
    config = GATED.with_fields(
        activation="gelu_tanh",
        layernorm_zero_centered_gamma=True,
        qk_layernorm=True,
        norm_placement="pre_and_post",
        embedding_multiplier=GATED.hidden_size**0.5,
        softmax_scale=2.0,
    )
    with pytest.raises(CheckpointError, match=r"gemma3_text cannot express .*softmax_scale 2.0"):
        choose_family(config, Path("model"), "gemma3_text")


def test_unknown_family_is_refused_with_valid_choices() -> None:
    with pytest.raises(
        ConfigError, match=r"family 'falcon' cannot be written; choose one of llama, mistral"
    ):
        choose_family(PLAIN, Path("model"), "falcon")


def test_every_family_of_the_reader_can_be_written() -> None:
    assert set(FAMILY_WRITERS) == set(FAMILIES)
