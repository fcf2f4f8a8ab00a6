"""NeMo arguments: they map to the same config, or are refused or requested by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpt.checkpoint.files.file_tree import file_span
from gpt.checkpoint.files.restricted_unpickle import Stub
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.mappings.nemo_yaml import (
    NemoConfig,
    read_config,
    read_fiddle_graph,
    unwrap_omegaconf,
)
from gpt.formats.megatron.torch_dist import open_torch_dist
from gpt.formats.nemo.reader import open_nemo
from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.checkpoints import nemo_writer
from tests.support.checkpoints.distcp_writer import Form
from tests.support.checkpoints.megatron_writer import DENSE, GATED, MIXED
from tests.support.checkpoints.nemo_writer import LEGACY_GATED, Nemo, saved
from tests.support.trained_tokenizers import sentencepiece_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_with_changes(
    folder: Path, config: GPTConfig, overrides: Mapping[str, Any] | None = None, **changes: Any
) -> GPTConfig:
    folder.mkdir(exist_ok=True)
    names = "legacy" if config is LEGACY_GATED else "mcore"
    saved(config, Nemo(names=names, pack="dir", changes=changes), folder)
    return open_nemo(folder / "gpt.nemo", overrides).config


CONFIG_CASES: dict[str, tuple[GPTConfig, dict[str, Any], dict[str, Any]]] = {
    "fused": (DENSE, {"bias_activation_fusion": None}, {"activation": "gelu_tanh"}),
    "not fused": (DENSE, {"bias_activation_fusion": False}, {"activation": "gelu"}),
    "as OpenAI's and fused": (DENSE, {"openai_gelu": True}, {"activation": "gelu_tanh"}),
    "exported to ONNX": (
        DENSE,
        {"bias_activation_fusion": False, "onnx_safe": True},
        {"activation": "gelu"},
    ),
    "squared": (DENSE, {"activation": "squared-relu"}, {"activation": "relu2", "gated": False}),
    "gated, fused without a bias": (
        GATED,
        {"activation": "fast-geglu", "bias_activation_fusion": True},
        {"activation": "gelu_tanh", "gated": True},
    ),
    "gated, by erf": (
        LEGACY_GATED,
        {"activation": "fast-geglu", "bias_activation_fusion": False},
        {"activation": "gelu", "gated": True},
    ),
    "no groups": (DENSE, {"num_query_groups": None}, {"num_query_groups": 4}),
    "heads of derived width": (DENSE, {"kv_channels": None}, {"kv_channels": 8}),
    "norms around one": (
        DENSE,
        {"normalization": "layernorm1p"},
        {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": True},
    ),
    "norms around one, by a field": (
        GATED,
        {"layernorm_zero_centered_gamma": True},
        {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
    ),
    "a norm of low precision": (
        DENSE,
        {"normalization": "low_precision_layernorm"},
        {"normalization": "LayerNorm", "layernorm_zero_centered_gamma": False},
    ),
    "epsilon without a dot": (DENSE, {"layernorm_epsilon": "1e-6"}, {"layernorm_epsilon": 1e-6}),
    "stretched positions": (
        GATED,
        {"seq_len_interpolation_factor": 2},
        {"rope_scaling.kind": "linear", "rope_scaling.factor": 2.0},
    ),
    "Llama 3.1's positions": (
        GATED,
        {"scale_positional_embedding": True},
        {"rope_scaling.kind": "llama3", "rope_scaling.factor": 8.0},
    ),
    "positions in pairs": (GATED, {"rotary_interleaved": True}, {"rotary_interleaved": True}),
    "base by default": (GATED, {"rotary_base": None}, {"rotary_base": 10000.0}),
    "base, which the older classes obey": (
        LEGACY_GATED,
        {"rotary_base": 500000},
        {"rotary_base": 500000.0},
    ),
    "a limit that refers to another": (
        GATED,
        {"max_position_embeddings": "${model.encoder_seq_length}", "encoder_seq_length": 99},
        {"max_position_embeddings": 99},
    ),
    "a chain of references": (
        DENSE,
        {"ffn_hidden_size": "${data.width}", "data": {"width": "${width}"}, "width": 128},
        {"ffn_hidden_size": 128},
    ),
    "customized in nothing": (
        DENSE,
        {"mcore_customization_config": {"parallel_attention": False}},
        {"parallel_residual": False},
    ),
    "dropout": (DENSE, {"hidden_dropout": 0.1}, {"hidden_dropout": 0.1}),
}


def config_field(config: GPTConfig, name: str) -> object:
    value: object = config
    for step in name.split("."):
        value = getattr(value, step)
    return value


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_nemo_1_configs_are_mapped(case: str, tmp_path: Path) -> None:
    config, changes, expected_fields = CONFIG_CASES[case]
    parsed = open_with_changes(tmp_path, config, **changes)
    assert {name: config_field(parsed, name) for name in expected_fields} == expected_fields


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("position_embedding_type", "alibi"),
        ("position_embedding_type", "kerple"),
        ("position_embedding_type", "xpos"),
        ("position_embedding_type", "sandwich"),
        ("activation", "reglu"),
        ("activation", "fast-reglu"),
        ("activation", "relu"),
        ("normalization", "scalenorm"),
        ("transformer_block_type", "post_ln"),
        ("transformer_block_type", "normformer"),
        ("normalize_attention_scores", False),
        ("headscale", True),
        ("attention_type", "retro"),
        ("encoder_attn_mask_type", "padding"),
        ("fsdp", True),
        ("mcore_customization_config", {"new_decoder_architecture": True}),
        ("apply_embedding_scaling", True),
        ("attn_logit_softcapping", 50.0),
        ("multi_latent_attention", True),
        ("name", "megatron_falcon_gpt"),
        ("target", "nemo.collections.nlp.models.x.MegatronT5Model"),
    ],
)
def test_unsupported_field_is_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"model_config\.yaml: {name} is .*not support"):
        open_with_changes(tmp_path, DENSE, **{name: value})


@pytest.mark.parametrize(
    ("name", "value", "expected_name"),
    [
        ("num_layers", "many", "num_layers is 'many'; it must be a whole number"),
        ("num_attention_heads", 2.5, "num_attention_heads is 2.5; it must be a whole number"),
        ("rotary_percentage", "half", "rotary_percentage is 'half'; it must be a number"),
        ("bias", "yes", "bias is 'yes'; it must be true or false"),
        ("tensor_model_parallel_size", 0, "tensor_model_parallel_size is 0; it must be"),
        ("rotary_base", 10**400, "rotary_base is 1000000.*; it must be a number"),
        ("hidden_size", 1 << 40, "hidden_size is 1099511627776; it must be"),
    ],
)
def test_values_of_a_wrong_type_are_named_as_in_the_config(
    name: str, value: Any, expected_name: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=expected_name):
        open_with_changes(tmp_path, GATED, **{name: value})


def test_unresolved_reference_is_requested_by_name(tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "layernorm_epsilon": "${oc.env:EPSILON}",
        "rotary_percentage": "${lost.field}",
    }
    with pytest.raises(
        CheckpointError,
        match=r"does not record .*layernorm_epsilon.*config= in Python, --config-json",
    ) as refusal:
        open_with_changes(tmp_path / "a", GATED, **changes)
    assert "rotary_percent (1.0" in str(refusal.value)
    overrides = {"layernorm_epsilon": 1e-6, "rotary_percent": 0.7}
    assert open_with_changes(tmp_path, GATED, overrides, **changes).layernorm_epsilon == 1e-6


def test_unresolved_reference_without_a_gpt_config_field_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"headscale is '\$\{lost\}', a reference to a value that the file does",
    ):
        open_with_changes(tmp_path / "a", DENSE, headscale="${lost}")
    assert open_with_changes(tmp_path / "b", DENSE, hidden_dropout="${lost}") == DENSE


def test_version_dependent_gelu_must_be_specified(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"openai_gelu": True, "bias_activation_fusion": False}
    with pytest.raises(CheckpointError, match=r"does not record activation \(gelu \(the erf"):
        open_with_changes(tmp_path, DENSE, **changes)
    parsed = open_with_changes(tmp_path / "told", DENSE, {"activation": "gelu"}, **changes)
    assert parsed.activation == "gelu"


OLDER: dict[str, tuple[dict[str, Any], str]] = {
    "as OpenAI's": ({"bias_activation_fusion": False, "openai_gelu": True}, "gelu_tanh"),
    "fused": ({"bias_activation_fusion": True}, "gelu_tanh"),
    "not fused": ({"bias_activation_fusion": False}, "gelu"),
    "exported to ONNX": ({"bias_activation_fusion": False, "onnx_safe": True}, "gelu"),
    "squared": ({"bias_activation_fusion": False, "activation": "squared-relu"}, "relu2"),
    "in a layer of Transformer Engine": (
        {"bias_activation_fusion": False, "transformer_engine": True},
        "gelu_tanh",
    ),
}


@pytest.mark.parametrize("name", OLDER)
def test_older_nemo_1_classes_are_mapped(name: str, tmp_path: Path) -> None:
    changes, activation = OLDER[name]
    saved(DENSE, Nemo(names="legacy", pack="dir", changes=changes), tmp_path)
    assert open_nemo(tmp_path / "gpt.nemo").config.activation == activation


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (LEGACY_GATED, {"activation": "fast-swiglu"}, "apply no activation; Preamble"),
        (DENSE, {"activation": "squared-relu"}, "apply no activation; Preamble"),
        (DENSE, {"activation": "approx-gelu"}, "activation is 'approx-gelu'"),
        (
            DENSE,
            {"activation": "squared-relu", "bias_activation_fusion": False, "onnx_safe": True},
            "onnx_safe is True",
        ),
    ],
)
def test_older_nemo_1_classes_with_other_layers_are_refused(
    config: GPTConfig, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    fused = {"bias_activation_fusion": True, **changes}
    saved(config, Nemo(names="legacy", pack="dir", changes=fused), tmp_path)
    with pytest.raises(CheckpointError, match=message):
        open_nemo(tmp_path / "gpt.nemo")


def test_relative_references_are_resolved() -> None:
    fields = NemoConfig(
        {
            "length": 64,
            "beside": "${.length}",
            "data": {"length": 32, "own": "${.length}", "outer": "${..length}", "far": "${....x}"},
            "through": "${data.own}",
            "tokenizer": {"size": "${length}", "cut": "${model.length}"},
        },
        "model_config.yaml",
    )
    assert fields.get("beside") == 64
    assert fields.get("through") == 32
    data_section = fields.section("data")
    assert (data_section.get("own"), data_section.get("outer")) == (32, 64)
    assert data_section.get("far") is None and data_section.unresolved_references == {
        "far": "${....x}"
    }
    tokenizer = fields.section("tokenizer")
    assert (tokenizer.get("size"), tokenizer.get("cut")) == (64, 64)


def test_vocab_size_is_overridden_else_the_padded_rows(tmp_path: Path) -> None:
    assert open_with_changes(tmp_path, DENSE, override_vocab_size=None).vocab_size == 104
    assert open_with_changes(tmp_path / "b", DENSE, {"vocab_size": 90}).vocab_size == 90


def test_malformed_tokenizer_sections_are_ignored(tmp_path: Path) -> None:
    assert open_with_changes(tmp_path, GATED, tokenizer="x") == GATED


def test_a_full_config_replaces_the_file(tmp_path: Path) -> None:
    saved(DENSE, Nemo(pack="dir", changes={"activation": "reglu"}), tmp_path)
    assert open_nemo(tmp_path / "gpt.nemo", DENSE).config == DENSE


def context(
    folder: Path, change: Any, config: GPTConfig = GATED, overrides: Any = None
) -> GPTConfig:
    """NeMo 2's config after a change."""
    nemo_writer.nemo_2(config, folder, Form(tp=2))
    path = folder / "context" / "model.yaml"
    context_config = yaml.safe_load(path.read_text())
    change(context_config["config"])
    path.write_text(yaml.safe_dump(context_config))
    return open_torch_dist(folder, overrides).config


