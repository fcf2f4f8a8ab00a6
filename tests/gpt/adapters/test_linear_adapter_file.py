"""Adapter files with adapter weights: round trips, digests, and refusals by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch

from gpt.adapters.adapter_file import (
    Adapter,
    Card,
    build_adapter,
    check_adapter,
    open_adapter,
    save_adapter,
)
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.logical_tensor import ModelIdentity
from gpt.errors import AdapterError
from gpt.linear_adapter import LinearAdapter, last_occurrence
from gpt.linear_parts import split_key
from tests.support.linear_adapters import BOTTLENECKS, METHODS, random_linears
from tests.support.models import CLASSIC, EXPERTS, MODERN

EXPERT = "decoder.layers.0.mlp.experts.local_experts"
CARD = Card(
    "task",
    template=PromptTemplate("{text} =", ()),
    method="alora",
    base_digest="ab" * 32,
    base_fingerprint="cd" * 32,
    invocation=(5, 6),
)
BASE = ModelIdentity("ab" * 32, "cd" * 32)
QKV = "decoder.layers.1.self_attention.linear_qkv"
Changes = dict[str, LinearAdapter]


def make_adapter(method: str = "lora", card: Card = CARD) -> Adapter:
    return build_adapter(card, None, random_linears(MODERN, method, by_parts=True))


@pytest.mark.parametrize("method", [*METHODS, *BOTTLENECKS])
def test_a_file_returns_the_same_adapter(method: str, tmp_path: Path) -> None:
    adapter, path = make_adapter(method), tmp_path / "task.safetensors"
    save_adapter(adapter, path)
    copy = open_adapter(path)
    assert (copy.card, copy.digest) == (adapter.card, adapter.digest)
    assert copy.linears.keys() == adapter.linears.keys()
    for key, linear in adapter.linears.items():
        assert copy.linears[key].scale == linear.scale
        tensors = dict(linear.tensors())
        assert dict(copy.linears[key].tensors()).keys() == tensors.keys()
        for name, tensor in copy.linears[key].tensors():
            assert torch.equal(tensor, tensors[name])
    assert check_adapter(copy, MODERN, BASE) == ()


def test_an_adapter_may_have_virtual_tokens_too(tmp_path: Path) -> None:
    table = torch.arange(64.0).view(2, 32)
    card = replace(CARD, template=None, kind="rows")
    adapter = build_adapter(card, table, random_linears(MODERN))
    save_adapter(adapter, tmp_path / "task.safetensors")
    copy = open_adapter(tmp_path / "task.safetensors")
    assert torch.equal(copy.table, table) and len(copy.linears) == len(adapter.linears)
    assert copy.digest != build_adapter(replace(card, invocation=()), table).digest


def change_scale(linears: Changes) -> Changes:
    return {key: replace(linear, scale=0.5) for key, linear in linears.items()}


def change_value(linears: Changes) -> Changes:
    key = max(linears)
    lora_b = linears[key].lora_b
    assert lora_b is not None
    changed = lora_b.clone()
    changed[-1, -1] += 1
    return linears | {key: replace(linears[key], lora_b=changed)}


@pytest.mark.parametrize("change", [change_scale, change_value])
def test_the_digest_covers_the_changes(change: Callable[[Changes], Changes]) -> None:
    linears = random_linears(MODERN)
    digest = build_adapter(CARD, None, linears).digest
    assert build_adapter(CARD, None, change(linears)).digest != digest
    assert build_adapter(CARD, None, dict(reversed(linears.items()))).digest == digest


def test_the_digest_covers_the_invocation() -> None:
    assert make_adapter().digest != make_adapter(card=replace(CARD, invocation=(6,))).digest


def test_a_release_for_tables_only_refuses_the_file_by_its_version(tmp_path: Path) -> None:
    save_adapter(make_adapter(), tmp_path / "task.safetensors")
    with safetensors.safe_open(tmp_path / "task.safetensors", "pt") as file:
        assert file.metadata()["version"] == "2"


A, B = torch.ones(2, 32), torch.ones(60, 2)
PROJ = "decoder.layers.1.self_attention.linear_proj"
BOTTLENECK = LinearAdapter(bottleneck_down=A, bottleneck_up=A.T)
INVALID_CHANGES: dict[str, tuple[Changes, str]] = {
    "nothing": ({QKV: LinearAdapter()}, "has no tensor for"),
    "half a product": ({QKV: LinearAdapter(A)}, "has only lora_a of"),
    "two ranks": ({QKV: LinearAdapter(A, torch.ones(60, 3))}, r"must be \(rank, inputs\)"),
    "a vector": ({QKV: LinearAdapter(A[0], B)}, r"must be \(rank, inputs\)"),
    "rank 0": ({QKV: LinearAdapter(A[:0], B[:, :0])}, r"must be \(rank, inputs\)"),
    "a large rank": ({QKV: LinearAdapter(A[:1].expand(513, -1), B[:, :1].expand(-1, 513))}, "512"),
    # Strides of 0: a small file can have this shape.
    "a huge rank": (
        {QKV: LinearAdapter(A[:1].expand(10**9, -1), B[:, :1].expand(-1, 10**9))},
        "the largest rank is 512",
    ),
    "a huge width": (
        {QKV: LinearAdapter(A[:, :1].expand(-1, 1 << 40), B)},
        "over the limit",
    ),
    "NaN": ({QKV: LinearAdapter(A * torch.nan, B)}, "that are not finite"),
    "too large for fp32": (
        {QKV: LinearAdapter(torch.full_like(A, 1e300, dtype=torch.float64), B)},
        "that are not finite",
    ),
    "integers": ({QKV: LinearAdapter(A.long(), B.long())}, "must be floating-point"),
    "an infinite scale": ({QKV: LinearAdapter(A, B, scale=float("inf"))}, "it must be finite"),
    "a short magnitude": (
        {QKV: LinearAdapter(A, B, 1.0, torch.ones(59), torch.ones(59))},
        "do not belong together",
    ),
    "a magnitude alone": (
        {QKV: LinearAdapter(magnitude=torch.ones(60), weight_norm=torch.ones(60))},
        "but no lora_a",
    ),
    "a norm of zero": (
        {QKV: LinearAdapter(A, B, 1.0, torch.ones(60), torch.zeros(60))},
        "is not positive",
    ),
    "two input changes": (
        {QKV: LinearAdapter(A, B, input_scale=torch.ones(32))},
        "cannot be combined",
    ),
    "a bottleneck of qkv": ({QKV: BOTTLENECK}, "is behind attention"),
    "half a bottleneck": ({PROJ: LinearAdapter(bottleneck_down=A)}, "it must have down"),
    "a norm without a bias": (
        {PROJ: replace(BOTTLENECK, bottleneck_pre_norm_weight=A[0])},
        "and the weight and the bias of a norm",
    ),
    "two bottleneck sizes": ({PROJ: replace(BOTTLENECK, bottleneck_up=A)}, "it must have down"),
    "a huge bottleneck": (
        {PROJ: replace(BOTTLENECK, bottleneck_down=A[:1].expand(10**9, -1))},
        "the largest size is 512",
    ),
    "a bottleneck and LoRA": (
        {PROJ: replace(BOTTLENECK, lora_a=A, lora_b=A.T)},
        "and no other change of the linear",
    ),
    "a linear and its part": (
        {QKV: LinearAdapter(A, B), f"{QKV}.key": LinearAdapter(A, B[:12])},
        "changes both",
    ),
}


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn],
)
def test_matrices_of_any_dtype_and_layout_are_copied_in_fp32(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(32, 4, generator=generator).to(dtype).T
    b = torch.randn(60, 8, generator=generator).to(dtype)[:, ::2]
    for x in (a, b):
        x.requires_grad_(dtype != torch.float8_e4m3fn)
    copy = build_adapter(CARD, None, {QKV: LinearAdapter(a, b)}).linears[QKV]
    for matrix, source in ((copy.lora_a, a), (copy.lora_b, b)):
        assert matrix is not None and matrix.is_contiguous() and not matrix.requires_grad
        assert torch.equal(matrix, source.detach().float())
        assert matrix.data_ptr() != source.data_ptr()


@pytest.mark.parametrize("case", INVALID_CHANGES)
def test_changes_that_do_not_belong_together_are_refused(case: str) -> None:
    linears, message = INVALID_CHANGES[case]
    with pytest.raises(AdapterError, match=message):
        build_adapter(CARD, None, linears)


UNFIT_CHANGES: dict[str, tuple[Changes, str]] = {
    "an unknown layer": ({QKV.replace(".1.", ".7."): LinearAdapter(A, B)}, "is no linear of this"),
    "an unknown linear": ({"a.b": LinearAdapter(A, B)}, "is no linear of this model"),
    "an expert": (
        {"decoder.layers.0.mlp.experts.local_experts.0.linear_fc1": LinearAdapter(A, B)},
        "is no linear of this model with 5 layers; use it",
    ),
    "an unknown part": (
        {"decoder.layers.1.mlp.linear_fc1.gate": LinearAdapter(A, B)},
        "has no part 'gate'",
    ),
    "another width": ({QKV: LinearAdapter(torch.ones(2, 31), B)}, "the model has 32 inputs"),
    "another height": ({QKV: LinearAdapter(A, torch.ones(61, 2))}, "the model has 96 outputs"),
    "a zero bottleneck": (
        {PROJ: replace(BOTTLENECK, bottleneck_up=torch.zeros(32, 2))},
        "has no effect",
    ),
    "a wide bottleneck": (
        {PROJ: LinearAdapter(bottleneck_down=torch.ones(2, 33), bottleneck_up=torch.ones(33, 2))},
        "for the hidden size 33",
    ),
    "a zero product": ({QKV: LinearAdapter(A, torch.zeros(96, 2))}, "has no effect"),
    "scales of one": ({QKV: LinearAdapter(output_scale=torch.ones(96))}, "has no effect"),
}


@pytest.mark.parametrize("case", UNFIT_CHANGES)
def test_changes_that_do_not_fit_the_model_are_refused(case: str) -> None:
    linears, message = UNFIT_CHANGES[case]
    adapter = build_adapter(replace(CARD, invocation=()), None, linears)
    with pytest.raises(AdapterError, match=message):
        check_adapter(adapter, CLASSIC, BASE)


def test_experts_may_have_adapters() -> None:
    linears = random_linears(EXPERTS, by_parts=True)
    experts = {key for key in linears if "experts" in key}
    assert experts & {f"{EXPERT}.4.linear_fc2", "decoder.layers.2.mlp.shared_experts.linear_fc1"}
    assert check_adapter(build_adapter(CARD, None, linears), EXPERTS, BASE) == ()
    absent = {f"{EXPERT}.5.linear_fc2": LinearAdapter(A, B)}
    with pytest.raises(AdapterError, match="no linear of this model with 4 layers and 5 experts"):
        check_adapter(build_adapter(CARD, None, absent), EXPERTS, BASE)


@pytest.mark.parametrize("scale", ['"x"', "null", "true", "1" + "0" * 400, '"2.0"'])
def test_a_scale_that_is_no_number_is_refused(scale: str, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="scale"):
        open_adapter(save_with_scale(make_adapter(), scale, tmp_path))


def test_a_scale_may_be_written_as_a_whole_number(tmp_path: Path) -> None:
    adapter = make_adapter()
    linears = {key: replace(linear, scale=2.0) for key, linear in adapter.linears.items()}
    adapter = build_adapter(CARD, None, linears)
    opened = open_adapter(save_with_scale(adapter, "2", tmp_path))
    assert opened.digest == adapter.digest and opened.card == adapter.card


def save_with_scale(adapter: Adapter, scale: str, folder: Path) -> Path:
    """Save an adapter with this JSON text as its first scale, and the digest of the adapter."""
    path = folder / "task.safetensors"
    save_adapter(adapter, path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    (field,) = [name for name, text in metadata.items() if '"scales"' in text]
    key = next(iter(adapter.card.scales))
    card = json.loads(metadata[field])
    text = json.dumps(card | {"scales": card["scales"] | {key: "SCALE"}})
    metadata[field] = text.replace('"SCALE"', scale)
    safetensors.torch.save_file(tensors, path, metadata)
    return path


def test_cards_of_many_experts_may_have_more_bytes() -> None:
    scales = {f"{EXPERT}.{number}.linear_fc1.gate": 0.123456789 for number in range(16000)}
    card = replace(CARD, scales=scales)
    assert len(card.to_json()) > 1 << 20
    assert Card.from_json(card.to_json()) == card
    with pytest.raises(AdapterError, match="shorten its texts"):
        replace(card, task="x" * (2 << 20))


def test_another_base_and_an_unknown_invocation_are_refused() -> None:
    with pytest.raises(AdapterError, match="was trained on the model with digest"):
        check_adapter(make_adapter(), MODERN, ModelIdentity("00" * 32, "11" * 32))
    outside = replace(CARD, invocation=(1, MODERN.vocab_size))
    with pytest.raises(AdapterError, match="has the token id 103, outside the vocabulary"):
        check_adapter(make_adapter(card=outside), MODERN, BASE)


def test_an_overflow_in_half_precision_is_refused() -> None:
    linears = {QKV: LinearAdapter(A, torch.full((96, 2), 1e6))}
    adapter = build_adapter(replace(CARD, invocation=()), None, linears)
    with pytest.raises(AdapterError, match="overflow in float16"):
        check_adapter(adapter, CLASSIC.with_fields(dtype="float16"), BASE)


def test_a_key_is_split_into_linear_and_part() -> None:
    assert split_key(f"{QKV}.key") == (QKV, "key")
    assert split_key(QKV) == (QKV, "")
    assert split_key("decoder.layers.0.mlp.linear_fc2.gate") == (
        "decoder.layers.0.mlp.linear_fc2.gate",
        "",
    )


@pytest.mark.parametrize(
    ("tokens", "position"),
    [([1, 2, 3], 0), ([1, 2, 1, 2, 2], 2), ([1, 1, 2], 1), ([2, 1], None), ([], None)],
)
def test_the_last_occurrence_of_an_invocation(tokens: list[int], position: int | None) -> None:
    assert last_occurrence(tokens, (1, 2)) == position
