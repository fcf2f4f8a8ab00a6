"""Linear adapters in PEFT's form that are inconsistent, unsupported or hostile are refused."""

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gpt.adapters.adapter_file import Card, build_adapter, check_adapter, open_adapter
from gpt.adapters.module_pattern import Budget, ModulePattern, PatternList
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter
from tests.support.models import lively
from tests.support.peft_adapters import write_peft_adapter

CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=44,
    vocab_size=103,
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    dtype="float32",
)
PREFIX = "base_model.model.model.layers"
RANK = 2
QUERIES = CONFIG.num_attention_heads * CONFIG.kv_channels
KEYS = CONFIG.num_query_groups * CONFIG.kv_channels
LORA: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 4,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "init_lora_weights": True,
}
IA3: dict[str, Any] = {
    "peft_type": "IA3",
    "task_type": "CAUSAL_LM",
    "target_modules": ["k_proj", "down_proj"],
    "feedforward_modules": ["down_proj"],
}
Tensors = dict[str, Tensor]


def lora_tensors() -> Tensors:
    torch.manual_seed(0)
    tensors = {}
    shapes = {
        "self_attn.q_proj": (QUERIES, CONFIG.hidden_size),
        "mlp.down_proj": (CONFIG.hidden_size, CONFIG.ffn_hidden_size),
    }
    for layer in range(CONFIG.num_layers):
        for path, (outputs, inputs) in shapes.items():
            tensors[f"{PREFIX}.{layer}.{path}.lora_A.weight"] = torch.randn(RANK, inputs)
            tensors[f"{PREFIX}.{layer}.{path}.lora_B.weight"] = torch.randn(outputs, RANK)
    return tensors


def ia3_tensors() -> Tensors:
    torch.manual_seed(0)
    tensors = {}
    for layer in range(CONFIG.num_layers):
        tensors[f"{PREFIX}.{layer}.self_attn.k_proj.ia3_l"] = torch.randn(KEYS, 1)
        tensors[f"{PREFIX}.{layer}.mlp.down_proj.ia3_l"] = torch.randn(1, CONFIG.ffn_hidden_size)
    return tensors


A_0 = f"{PREFIX}.0.self_attn.q_proj.lora_A.weight"
B_0 = f"{PREFIX}.0.self_attn.q_proj.lora_B.weight"
DOWN_B = f"{PREFIX}.1.mlp.down_proj.lora_B.weight"


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return lively(CONFIG)


