"""Houlsby adapters of NeMo 1: any split is joined, and broken or unsupported ones are refused."""

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
from gpt.adapters.export_nemo_linears import convert_linears_to_nemo
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter
from tests.support.adapter_exchange import run_adapters_command
from tests.support.linear_adapters import BOTTLENECKS, GATED, random_linears
from tests.support.models import EXPERTS, MODERN, lively
from tests.support.nemo_linears import write_nemo_distributed, write_nemo_linears

SIZE = 8
TUNING = {"adapter_dim": SIZE, "adapter_dropout": 0.1, "type": "parallel_adapter"}
POSITIONS = dict(zip(BOTTLENECKS, ("pre", "post", None), strict=True))


def bottlenecks(method: str = "bottleneck") -> dict[str, LinearAdapter]:
    return random_linears(GATED, method, rank=SIZE)


def tuning_of(method: str) -> dict[str, Any]:
    return TUNING | {"norm_position": POSITIONS[method]}


def digest(adapter: Adapter, linears: Mapping[str, LinearAdapter]) -> str:
    return build_adapter(adapter.card, None, linears).digest


@pytest.mark.parametrize("split", [(1, 1, 1), (2, 2, 2), (4, 1, 1), (4, 2, 1), (8, 1, 1)])
@pytest.mark.parametrize("method", BOTTLENECKS)
def test_adapters_of_any_split_are_joined(
    tmp_path: Path, method: str, split: tuple[int, int, int]
) -> None:
    linears = bottlenecks(method)
    tp, pp, vpp = split
    path = write_nemo_linears(
        tmp_path / "a.nemo",
        linears,
        GATED,
        tp=tp,
        pp=pp,
        vpp=vpp,
        scheme="adapter",
        tuning=tuning_of(method),
    )
    adapter = open_adapter(path, base=lively(GATED))
    check_adapter(adapter, GATED, None)
    assert (adapter.card.name, adapter.method, len(adapter.linears)) == ("a", "bottleneck", 8)
    assert adapter.digest == digest(adapter, linears)


@pytest.mark.parametrize(("tp", "stacked"), [(1, True), (2, True), (4, False)])
def test_adapters_in_a_distributed_checkpoint_are_read(
    tmp_path: Path, tp: int, stacked: bool
) -> None:
    linears = bottlenecks()
    path = write_nemo_distributed(
        tmp_path / "a.nemo",
        linears,
        GATED,
        tp=tp,
        stacked=stacked,
        scheme="adapter",
        tuning=TUNING,
    )
    adapter = open_adapter(path, base=lively(GATED))
    assert adapter.digest == digest(adapter, linears)


@pytest.mark.parametrize("prefix", ["model.language_model.encoder.", "model.module.decoder."])
def test_old_key_prefixes_are_read(tmp_path: Path, prefix: str) -> None:
    linears = bottlenecks()
    path = write_nemo_linears(
        tmp_path / "a", linears, GATED, tp=2, scheme="adapter", tuning=TUNING, prefix=prefix
    )
    adapter = open_adapter(path, base=lively(GATED))
    assert adapter.digest == digest(adapter, linears)


def test_layers_without_an_effect_are_left_out(tmp_path: Path) -> None:
    """NeMo has both adapters in each selected layer; they start with linear_out of zeros."""
    linears = {key: change for key, change in bottlenecks().items() if ".layers.2." in key}
    trained = next(iter(linears))
    zeros = {
        key: replace(change, bottleneck_up=torch.zeros(GATED.hidden_size, SIZE))
        for key, change in linears.items()
        if key != trained
    }
    path = write_nemo_linears(
        tmp_path / "a.nemo",
        linears | zeros,
        GATED,
        scheme="adapter",
        tuning=TUNING | {"layer_selection": [3]},
    )
    adapter = open_adapter(path, base=lively(GATED))
    assert list(adapter.linears) == [trained]


def export(folder: Path, capsys: pytest.CaptureFixture[str], adapter: Adapter, tp: int) -> str:
    """Export an adapter; return the error text, which is empty if the command succeeds."""
    if not (folder / "base").exists():
        write_native(lively(GATED), folder / "base")
    save_adapter(adapter, folder / "a.safetensors")
    flags = ("--to", "nemo", "--model", folder / "base", "--tp", str(tp))
    code, _, err = run_adapters_command(
        capsys, "export", folder / "a.safetensors", folder / "a.nemo", *flags
    )
    return err if code else ""


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("method", BOTTLENECKS)
def test_exports_are_read_again_bit_for_bit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, tp: int
) -> None:
    """One of two layers has an adapter behind the MLP only."""
    linears = {
        key: change
        for key, change in bottlenecks(method).items()
        if ".layers.1.mlp" in key or ".layers.3." in key
    }
    adapter = build_adapter(Card("a"), None, linears)
    assert not export(tmp_path, capsys, adapter, tp)
    copy = open_adapter(tmp_path / "a.nemo", base=lively(GATED))
    assert len(copy.linears) == 3 and copy.digest == digest(copy, linears)


