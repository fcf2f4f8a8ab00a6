"""LoRA and IA3 of NeMo 1: any split is joined, exports are read again, and others are refused."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.export_bridge import convert_linears_to_bridge
from gpt.adapters.export_nemo_linears import convert_linears_to_nemo
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.config import GPTConfig
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import split_key
from tests.support.adapter_exchange import run_adapters_command
from tests.support.linear_adapters import EXPERT_TARGETS, GATED, random_linears
from tests.support.models import CLASSIC, EXPERTS, MODERN, lively
from tests.support.nemo_linears import write_nemo_distributed, write_nemo_linears

PLAIN = GPTConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    vocab_size=96,
    max_position_embeddings=64,
    dtype="float32",
)
LORA = {"adapter_dim": 4, "alpha": 8}
SPLITS = [
    (2, 2, 2),
    *(
        pytest.param(split, marks=[pytest.mark.slow])
        for split in ((1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (2, 2, 1), (4, 2, 1))
    ),
]

FAST_EXPORT = ("parts missing", 2)


def lora(config: GPTConfig, *, canonical: bool = False) -> dict[str, LinearAdapter]:
    changes = random_linears(config, rank=4)
    if canonical:
        parts = random_linears(config, rank=4, by_parts=True)
        # All parts of a projection, with equal ranks.
        changes = {key: change for key, change in changes.items() if not _is_fused(key, config)}
        for key, change in parts.items():
            name, part = split_key(key)
            if part:
                changes[key] = _with_rank_4(change)
                last = {"linear_qkv": "value", "linear_fc1": "up"}[name.rpartition(".")[2]]
                if part in ("key", "gate"):
                    outputs = _with_rank_4(change)
                    assert outputs.lora_b is not None and outputs.lora_a is not None
                    changes[f"{name}.{last}"] = replace(
                        outputs, lora_b=outputs.lora_b.flip(0), lora_a=outputs.lora_a.flip(0)
                    )
    return {key: replace(change, scale=2.0) for key, change in changes.items()}


def _is_fused(key: str, config: GPTConfig) -> bool:
    return key.endswith("linear_qkv") or (config.gated and key.endswith("linear_fc1"))


def _with_rank_4(change: LinearAdapter) -> LinearAdapter:
    assert change.lora_a is not None and change.lora_b is not None
    a, b = change.lora_a[:4], change.lora_b[:, :4]
    return replace(change, lora_a=a, lora_b=b)


def ia3(config: GPTConfig) -> dict[str, LinearAdapter]:
    parts = random_linears(config, "ia3", by_parts=True, targets=("linear_qkv",))
    parts = {key: change for key, change in parts.items() if not key.endswith("query")}
    for key, change in list(parts.items()):
        assert change.output_scale is not None
        parts[key.replace("key", "value")] = replace(
            change, output_scale=change.output_scale.flip(0)
        )
    return parts | random_linears(config, "ia3", targets=("linear_fc2",))


def digest(adapter: Adapter, linears: Mapping[str, LinearAdapter]) -> str:
    return build_adapter(adapter.card, None, linears).digest


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("variant", ["nemo", "canonical"])
def test_lora_of_any_split_is_joined(
    tmp_path: Path, variant: str, split: tuple[int, int, int]
) -> None:
    config = GATED
    linears = lora(config, canonical=variant == "canonical")
    tp, pp, vpp = split
    path = write_nemo_linears(
        tmp_path / "a.nemo", linears, config, tp=tp, pp=pp, vpp=vpp, tuning=LORA
    )
    base = lively(config)
    adapter = open_adapter(path, base=base)
    check_adapter(adapter, config, None)
    assert (adapter.card.name, adapter.card.method) == ("a", "lora")
    assert adapter.digest == digest(adapter, linears)


@pytest.mark.parametrize(("tp", "stacked"), [(1, True), (2, True), (4, False)])
@pytest.mark.parametrize("canonical", [False, True])
def test_lora_in_a_distributed_checkpoint_is_read(
    tmp_path: Path, canonical: bool, tp: int, stacked: bool
) -> None:
    linears = lora(GATED, canonical=canonical)
    path = write_nemo_distributed(
        tmp_path / "a.nemo", linears, GATED, tp=tp, stacked=stacked, tuning=LORA
    )
    adapter = open_adapter(path, base=lively(GATED))
    assert adapter.digest == digest(adapter, linears)
    with pytest.raises(AdapterError, match="give the model that it was trained on"):
        open_adapter(path, base=lively(MODERN))


@pytest.mark.parametrize("prefix", ["model.language_model.encoder.", "model.module.decoder."])
def test_old_key_prefixes_and_directories_are_read(tmp_path: Path, prefix: str) -> None:
    linears = lora(PLAIN)
    path = write_nemo_linears(
        tmp_path / "a", linears, PLAIN, tp=2, tuning=LORA, prefix=prefix, dtype=torch.bfloat16
    )
    rounded = {
        key: replace(
            change,
            lora_a=None if change.lora_a is None else change.lora_a.bfloat16(),
            lora_b=None if change.lora_b is None else change.lora_b.bfloat16(),
        )
        for key, change in linears.items()
    }
    adapter = open_adapter(path, base=lively(PLAIN))
    assert adapter.digest == digest(adapter, rounded)


@pytest.mark.parametrize("split", [(1, 1, 1), (4, 1, 1), (2, 2, 1)])
def test_ia3_of_any_split_is_joined(tmp_path: Path, split: tuple[int, int, int]) -> None:
    linears = ia3(GATED)
    tp, pp, vpp = split
    path = write_nemo_linears(
        tmp_path / "a.nemo", linears, GATED, tp=tp, pp=pp, vpp=vpp, scheme="ia3"
    )
    adapter = open_adapter(path, base=lively(GATED))
    assert adapter.card.method == "ia3"
    assert adapter.digest == digest(adapter, linears)


def test_layer_selection_counts_from_1(tmp_path: Path) -> None:
    linears = {key: change for key, change in lora(PLAIN).items() if ".layers.2." in key}
    tuning = {**LORA, "layer_selection": [3], "alpha": None}
    path = write_nemo_linears(tmp_path / "a.nemo", linears, PLAIN, tuning=tuning)
    adapter = open_adapter(path, base=lively(PLAIN))
    assert adapter.linears.keys() == linears.keys()
    assert set(adapter.card.scales.values()) == {1.0}


@pytest.mark.parametrize(
    ("case", "tp"),
    [
        pytest.param(case, tp, marks=[] if (case, tp) == FAST_EXPORT else [pytest.mark.slow])
        for case in ("nemo", "canonical", "plain", "parts missing", "ia3")
        for tp in (1, 2, 4)
    ],
)
def test_exports_are_read_again_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str, tp: int
) -> None:
    config = PLAIN if case == "plain" else GATED
    linears = ia3(config) if case == "ia3" else lora(config, canonical="canonical" in case)
    if case == "parts missing":
        linears = {
            key: change
            for key, change in lora(config, canonical=True).items()
            if not key.endswith((".value", ".up", "3.mlp.linear_fc2"))
        }
    write_native(lively(config), tmp_path / "base")
    save_adapter(build_adapter(Card("a"), None, linears), tmp_path / "a.safetensors")
    flags = ("--to", "nemo", "--model", tmp_path / "base", "--tp", str(tp))
    code, _, err = run_adapters_command(
        capsys, "export", tmp_path / "a.safetensors", tmp_path / "a.nemo", *flags
    )
    assert code == 0, err
    base = lively(config)
    adapter = open_adapter(tmp_path / "a.nemo", base=base)
    assert adapter.digest == digest(adapter, linears)


def test_exports_that_nemo_cannot_express_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native(lively(GATED), tmp_path / "base")
    linears = random_linears(GATED)
    refused = {
        "magnitudes (DoRA)": build_adapter(Card("a"), None, random_linears(GATED, "dora")),
        "an invocation": build_adapter(Card("a", invocation=(1,)), None, linears),
        "3 virtual tokens": build_adapter(Card("a"), torch.ones(3, 32), linears),
        "NeMo's IA3 scales only keys": build_adapter(
            Card("a"), None, random_linears(GATED, "ia3", targets=("linear_proj",))
        ),
        "4 KV heads among 8 tensor ranks": build_adapter(Card("a"), None, linears),
    }
    for message, adapter in refused.items():
        save_adapter(adapter, tmp_path / "a.safetensors")
        tp = "8" if "8" in message else "2"
        flags = ("--to", "nemo", "--model", tmp_path / "base", "--tp", tp)
        code, _, err = run_adapters_command(
            capsys, "export", tmp_path / "a.safetensors", tmp_path / "a.nemo", *flags
        )
        expected = "virtual tokens and adapter weights" if "virtual" in message else message
        assert code == 1 and expected in err


@pytest.mark.parametrize("targets", [EXPERT_TARGETS, ("linear_fc2",)])
def test_changes_of_experts_have_no_form_in_nemo_and_bridge(targets: tuple[str, ...]) -> None:
    config = EXPERTS.with_fields(moe_layers=(True,) * 4)
    linears = random_linears(config, targets=(*targets, "linear_qkv"))
    adapter, base = build_adapter(Card("a"), None, linears), lively(config)
    with pytest.raises(AdapterError, match=r"changes of experts, which Megatron-Bridge's LoRA"):
        convert_linears_to_bridge(adapter, base)
    with pytest.raises(AdapterError, match=r"changes of experts, which a .nemo file"):
        convert_linears_to_nemo(adapter, base, {}, None, 1)


State = dict[str, Any]
KQV = "model.decoder.layers.0.self_attention.adapter_layer.lora_kqv_adapter"
EXPERT = "model.decoder.layers.0.mlp.experts.local_experts.0"
FAULTS: dict[str, tuple[Callable[[State], State], Mapping[str, Any], str]] = {
    "selective": (dict, {"peft_scheme": "selective"}, "peft_scheme 'selective'"),
    "two schemes": (dict, {"peft_scheme": "lora,ptuning"}, "peft_scheme 'lora,ptuning'"),
    "tying": (dict, {"weight_tying": True}, "weight_tying True"),
    "positions": (dict, {"position_embedding_strategy": "add"}, "position_embedding_strategy"),
    "dim": (dict, {"adapter_dim": 5}, "has adapter_dim 5, but"),
    "huge dim": (dict, {"adapter_dim": 10**9}, "has adapter_dim 1000000000, but"),
    "no dim": (dict, {"adapter_dim": "x"}, "they must be numbers"),
    "alpha": (dict, {"alpha": "8"}, "they must be numbers"),
    "nan alpha": (dict, {"alpha": math.nan}, "they must be numbers"),
    "huge alpha": (dict, {"alpha": 10**400}, "alpha below 1e+09"),
    "layers": (dict, {"layer_selection": [1, 2]}, "but its config selects 2 layers"),
    "layer list": (dict, {"layer_selection": "all"}, "must be a list"),
    "a layer less": (
        lambda state: {key: value for key, value in state.items() if "layers.3" not in key},
        {},
        "in 3 layers, but its config selects 4",
    ),
    "a layer more": (
        lambda state: state | {KQV.replace("s.0", "s.4") + ".linear_in.weight": torch.ones(4, 32)},
        {},
        "but a stage of this model has 4 layers",
    ),
    "no B": (lambda state: _without(state, "kqv_adapter.linear_out"), {}, "linear_qkv has lora_a"),
    "no state": (lambda _: {}, {}, "has no tensors of an adapter"),
    "shape of A": (
        lambda state: state | {f"{KQV}.linear_in.weight": torch.ones(4, 33)},
        {},
        "lora_a of decoder.layers.0.self_attention.linear_qkv with the shape",
    ),
    "shape of B": (
        lambda state: state | {f"{KQV}.linear_out.weight": torch.ones(65, 4)},
        {},
        "lora_b of decoder.layers.0.self_attention.linear_qkv with the shape",
    ),
    "vector": (
        lambda state: state | {f"{KQV}.linear_out.weight": torch.ones(64)},
        {},
        "with the shape",
    ),
    "no dimension": (
        lambda state: state | {f"{KQV}.linear_out.weight": torch.tensor(1.0)},
        {},
        "no dense matrix",
    ),
    "integers": (
        lambda state: state | {f"{KQV}.linear_out.weight": torch.ones(64, 4, dtype=torch.int32)},
        {},
        "no dense matrix",
    ),
    "strides of 0": (
        lambda state: state | {f"{KQV}.linear_out.weight": torch.ones(1, 1).expand(10**9, 10**3)},
        {},
        "no dense matrix",
    ),
    "nan": (
        lambda state: state | {f"{KQV}.linear_out.weight": torch.full((64, 4), math.nan)},
        {},
        "not finite",
    ),
    "text": (lambda state: state | {f"{KQV}.linear_out.weight": "x"}, {}, "no dense matrix"),
    "adapter_1": (
        lambda state: (
            state
            | {"model.decoder.layers.0.adapter_layer.adapter_1.linear_in.weight": torch.ones(1, 1)}
        ),
        {},
        "a Houlsby adapter that is not supported here",
    ),
    "a norm": (
        lambda state: state | {f"{KQV}.layer_norm.weight": torch.ones(4)},
        {},
        "no tensor of this kind",
    ),
    "expert": (
        lambda state: (
            state
            | {f"{EXPERT}.adapter_layer.lora_hto4h_adapter.linear_in.weight": torch.ones(1, 1)}
        ),
        {},
        "an expert's linear",
    ),
    "ia3": (
        lambda state: (
            state
            | {
                "model.decoder.layers.0.mlp.adapter_layer.mlp_infused_adapter.scalers": torch.ones(
                    48
                )
            }
        ),
        {},
        "no tensor of this kind",
    ),
    "no dict": (lambda _: [1], {}, "not a state dict"),  # type: ignore[dict-item,return-value]
}


def _without(state: State, part: str) -> State:
    return {key: value for key, value in state.items() if part not in key}


@pytest.fixture(scope="module")
def gated_base() -> Checkpoint:
    return lively(GATED)


@pytest.mark.parametrize("name", FAULTS)
def test_broken_and_unsupported_adapters_are_refused(
    tmp_path: Path, gated_base: Checkpoint, name: str
) -> None:
    change, fields, message = FAULTS[name]
    path = write_nemo_linears(tmp_path / "a", lora(GATED), GATED, tuning=LORA)
    weights = path / "model_weights.ckpt"
    torch.save(change(torch.load(weights)), weights)
    record = yaml.safe_load((path / "model_config.yaml").read_text())
    for field, value in fields.items():
        (record["peft"] if field == "peft_scheme" else record["peft"]["lora_tuning"])[field] = value
    (path / "model_config.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(AdapterError) as caught:
        open_adapter(path, base=gated_base)
    assert message in str(caught.value)


def test_missing_ranks_and_the_missing_base_are_refused(tmp_path: Path) -> None:
    path = write_nemo_linears(tmp_path / "a", lora(GATED), GATED, tp=2, tuning=LORA)
    with pytest.raises(AdapterError, match="give the base model with --model"):
        open_adapter(path)
    with pytest.raises(AdapterError, match="give the model that it was trained on"):
        open_adapter(path, base=lively(MODERN))
    with pytest.raises(AdapterError, match=r"give the model that it was trained on|copy the"):
        open_adapter(path, base=lively(CLASSIC))
    (path / "mp_rank_01" / "model_weights.ckpt").unlink()
    with pytest.raises(AdapterError, match="lacks tensor rank 1"):
        open_adapter(path, base=lively(GATED))