@pytest.fixture(scope="module")
def lora_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with good tensors; each test writes its own config."""
    return write_peft_adapter(tmp_path_factory.mktemp("lora"), LORA, lora_tensors())


def refusal(folder: Path, base: Checkpoint | None) -> str:
    with pytest.raises(AdapterError) as caught:
        check_adapter(open_adapter(folder, base=base), CONFIG, None)
    message = str(caught.value)
    assert ";" in message or ": " in message  # What to do next.
    assert len(message) < 1500
    return message


def test_the_unchanged_adapters_are_read(tmp_path: Path, base: Checkpoint) -> None:
    lora = open_adapter(write_peft_adapter(tmp_path / "lora", LORA, lora_tensors()), base=base)
    assert sorted(lora.linears)[:2] == [
        "decoder.layers.0.mlp.linear_fc2",
        "decoder.layers.0.self_attention.linear_qkv.query",
    ]
    assert set(lora.card.scales.values()) == {2.0}
    ia3 = open_adapter(write_peft_adapter(tmp_path / "ia3", IA3, ia3_tensors()), base=base)
    assert ia3.linears["decoder.layers.1.mlp.linear_fc2"].input_scale is not None
    check_adapter(lora, CONFIG, None)
    check_adapter(ia3, CONFIG, None)
    with pytest.raises(
        AdapterError, match=r"is a LoRA adapter, .*give the base model with --model"
    ):
        open_adapter(tmp_path / "lora")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_model_with_images_is_read(
    tmp_path: Path, base: Checkpoint, prefix: str
) -> None:
    tensors = rename(lora_tensors(), "base_model.model.model.", f"base_model.model.{prefix}")
    folder = write_peft_adapter(tmp_path / "a", LORA, tensors)
    plain = open_adapter(write_peft_adapter(tmp_path / "b", LORA, lora_tensors()), base=base)
    assert open_adapter(folder, base=base).digest == plain.digest


EXPLODING = [
    r"((.?){999}){999}x",
    "(" * 60 + ")" * 60,
    "a*" * 40_000,
    r"(a)\1",
    r"(?<=a)b",
    r"(?i)q_proj",
    r"(?P<a>x)(?(a)y|z)",
    r"q_proj++",
    r"q_proj**",
    r"*q_proj",
    r"q_proj(",
    r"q_proj)",
    r"[q_proj",
    r"[z-a]",
    r"q{5,2}",
    r"q{70000}",
    "q_proj\\",
    r"\q",
]
MATCHES_NOTHING = [
    r"(a+)+$",
    r"(.*)*x",
    r"(?=.*)*" * 100,
    r"((((((.*)*)*)*)*)*)*x",
    r".*.*.*.*.*.*.*.*.*.*.*.*x",
    "(a|a)" * 2000 + "x",
    r"(?:.{0,999}){0,999}x",
    "nothing",
]
# Values of fields, and what the message says.
FIELD_FAULTS: list[tuple[str, Any, str]] = [
    ("init_lora_weights", "pissa", "path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "pissa_niter_16", "path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "olora", "path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "corda", "path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "loftq", "path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "lora_ga", "path_initial_model_for_weight_conversion"),
    ("init_lora_weights", "unheard of", "init_lora_weights"),
    ("bias", "all", "bias 'all'"),
    ("bias", "lora_only", "bias 'lora_only'"),
    ("lora_bias", True, "lora_bias=False"),
    ("modules_to_save", ["lm_head"], "without modules_to_save"),
    ("trainable_token_indices", [1, 2], "without trainable tokens"),
    ("layer_replication", [[0, 1], [0, 2]], "layer_replication"),
    ("use_qalora", True, "use_qalora=False"),
    ("use_bdlora", {"nblocks": 2}, "BD-LoRA"),
    ("kasa_config", {"beta": 1}, "KaSA"),
    ("arrow_config", {"top_k": 2}, "Arrow"),
    ("velora_config", {"num_groups": 2}, "VeLoRA"),
    ("monteclora_config", {"samples": 2}, "MonteCLoRA"),
    ("target_parameters", ["mlp.experts.down_proj"], "no tensors of such parameters"),
    ("target_parameters", "down_proj", "a list of names of parameters"),
    ("target_parameters", ["down_proj", 3], "a list of names of parameters"),
    ("use_future_lora", True, "'use_future_lora' with the value True"),
    ("task_type", "SEQ_CLS", "task_type 'SEQ_CLS'"),
    ("task_type", 3, "task_type 3"),
    ("use_rslora", "yes", "use_rslora 'yes'"),
    ("use_dora", 1.5, "use_dora 1.5"),
    ("use_dora", True, "has only lora_A.weight, lora_B.weight"),
    ("alora_invocation_tokens", [], "alora_invocation_tokens"),
    ("alora_invocation_tokens", [-1], "alora_invocation_tokens"),
    ("alora_invocation_tokens", [True], "alora_invocation_tokens"),
    ("alora_invocation_tokens", "abc", "alora_invocation_tokens"),
    ("alora_invocation_tokens", [1] * 300, "alora_invocation_tokens"),
    ("alora_invocation_tokens", [CONFIG.vocab_size], "outside the vocabulary"),
    *(("r", value, "has r ") for value in (0, -1, 10**9, 513, 1.5, "2", True, None, [2], 10**400)),
    ("r", 3, "has rank 2 in .*but adapter_config.json has rank 3"),
    *(
        ("lora_alpha", value, "has lora_alpha")
        for value in (math.nan, math.inf, "4", None, True, [4], 1e300, 10**400)
    ),
    ("lora_alpha", 0, "has no effect"),
    ("rank_pattern", ["q_proj"], "rank_pattern"),
    ("rank_pattern", {"q_proj": 10**9}, "rank_pattern 'q_proj'"),
    ("rank_pattern", {"q_proj": "2"}, "rank_pattern 'q_proj'"),
    ("rank_pattern", {"q_proj": 1}, "has rank 2 in "),
    ("rank_pattern", 3, "rank_pattern"),
    ("alpha_pattern", {"q_proj": "2"}, "alpha_pattern 'q_proj'"),
    ("alpha_pattern", {"q_proj": math.nan}, "alpha_pattern 'q_proj'"),
    ("alpha_pattern", "q_proj", "alpha_pattern"),
    *(
        ("target_modules", value, "target_modules")
        for value in (None, [], [""], [1], 3, {}, {"a": 1})
    ),
    ("target_modules", ["q_proj"], "does not target model.layers.0.mlp.down_proj"),
    (
        "target_modules",
        ["q_proj", "down_proj", "v_proj"],
        "targets model.layers.0.self_attn.v_proj",
    ),
    ("target_modules", "all-linear", "targets model.layers.0.self_attn.k_proj"),
    ("target_modules", ["proj"], "does not target"),
    ("exclude_modules", ["down_proj"], "does not target model.layers.0.mlp.down_proj"),
    ("exclude_modules", ".*down_proj", "does not target model.layers.0.mlp.down_proj"),
    ("exclude_modules", 7, "exclude_modules"),
    ("layers_to_transform", [0], "does not target model.layers.1"),
    ("layers_to_transform", 0, "does not target model.layers.1"),
    ("layers_to_transform", ["0"], "layers_to_transform"),
    ("layers_to_transform", [-1], "layers_to_transform"),
    ("layers_to_transform", {"0": 1}, "layers_to_transform"),
    ("layers_pattern", "layers", "layers_pattern without layers_to_transform"),
    ("layers_pattern", "(a+)+", "layers_pattern"),
    ("layers_pattern", [3], "layers_pattern"),
    ("peft_type", "ADALORA", "peft_type ADALORA"),
    ("peft_type", "LOHA", "peft_type LOHA"),
    ("peft_type", "VERA", "peft_type VERA"),
    ("peft_type", None, "peft_type None"),
    ("peft_type", ["LORA"], "peft_type"),
    *(("target_modules", pattern, "target_modules has the regular") for pattern in EXPLODING),
    *(("target_modules", pattern, "does not target") for pattern in MATCHES_NOTHING),
]


PATTERN_FAULTS: list[tuple[str, Any, str]] = [
    *(("rank_pattern", {p: 2}, "rank_pattern has the regular") for p in EXPLODING),
    *(("alpha_pattern", {p: 2}, "alpha_pattern has the regular") for p in EXPLODING),
    *(("exclude_modules", p, "exclude_modules has the regular") for p in EXPLODING),
]
FIELD_CASES = [
    *FIELD_FAULTS,
    *(pytest.param(*fault, marks=[pytest.mark.slow]) for fault in PATTERN_FAULTS),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), FIELD_CASES, ids=[str(n) for n in range(len(FIELD_CASES))]
)
def test_a_field_that_is_wrong_or_not_supported_is_refused_by_name(
    lora_folder: Path, base: Checkpoint, field: str, value: object, message: str
) -> None:
    folder = lora_folder
    (folder / "adapter_config.json").write_text(json.dumps({**LORA, field: value}))
    assert re.search(message, refusal(folder, base))


def rename(tensors: Tensors, old: str, new: str) -> Tensors:
    return {key.replace(old, new): tensor for key, tensor in tensors.items()}


def tensor_faults() -> Iterator[tuple[str, Callable[[Tensors], Tensors], str]]:
    """The name of a fault, how it changes the tensors, and the message."""

    def with_tensor(key: str, value: Tensor) -> Callable[[Tensors], Tensors]:
        return lambda tensors: {**tensors, key: value}

    def with_tensors(others: Tensors) -> Callable[[Tensors], Tensors]:
        return lambda tensors: tensors | others

    def without(key: str) -> Callable[[Tensors], Tensors]:
        return lambda tensors: {name: value for name, value in tensors.items() if name != key}

    inputs = CONFIG.hidden_size
    for value in (math.nan, math.inf, -math.inf):
        broken = torch.zeros(QUERIES, RANK)
        broken[3, 1] = value
        yield f"{value} in B", with_tensor(B_0, broken), "not finite"
    zeros = {
        key: torch.zeros_like(value) for key, value in lora_tensors().items() if "lora_B" in key
    }
    yield "all zeros", lambda tensors: tensors | zeros, "has no effect"
    yield "no tensors", lambda _: {}, "has no tensors"
    yield "no A", without(A_0), "has only lora_B.weight"
    yield "no B", without(B_0), "has only lora_A.weight"
    a_shapes: list[tuple[int, ...]] = [
        (inputs, RANK),
        (RANK, inputs + 1),
        (RANK + 1, inputs),
        (RANK,),
        (RANK, inputs, 1),
    ]
    for shape in a_shapes:
        pattern = "has rank 3" if shape[0] == RANK + 1 else "shape|rank 32"
        yield f"A {shape}", with_tensor(A_0, torch.ones(shape)), pattern
    b_shapes = [(RANK, QUERIES), (QUERIES, RANK + 1), (QUERIES - 1, RANK), (), (0, RANK)]
    for shape in b_shapes:
        yield f"B {shape}", with_tensor(B_0, torch.ones(shape)), "has the shape"
    for dtype in (torch.int64, torch.int8, torch.float64, torch.bool, torch.float8_e4m3fn):
        yield f"B {dtype}", with_tensor(B_0, torch.ones(QUERIES, RANK).to(dtype)), "it must be"
    others = {
        "model.embed_tokens.lora_embedding_A": "changes the embedding",
        "lm_head.lora_A.weight": "has only lora_A.weight of lm_head",
        "lm_head.weight": "modules_to_save",
        "lm_head.base_layer.weight": "replaces a tensor of the model",
        "model.layers.0.self_attn.q_proj.base_layer.bias": "replaces a tensor",
        "model.layers.0.self_attn.q_proj.lora_B.bias": "lora_bias=False",
        "model.layers.0.self_attn.q_proj.lora_magnitude_vector": "does not set use_dora",
        "model.embed_tokens.token_adapter.trainable_tokens_delta": "trainable tokens",
        "model.layers.0.mlp.experts.base_layer.lora_A.weight": "target_parameters",
        "model.layers.0.self_attn.q_proj.ia3_l": "no tensor of its kind",
        "model.layers.0.self_attn.q_proj.lora_A.default.weight": "no tensor of its kind",
        "": "no tensor of its kind",
        "x" * 5000: "no tensor of its kind",
    }
    for key, message in others.items():
        yield key[:60], with_tensor(f"base_model.model.{key}", torch.ones(1)), message
    yield "no prefix", with_tensor("model.layers.0.lora_A.weight", torch.ones(1)), "no tensor of"
    for key in (
        "lm_head",
        "model.layers.7.self_attn.q_proj",
        "model.layers.0.q_proj",
        "h.0.attn.c_attn",
    ):
        pair = {
            f"base_model.model.{key}.lora_A.weight": torch.ones(RANK, inputs),
            f"base_model.model.{key}.lora_B.weight": torch.ones(QUERIES, RANK),
        }
        yield key, with_tensors(pair), "is no linear of attention"
    expert = {
        f"{PREFIX}.0.mlp.experts.1.gate_proj.lora_{letter}.weight": torch.ones(2, 2)
        for letter in "AB"
    }
    yield "experts", with_tensors(expert), "is no linear of attention, an MLP or an expert"
    yield (
        "path",
        lambda tensors: rename(tensors, ".layers.0.", ".layers.../"),
        "is no linear of attention",
    )


TENSOR_FAULTS = list(tensor_faults())


@pytest.mark.parametrize(
    ("change", "message"),
    [fault[1:] for fault in TENSOR_FAULTS],
    ids=[fault[0] for fault in TENSOR_FAULTS],
)
def test_tensors_that_are_wrong_or_not_supported_are_refused_by_name(
    tmp_path: Path, base: Checkpoint, change: Callable[[Tensors], Tensors], message: str
) -> None:
    folder = write_peft_adapter(tmp_path / "a", LORA, change(lora_tensors()))
    assert re.search(message, refusal(folder, base))


IA3_FAULTS: list[tuple[dict[str, Any], Callable[[Tensors], Tensors], str]] = [
    ({"feedforward_modules": []}, dict, "has the shape"),
    (
        {"feedforward_modules": ["k_proj", "down_proj"]},
        dict,
        "cannot be scaled for one of its parts",
    ),
    ({"feedforward_modules": "(a+)+("}, dict, "feedforward_modules has the regular"),
    ({"feedforward_modules": 3}, dict, "feedforward_modules"),
    ({"r": 3}, dict, "the field 'r'"),
    ({"modules_to_save": ["lm_head"]}, dict, "without modules_to_save"),
    ({"target_modules": ["k_proj"]}, dict, "does not target"),
    ({}, lambda tensors: rename(tensors, "ia3_l", "ia3_l.default"), "no tensor of its kind"),
    ({}, lambda tensors: {key: torch.ones_like(t) for key, t in tensors.items()}, "has no effect"),
    ({}, lambda tensors: {key: t.flatten() for key, t in tensors.items()}, "has the shape"),
    ({}, lambda tensors: {key: t.T for key, t in tensors.items()}, "has the shape"),
    ({}, lambda tensors: {key: t * math.nan for key, t in tensors.items()}, "not finite"),
]


@pytest.mark.parametrize(("fields", "change", "message"), IA3_FAULTS)
def test_ia3_that_is_wrong_is_refused_by_name(
    tmp_path: Path,
    base: Checkpoint,
    fields: dict[str, Any],
    change: Callable[[Tensors], Tensors],
    message: str,
) -> None:
    folder = write_peft_adapter(tmp_path / "a", {**IA3, **fields}, change(ia3_tensors()))
    assert re.search(message, refusal(folder, base))


CONFIG_TEXTS = {
    "no JSON": "{",
    "no object": "[1]",
    "deep": "[" * 100_000,
    "long": json.dumps({**LORA, "x": "y" * (1 << 20)}),
    "bytes": "\udc80",
}


@pytest.mark.parametrize("name", CONFIG_TEXTS)
def test_a_broken_config_is_refused(tmp_path: Path, base: Checkpoint, name: str) -> None:
    folder = write_peft_adapter(tmp_path / "a", LORA, lora_tensors())
    text = CONFIG_TEXTS[name]
    (folder / "adapter_config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert "adapter_config.json cannot be read" in refusal(folder, base)


def test_torch_files_are_read_without_unpickling(tmp_path: Path, base: Checkpoint) -> None:
    folder = write_peft_adapter(tmp_path / "a", LORA, lora_tensors())
    digest = open_adapter(folder, base=base).digest
    (folder / "adapter_model.safetensors").unlink()
    weights = folder / "adapter_model.bin"
    torch.save(lora_tensors(), weights)
    assert open_adapter(folder, base=base).digest == digest
    # Strides of 0: a huge tensor in a small file.
    huge = lora_tensors() | {B_0: torch.ones(1, 1).expand(10**9, RANK)}
    torch.save(huge, weights)
    assert "has the shape (1000000000, 2)" in refusal(folder, base)
    torch.save({**lora_tensors(), "x": Path("/tmp")}, weights)
    refusal(folder, base)
    torch.save(lora_tensors()[A_0], weights)
    refusal(folder, base)
    weights.write_bytes(b"PK\x03\x04" + b"\x00" * 100)
    refusal(folder, base)
    weights.write_bytes(b"")
    refusal(folder, base)


PATTERNS = [
    r".*q_proj",
    r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|down_proj).*?)"
    r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|k_proj|down_proj)))",
    r"^(?!.*mlp).*(?:q_proj|gate_proj)$",
    r"^(model)(?!.*(lm_head|output|emb|wte|shared)).*",
    r"model\.layers\.(1|1[0-9])\..*",
    r"model.layers.[12]+.*",
    r"(a*)*b",
    r"[^q]*",
    r".*\.(q|k)_proj",
    r"model\.layers\.\d{2}\.[a-z_.]+",
    r"(self_attn|attn)\.(q_proj|c_attn)",
    r"(?P<name>q|k)_proj",
    r"\w+_proj",
    r"\w+\.\w*\.\d+\.[a-z_]+.*k_proj|[^.]+",
    r"[]a-z_]+|{x",
    r"self_attn\.\S{6}",
    r"[a-fc-z_.\d]+",
    r"[^\W_.]+[\D]*",
    r"",
    "q_proj",
    "layers.1.self_attn.q_proj",
]


def test_an_input_scale_of_one_part_is_refused() -> None:
    change = LinearAdapter(input_scale=torch.rand(CONFIG.hidden_size))
    key = "decoder.layers.0.mlp.linear_fc1.gate"
    with pytest.raises(AdapterError, match="the parts of a linear have one input"):
        build_adapter(Card("a"), None, {key: change})


NAMES = [
    "transformer.h.3.attn.c_attn",
    *("", "b", "aab", "q_proj", "xq_proj", "layers.1.self_attn_q_proj"),
    *(
        f"model.layers.{layer}.{path}"
        for layer in (0, 1, 11, 23)
        for path in ("self_attn.q_proj", "self_attn.k_proj", "mlp.gate_proj", "mlp.down_proj")
    ),
]


def first_in_python(patterns: list[str], name: str) -> str | None:
    """As `get_pattern_key` of PEFT."""
    matches = (key for key in patterns if re.match(rf"(.*\.)?({key})$", name))
    return next(matches, None)


def test_the_first_of_several_expressions_counts() -> None:
    for patterns in (PATTERNS, PATTERNS[::-1], [*PATTERNS[-2:], ".*"], ["b", "layers.1.self_attn"]):
        table = PatternList(patterns, "a test", Budget())
        for name in NAMES:
            assert table.first_match(name) == first_in_python(patterns, name), name


def test_a_class_of_many_characters_is_matched_quickly() -> None:
    """Its members are sorted: each comparison with all of them would take hours here."""
    members = [chr(0x4E00 + 2 * number) for number in range(30_000)]
    pattern = ModulePattern(f"([{''.join(members)}b-eac-f]|x)*", "a test", Budget())
    for number in range(300):
        assert not pattern.matches(f"model.layers.{number}.self_attn.q_proj" * 10)
    assert pattern.matches(f"xabcdef{members[7]}{members[-1]}")
    assert not pattern.matches("xg") and not pattern.matches(chr(0x4E01))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expressions_match_as_in_python(pattern: str) -> None:
    compiled = ModulePattern(pattern, "a test", Budget())
    for name in NAMES:
        assert compiled.matches(name) == bool(re.fullmatch(pattern, name)), name
        expected = bool(re.match(rf"(.*\.)?({pattern})$", name))
        assert compiled.matches_end(name) == expected, name
