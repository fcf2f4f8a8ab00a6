"""LoRA and DoRA of Megatron-Bridge and NeMo 2: every form is joined, others are refused."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import (
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.distributed_tensors import layer_tensors
from gpt.adapters.export_bridge import convert_linears_to_bridge
from gpt.adapters.fused_linears import product_rows, with_weight_norms
from gpt.checkpoint.files.file_tree import Span, scan_folder
from gpt.checkpoint.files.torch_dcp import Chunk, ChunkedTensor, read_index
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter
from gpt.linear_parts import split_key
from tests.support.adapter_exchange import run_adapters_command
from tests.support.bridge_adapters import (
    BRIDGE_0_3,
    BRIDGE_0_6,
    NEMO_2_1,
    Halves,
    bridge_tensors,
    write_bridge_adapter,
)
from tests.support.linear_adapters import GATED, random_linears
from tests.support.models import lively

CONFIG = GATED.with_fields(num_layers=2, moe_layers=())
CANONICAL = {"_target_": "megatron.bridge.peft.canonical_lora.CanonicalLoRA"}
DORA = {"_target_": "megatron.bridge.peft.dora.DoRA"}


def changes(
    method: str = "lora", *, canonical: bool = False, rank: int = 4
) -> dict[str, LinearAdapter]:
    linears = random_linears(CONFIG, method, rank=rank, by_parts=canonical)
    for key, change in linears.items():
        assert change.lora_a is not None and change.lora_b is not None
        # With parts, the first of them has a larger rank.
        a, b = change.lora_a[:rank], change.lora_b[:, :rank]
        linears[key] = replace(change, lora_a=a, lora_b=b, scale=2.0)
    return linears


@pytest.fixture(scope="module")
def base() -> Checkpoint:
    return lively(CONFIG)


@pytest.mark.parametrize(
    ("tp", "stacked", "canonical", "nemo2", "halves"),
    [
        (1, True, False, False, BRIDGE_0_3),
        (2, True, False, True, BRIDGE_0_3),
        (2, False, False, True, NEMO_2_1),
        (4, False, False, False, BRIDGE_0_6),
        (1, False, True, False, BRIDGE_0_6),
        (2, True, True, False, BRIDGE_0_3),
        (4, False, True, False, BRIDGE_0_3),
    ],
)
def test_lora_of_any_form_is_joined(
    tmp_path: Path,
    base: Checkpoint,
    *,
    tp: int,
    stacked: bool,
    canonical: bool,
    nemo2: bool,
    halves: Halves,
) -> None:
    prefix = "module." if tp == 4 else ""
    linears = changes(canonical=canonical)
    tensors = bridge_tensors(linears, stacked=stacked, prefix=prefix)
    peft = CANONICAL if canonical else None
    root = write_bridge_adapter(
        tmp_path / "run", tensors, CONFIG, tp=tp, peft=peft, nemo2=nemo2, halves=halves
    )
    adapter = open_adapter(root, base=base)
    check_adapter(adapter, CONFIG, None)
    assert (adapter.card.name, adapter.card.method) == ("run", "lora")
    assert adapter.digest == build_adapter(adapter.card, None, linears).digest


@pytest.mark.parametrize(
    ("leaf", "count", "message"),
    [
        ("linear_in.weight", 4, "not of one number of tensor ranks"),
        ("linear_out.weight", 8, "do not belong to 2 tensor ranks"),
    ],
)
def test_chunks_of_other_tensor_ranks_are_refused(
    tmp_path: Path, base: Checkpoint, leaf: str, count: int, message: str
) -> None:
    cuts = {f"decoder.layers.mlp.linear_fc1.adapter.{leaf}": count}
    tensors = bridge_tensors(changes(), stacked=True)
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG, tp=2, cuts=cuts)
    with pytest.raises(AdapterError, match=message):
        open_adapter(root, base=base)


@pytest.mark.parametrize("halves", [BRIDGE_0_3, BRIDGE_0_6, NEMO_2_1])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_rows_of_an_mlp_without_gates_have_the_order_of_the_model(
    tmp_path: Path, tp: int, halves: Halves
) -> None:
    """Megatron-Bridge 0.3 saves halves of a tensor rank's rows as if they were gates and ups."""
    plain = CONFIG.with_fields(gated=False)
    linears = {
        key: replace(change, scale=2.0)
        for key, change in random_linears(plain, "lora", rank=4).items()
    }
    tensors = bridge_tensors(linears, stacked=True)
    root = write_bridge_adapter(tmp_path / "run", tensors, plain, tp=tp, halves=halves)
    adapter = open_adapter(root, base=lively(plain))
    assert adapter.digest == build_adapter(adapter.card, None, linears).digest