@pytest.mark.parametrize(
    ("value", "fused", "activation"),
    [
        ("torch.nn.functional.silu", False, "silu"),
        ({"_target_": "torch._C._nn.gelu", "_partial_": True}, False, "gelu"),
        ({"_target_": "torch._C._nn.gelu", "_partial_": True}, True, "gelu_tanh"),
        ({"_target_": "torch.nn.functional.gelu", "approximate": "tanh"}, False, "gelu_tanh"),
        ("nemo.collections.llm.fn.activation.openai_gelu", False, "gelu_tanh"),
        ("megatron.core.activations.squared_relu", False, "relu2"),
    ],
)
def test_functions_are_recognized_by_the_last_part_of_their_name(
    value: object, fused: bool, activation: str, tmp_path: Path
) -> None:
    parsed = context(
        tmp_path, lambda c: c.update(activation_func=value, bias_activation_fusion=fused)
    )
    assert parsed.activation == activation and parsed.gated


def test_functions_written_as_tags_are_recognized(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(
        "f: !!python/name:torch.nn.functional.silu ''\n"
        "w: !!python/tuple [1, 0]\n"
        "o: !!python/object/apply:os.system ['touch ran']\n"
        "c: !custom {a: 1}\n"
    )
    assert read_config(file_span(path)) == {
        "f": "torch.nn.functional.silu",
        "w": [1, 0],
        "o": ["touch ran"],
        "c": {"a": 1},
    }


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("activation_func", "torch.nn.functional.relu", "activation_func is 'relu'"),
        ("_target_", "nemo.collections.llm.gpt.model.gemma.GemmaConfig7B", "_target_ is .*Gemma"),
        ("_target_", "megatron.bridge.models.mamba.MambaProvider", "_target_ is .*Mamba"),
        ("position_embedding_type", "mrope", "position_embedding_type is 'mrope'"),
        ("multi_latent_attention", True, "multi_latent_attention is True"),
        ("query_pre_attn_scalar", 224, "query_pre_attn_scalar is 224"),
        ("attention_output_gate", True, "attention_output_gate is True"),
    ],
)
def test_unsupported_nemo_2_fields_are_refused(
    name: str, value: object, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        context(tmp_path, lambda c: c.update({name: value}))


def test_llama_3_1_rope_scaling_has_four_fields_or_one(tmp_path: Path) -> None:
    four = {"scale_factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, "old_context_len": 32}
    scaling = context(tmp_path / "a", lambda c: c.update(four)).rope_scaling
    assert scaling and (scaling.factor, scaling.original_max_position_embeddings) == (4.0, 32)
    single_field = {"rope_scaling": True, "rope_scaling_factor": 16.0}
    scaling = context(tmp_path / "b", lambda c: c.update(single_field)).rope_scaling
    assert scaling and (scaling.kind, scaling.factor) == ("llama3", 16.0)
    with pytest.raises(CheckpointError, match="does not record rope_scaling"):
        context(tmp_path / "c", lambda c: c.update(scale_factor=4))


def test_unrecorded_preset_fields_come_from_shapes_or_are_required(tmp_path: Path) -> None:
    inferable = (
        *("num_layers", "hidden_size", "ffn_hidden_size", "normalization", "gated_linear_unit"),
        *("add_bias_linear", "add_qkv_bias", "share_embeddings_and_output_weights"),
    )
    parsed = context(
        tmp_path / "a", lambda c: [c.pop(name) for name in (*inferable, "qk_layernorm")]
    )
    assert parsed == GATED.with_fields(vocab_size=parsed.vocab_size)
    unrecorded = ("num_attention_heads", "layernorm_epsilon", "rotary_base", "activation_func")
    with pytest.raises(CheckpointError) as refusal:
        context(tmp_path / "b", lambda c: [c.pop(name) for name in unrecorded])
    required_names = ("num_attention_heads", "layernorm_epsilon", "rotary_base", "activation (gelu")
    assert all(name in str(refusal.value) for name in required_names)
    overrides = {name: getattr(GATED, name) for name in (*unrecorded[:3], "activation")}
    parsed = context(
        tmp_path / "c", lambda c: [c.pop(name) for name in unrecorded], overrides=overrides
    )
    assert parsed == GATED.with_fields(vocab_size=parsed.vocab_size)


def test_undescribed_experts_must_be_specified(tmp_path: Path) -> None:
    sparse = MIXED.with_fields(moe_layers=(True,) * 4)
    with pytest.raises(
        CheckpointError, match=r"moe_router_topk \(the number of experts per token\)"
    ):
        context(tmp_path, lambda c: c.pop("moe_router_topk"), sparse)


FAULTS = {
    "no mapping": ("- 1\n", "contains a list, not a config"),
    "no YAML": ("a: [1\n", "is not a readable config"),
    "merges": ("a: &a {b: 1}\nc: {<<: *a}\n", "it has a merge key"),
    "a list as a key": ("? [1]\n: 2\n", "is not a readable config"),
    "a bad date": ("a: 2020-99-99\n", "is not a readable config"),
    "depth": ("a: " + "[" * 800, "is not a readable config"),
    "a circle": ("a: &a [*a]\nnum_layers: ${num_layers}\n", "num_layers"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_broken_configs_raise_one_sentence(case: str, tmp_path: Path) -> None:
    text, message = FAULTS[case]
    saved(DENSE, Nemo(pack="dir"), tmp_path)
    (tmp_path / "gpt.nemo" / "model_config.yaml").write_text(text)
    with pytest.raises(CheckpointError, match=message) as refusal:
        open_nemo(tmp_path / "gpt.nemo")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["", "[]", '{"objects": 3}', '{"objects": {"a": 1}}', "[" * 9999])
def test_broken_graphs_raise_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "io.json").write_text(text)
    with pytest.raises(CheckpointError, match="is not a readable config") as refusal:
        read_fiddle_graph(file_span(tmp_path / "io.json"))
    assert "\n" not in str(refusal.value)


def test_errors_name_the_model_class_of_a_graph(tmp_path: Path) -> None:
    nemo_writer.nemo_2(GATED, tmp_path, Form(), graph=True)
    record = {**nemo_writer.transformer_of(GATED), "_target_": "nemo.gemma.GemmaConfig2B"}
    (tmp_path / "context" / "io.json").write_text(nemo_writer.graph_of(record))
    with pytest.raises(CheckpointError, match=r"_target_ is nemo\.gemma\.GemmaConfig2B"):
        open_torch_dist(tmp_path)


def test_unfused_gelu_of_transformer_engine_must_be_specified(tmp_path: Path) -> None:
    engine = {"use_transformer_engine_full_layer_spec": True, "bias_activation_fusion": False}
    gelu = {"activation_func": "torch._C._nn.gelu", "gated_linear_unit": False}
    with pytest.raises(CheckpointError, match=r"does not record activation \(gelu \(the erf"):
        context(tmp_path, lambda c: c.update(engine | gelu), DENSE)
    fused = {**engine, **gelu, "bias_activation_fusion": True}
    parsed = context(tmp_path / "b", lambda c: c.update(fused), DENSE)
    assert parsed.activation == "gelu_tanh"


def test_unknown_layer_specs_are_refused(tmp_path: Path) -> None:
    def layers(name: str) -> Any:
        return lambda c: c.update(transformer_layer_spec={"_target_": name, "_call_": False})

    own_spec = "nemo.collections.llm.gpt.model.base.default_layer_spec"
    assert context(tmp_path, layers(own_spec)) == GATED
    bridge_spec = "megatron.bridge.models.olmoe.olmoe_provider.olmoe_layer_spec"
    with pytest.raises(CheckpointError, match="transformer_layer_spec is 'olmoe_layer_spec'"):
        context(tmp_path / "b", layers(bridge_spec))


def test_nemo_2_vocab_size_is_that_of_its_tokenizer(tmp_path: Path) -> None:
    model = sentencepiece_model()
    (tmp_path / "tokenizer.model").write_bytes(model)
    tokens = open_tokenizer(tmp_path / "tokenizer.model").vocab_size

    def remove_vocab_size(record: dict[str, Any]) -> None:
        record.update(vocab_size=None, make_vocab_size_divisible_by=16)
        (tmp_path / "b" / "context" / "spm.model").write_bytes(model)

    config = GATED.with_fields(vocab_size=tokens)
    assert context(tmp_path / "b", remove_vocab_size, config).vocab_size == tokens


def test_cyclic_graph_is_read(tmp_path: Path) -> None:
    items = [[f"Attr(name='x{i}')", {"type": "ref", "key": "a"}] for i in range(3)]
    record = {"objects": {"a": {"type": {"module": "m", "name": "C"}, "items": items}}}
    (tmp_path / "io.json").write_text(json.dumps(record))
    (graph,) = read_fiddle_graph(file_span(tmp_path / "io.json"))
    assert graph["_target_"] == "m.C"


def test_pickled_omegaconf_is_unwrapped() -> None:
    def node(**state: Any) -> Stub:
        stub = Stub()
        stub.fields = state
        return stub

    list_node = node(_content=[node(_val=1), node(_val="x")], _parent=None)
    root_node = node(_content={"a": list_node, "b": node(_val=None)}, _metadata=node(flags={}))
    assert unwrap_omegaconf(root_node) == {"a": [1, "x"], "b": None}
    cyclic: dict[str, Any] = {}
    cyclic["a"] = cyclic
    assert unwrap_omegaconf(cyclic)


def test_cyclic_references_are_refused(tmp_path: Path) -> None:
    fields = NemoConfig({"a": "${b}", "b": "${a}", "c": "${oc.env:HOME}", "d": "x${a}"}, "x.yaml")
    assert [fields.get(name) for name in "abcd"] == [None] * 4
    assert sorted(fields.unresolved_references) == ["a", "b", "c", "d"]