def test_exported_sizes_are_multiples_of_the_tensor_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linears = random_linears(GATED, "bottleneck", rank=3)
    assert not export(tmp_path, capsys, build_adapter(Card("a"), None, linears), 2)
    copy = open_adapter(tmp_path / "a.nemo", base=lively(GATED))
    for key, change in linears.items():
        bottleneck, padded = change.bottleneck, copy.linears[key].bottleneck
        assert bottleneck is not None and padded is not None
        assert padded.down.shape == (4, 32) and not padded.down[3:].any()
        assert torch.equal(padded.down[:3], bottleneck.down)
        assert torch.equal(padded.up[:, :3], bottleneck.up)


def test_exports_that_nemo_cannot_express_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    linears, lora = bottlenecks(), random_linears(GATED, targets=("linear_qkv",))
    first = next(iter(linears))
    refused = {
        "has bottlenecks and other changes": build_adapter(Card("a"), None, linears | lora),
        "norms at different positions": build_adapter(
            Card("a"), None, linears | {first: bottlenecks("bottleneck-post")[first]}
        ),
        "an invocation": build_adapter(Card("a", invocation=(1,)), None, linears),
    }
    for message, adapter in refused.items():
        assert message in export(tmp_path, capsys, adapter, 1)
    experts = EXPERTS.with_fields(num_layers=4)
    attention = build_adapter(Card("a"), None, random_linears(experts, "bottleneck"))
    with pytest.raises(AdapterError, match="one behind the experts too"):
        convert_linears_to_nemo(attention, lively(experts), {}, None, 1)


State = dict[str, Any]
FIRST = "model.decoder.layers.0.adapter_layer.adapter_1"
FAULTS: dict[str, tuple[Callable[[State], State], Mapping[str, Any], str]] = {
    "tying": (dict, {"weight_tying": True}, "weight_tying True"),
    "positions": (dict, {"position_embedding_strategy": "add"}, "position_embedding_strategy"),
    "size": (dict, {"adapter_dim": 4}, "has adapter_dim 4 and norm_position 'pre', but"),
    "no norm": (dict, {"norm_position": None}, "norm_position None, but"),
    "unknown position": (dict, {"norm_position": "middle"}, "norm_position 'middle'"),
    "unknown norm": (dict, {"norm_type": "rmsnorm"}, "norm_type 'rmsnorm'"),
    "lost norm": (
        lambda state: {key: value for key, value in state.items() if "layer_norm" not in key},
        {},
        "norm_position 'pre', but",
    ),
    "a layer less": (
        lambda state: {key: value for key, value in state.items() if "layers.3" not in key},
        {},
        "in 3 layers, but its config selects 4",
    ),
    "tied embeddings": (
        lambda state: state | {f"{FIRST}.position_embeddings.weight": torch.ones(4, 32)},
        {},
        "without weight tying",
    ),
    "linear_adapter": (
        lambda state: state | {f"{FIRST}.module.1.weight": torch.ones(8, 32)},
        {},
        "train it as a parallel_adapter",
    ),
    "another width": (
        lambda state: state | {f"{FIRST}.linear_in.weight": torch.ones(8, 33)},
        {},
        "it must have down",
    ),
    "nan": (
        lambda state: state | {f"{FIRST}.layer_norm.bias": torch.full((32,), torch.nan)},
        {},
        "not finite",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_broken_and_unsupported_adapters_are_refused(tmp_path: Path, name: str) -> None:
    change, fields, message = FAULTS[name]
    path = write_nemo_linears(tmp_path / "a", bottlenecks(), GATED, scheme="adapter", tuning=TUNING)
    weights = path / "model_weights.ckpt"
    torch.save(change(torch.load(weights)), weights)
    record = yaml.safe_load((path / "model_config.yaml").read_text())
    record["peft"]["adapter_tuning"] |= fields
    (path / "model_config.yaml").write_text(yaml.safe_dump(record))
    with pytest.raises(AdapterError) as caught:
        open_adapter(path, base=lively(GATED))
    assert message in str(caught.value)


def test_norms_that_differ_between_ranks_are_refused(tmp_path: Path) -> None:
    path = write_nemo_linears(
        tmp_path / "a", bottlenecks(), GATED, tp=2, scheme="adapter", tuning=TUNING
    )
    weights = path / "mp_rank_01" / "model_weights.ckpt"
    state = torch.load(weights)
    state[f"{FIRST}.layer_norm.weight"] += 1
    torch.save(state, weights)
    with pytest.raises(AdapterError, match="differ between tensor ranks"):
        open_adapter(path, base=lively(GATED))


def test_other_models_are_refused(tmp_path: Path) -> None:
    path = write_nemo_linears(tmp_path / "a", bottlenecks(), GATED, scheme="adapter", tuning=TUNING)
    with pytest.raises(AdapterError, match="give the model that it was trained on"):
        open_adapter(path, base=lively(MODERN))
    with pytest.raises(AdapterError, match="behind the experts of layer"):
        open_adapter(path, base=lively(EXPERTS.with_fields(num_layers=4)))
    adapter = open_adapter(path, base=lively(GATED))
    with pytest.raises(AdapterError, match="a norm behind"):
        check_adapter(adapter, GATED.with_fields(norm_placement="post"), None)