def test_gates_of_a_model_without_gates_are_refused(tmp_path: Path) -> None:
    """CanonicalLoRA's default targets; Megatron-Bridge changes the halves of linear_fc1."""
    tensors = bridge_tensors(changes(canonical=True), stacked=True)
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG, peft=CANONICAL)
    plain = CONFIG.with_fields(gated=False, ffn_hidden_size=2 * CONFIG.ffn_hidden_size)
    with pytest.raises(AdapterError, match="this model has no gated MLPs"):
        open_adapter(root, base=lively(plain))


CONTAINER = {"_target_": "megatron.bridge.training.config.ConfigContainer"}
CANONICAL_RUNS: dict[str, tuple[int, bool, Mapping[str, Any], bool]] = {
    "NeMo 2": (1, True, {}, True),
    "NeMo 2, TP 2": (2, True, {}, True),
    "NeMo 2, one KV head on a rank": (4, True, {}, False),
    "Megatron-Bridge 0.2": (2, False, CONTAINER, True),
    "Megatron-Bridge 0.3": (
        2,
        False,
        {**CONTAINER, "optimizer_config_override_provider": None},
        False,
    ),
}


@pytest.mark.parametrize("case", CANONICAL_RUNS)
def test_changes_of_queries_act_on_the_rows_that_were_trained(
    tmp_path: Path, base: Checkpoint, case: str
) -> None:
    """NeMo 2 and old versions of Megatron-Bridge add them to the first rows of a tensor rank."""
    tp, nemo2, run, has_blocks = CANONICAL_RUNS[case]
    linears = changes(canonical=True)
    value = "self_attention.linear_qkv.value"
    for layer in range(CONFIG.num_layers):
        key = f"decoder.layers.{layer}.{value}"
        other = linears[key.replace("value", "key")]
        assert other.lora_b is not None
        linears[key] = replace(other, lora_b=other.lora_b.flip(0))
    tensors = bridge_tensors(linears, stacked=True)
    root = write_bridge_adapter(
        tmp_path / "run", tensors, CONFIG, tp=tp, peft=CANONICAL, nemo2=nemo2, run=run
    )
    adapter = open_adapter(root, base=base)
    if not has_blocks:
        assert adapter.digest == build_adapter(adapter.card, None, linears).digest
        assert not any("rows of other heads" in note for note in adapter.card.notes)
        return
    assert any("rows of other heads" in note for note in adapter.card.notes)
    for layer in range(CONFIG.num_layers):
        name = f"decoder.layers.{layer}.self_attention.linear_qkv"
        products = [product_rows(linears[f"{name}.{part}"]) for part in ("query", "key", "value")]
        ranks = [[rows.chunk(tp)[rank] for rows in products] for rank in range(tp)]
        expected = torch.cat([rows for blocks in ranks for rows in blocks])
        torch.testing.assert_close(product_rows(adapter.linears[name]), expected)


def test_a_part_of_a_kv_head_on_each_rank_is_refused(tmp_path: Path, base: Checkpoint) -> None:
    """Megatron-Bridge then adds changes of one token to other tokens."""
    tensors = bridge_tensors(changes(canonical=True, rank=8), stacked=True)
    peft = {**CANONICAL, "dim": 8}
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG, tp=8, peft=peft)
    with pytest.raises(AdapterError, match="8 tensor ranks trained on a model with 4 KV heads"):
        open_adapter(root, base=base)


def test_dora_of_one_tensor_rank_gets_the_norms_of_the_base(
    tmp_path: Path, base: Checkpoint
) -> None:
    linears = with_weight_norms(changes("dora"), base)
    tensors = bridge_tensors(linears, stacked=True)
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG, peft=DORA)
    adapter = open_adapter(root, base=base)
    assert adapter.card.method == "dora"
    assert adapter.digest == build_adapter(adapter.card, None, linears).digest
    biased = lively(CONFIG.with_fields(qkv_bias=True))
    with pytest.raises(AdapterError, match="multiplies by the magnitudes too"):
        open_adapter(root, base=biased)
    sharded = write_bridge_adapter(tmp_path / "tp2", tensors, CONFIG, tp=2, peft=DORA)
    with pytest.raises(AdapterError, match="DoRA with tensor_model_parallel_size 2"):
        open_adapter(sharded, base=base)


def test_dora_without_a_product_in_some_layers_is_imported(
    tmp_path: Path, base: Checkpoint
) -> None:
    linears = with_weight_norms(changes("dora"), base)
    (first, second, *_) = [key for key in linears if "linear_proj" in key]
    lora_b = linears[first].lora_b
    assert lora_b is not None
    zeros = torch.zeros_like(lora_b)
    linears[first] = replace(linears[first], lora_b=zeros, magnitude=linears[first].weight_norm)
    linears[second] = replace(linears[second], lora_b=zeros)  # Its magnitude has an effect.
    linears = with_weight_norms(linears, base)
    linears[first] = replace(linears[first], magnitude=linears[first].weight_norm)
    tensors = bridge_tensors(linears, stacked=True)
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG, peft=DORA)
    adapter = open_adapter(root, base=base)
    assert set(linears) - set(adapter.linears) == {first}


def test_chunks_that_do_not_cover_their_tensor_are_refused() -> None:
    """Their sizes alone would add up to the tensor's."""

    def entry(*offsets: tuple[int, int]) -> ChunkedTensor:
        span = Span(cast(Any, None), 0, 32, Path("data"))  # The tensor is given.
        chunks = [
            Chunk("key", offset, (2, 4), torch.float32, span, torch.ones(2, 4))
            for offset in offsets
        ]
        return ChunkedTensor("key", (4, 4), torch.float32, tuple(chunks))

    assert [number for number, _ in layer_tensors(entry((0, 0), (2, 0)), "7", 2, 8)] == [7]
    for offsets in [((0, 0), (0, 0)), ((0, 0), (1, 0)), ((0, 0), (3, 0)), ((2, 0), (4, 0))]:
        with pytest.raises(AdapterError, match="do not cover it exactly"):
            list(layer_tensors(entry(*offsets), "7", 2, 8))


Tensors = dict[str, Tensor]
QKV = "decoder.layers.self_attention.linear_qkv.adapter"
FAULTS: dict[str, tuple[Callable[[Tensors], Tensors], Mapping[str, Any], str]] = {
    "another method": (dict, {"_target_": "x.VLMLoRA"}, "the adapter 'VLMLoRA'"),
    "dim": (dict, {"dim": 8}, "with the shape (4, 32); this model and dim 8"),
    "huge dim": (dict, {"dim": 10**9}, "dim must be from 1 to 512"),
    "nan": (dict, {"alpha": math.nan}, "alpha a number"),
    "text": (dict, {"alpha": "32"}, "alpha a number"),
    "huge alpha": (dict, {"alpha": 10**400}, "alpha a number below 1e+09"),
    "dora without magnitudes": (dict, DORA, "but a dora adapter has"),
    "no B": (
        lambda tensors: {key: t for key, t in tensors.items() if "qkv.adapter.linear_o" not in key},
        {},
        "has lora_a of decoder.layers.0.self_attention.linear_qkv, but",
    ),
    "expert": (
        lambda tensors: (
            tensors
            | {
                "decoder.layers.mlp.experts.linear_fc1.adapter.linear_in.weight": torch.ones(
                    2, 4, 32
                )
            }
        ),
        {},
        "a change of an expert's linear",
    ),
    "head": (
        lambda tensors: tensors | {"output_layer.adapter.linear_in.weight": torch.ones(4, 32)},
        {},
        "a change of no supported linear",
    ),
    "layers": (
        lambda tensors: tensors | {f"{QKV}.linear_in.weight": torch.ones(3, 4, 32)},
        {},
        "this model has 2 layers",
    ),
    "layer 7": (
        lambda tensors: (
            tensors
            | {"decoder.layers.7.mlp.linear_fc1.adapter.linear_in.weight": torch.ones(4, 32)}
        ),
        {},
        "which this model does not have",
    ),
    "shape": (
        lambda tensors: tensors | {f"{QKV}.linear_out.weight": torch.ones(2, 60, 4)},
        {},
        "with the shape (60, 4)",
    ),
    "values": (
        lambda tensors: tensors | {f"{QKV}.linear_out.weight": torch.full((2, 64, 4), math.inf)},
        {},
        "not finite",
    ),
    "dtype": (
        lambda tensors: tensors | {f"{QKV}.linear_out.weight": torch.ones(2, 64, 4).long()},
        {},
        "torch.int64",
    ),
    "no adapter": (lambda _: {"decoder.layers.x.weight": torch.ones(2)}, {}, "without tensors of"),
    "twice": (
        lambda tensors: (
            tensors
            | {
                "decoder.layers.0.self_attention.linear_qkv.adapter.linear_in.weight": torch.ones(
                    4, 32
                )
            }
        ),
        {},
        "twice",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_broken_and_unsupported_adapters_are_refused(
    tmp_path: Path, base: Checkpoint, name: str
) -> None:
    change, peft, message = FAULTS[name]
    tensors = change(bridge_tensors(changes(), stacked=True))
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG, peft=peft)
    with pytest.raises(AdapterError) as caught:
        open_adapter(root, base=base)
    assert message in str(caught.value)


def test_an_unknown_alpha_and_the_missing_base_are_refused(
    tmp_path: Path, base: Checkpoint
) -> None:
    tensors = bridge_tensors(changes(), stacked=True)
    root = write_bridge_adapter(tmp_path / "run", tensors, CONFIG)
    with pytest.raises(AdapterError, match="give the base model with --model"):
        open_adapter(root)
    (root / "iter_0000007" / "run_config.yaml").unlink()
    with pytest.raises(AdapterError, match="so the adapter's alpha is unknown"):
        open_adapter(root, base=base)
    assert {split_key(key)[1] for key in changes()} == {""}


@pytest.mark.parametrize("case", ["lora", "canonical", "parts missing", "layer 1"])
def test_exports_are_read_again_bit_for_bit(
    tmp_path: Path, base: Checkpoint, case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    linears = changes(canonical=case in ("canonical", "parts missing"))
    if case == "parts missing":
        linears = {key: change for key, change in linears.items() if not key.endswith("key")}
    if case == "layer 1":
        linears = {key: change for key, change in linears.items() if ".layers.1." in key}
    write_native(base, tmp_path / "base")
    save_adapter(build_adapter(Card("a"), None, linears), tmp_path / "a.safetensors")
    flags = ("--to", "bridge", "--model", tmp_path / "base")
    code, _, err = run_adapters_command(
        capsys, "export", tmp_path / "a.safetensors", tmp_path / "a", *flags
    )
    assert code == 0, err
    is_canonical = case in ("canonical", "parts missing")
    assert ("must load the directory with tensor_model_parallel_size 1" in err) == is_canonical
    adapter = open_adapter(tmp_path / "a", base=base)
    check_adapter(adapter, CONFIG, None)
    assert adapter.digest == build_adapter(adapter.card, None, linears).digest
    # Megatron-Core loads neither other keys nor a checkpoint without these.
    index = read_index(scan_folder(tmp_path / "a"), lambda _key: True)
    modules = {key.removesuffix(".weight") for key in index.tensors}
    assert all(entry.shape[0] == CONFIG.num_layers for entry in index.tensors.values())
    states = {f"{module}._extra_state/shard_{layer}_2" for module in modules for layer in range(2)}
    keys = FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert set(keys) == {*index.tensors, *states}


def test_exports_that_bridge_cannot_express_are_refused(base: Checkpoint) -> None:
    refused = {
        "magnitudes": build_adapter(Card("a"), None, changes("dora")),
        "bottlenecks": build_adapter(Card("a"), None, random_linears(CONFIG, "bottleneck")),
        "virtual tokens": build_adapter(Card("a"), torch.ones(2, 32), changes()),
        "IA3": build_adapter(Card("a"), None, random_linears(CONFIG, "ia3")),
        "an invocation": build_adapter(Card("a", invocation=(3,)), None, changes()),
    }
    for message, adapter in refused.items():
        with pytest.raises(AdapterError, match=message):
            convert_linears_to_bridge(adapter, base)
    with pytest.raises(AdapterError, match="give the base model with --model"):
        convert_linears_to_bridge(build_adapter(Card("a"), None, changes()), None)
    with pytest.raises(AdapterError, match="changes no linear"):
        convert_linears_to_bridge(build_adapter(Card("a"), torch.ones(2, 32)), base)
