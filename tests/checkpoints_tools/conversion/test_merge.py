"""`preamble convert --merge`: merged weights, their rounding, their digest, and refusals."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import preamble
from checkpoints_tools.conversion.convert import write_native
from checkpoints_tools.conversion.merge import check_merge, merge_adapter
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, save_adapter
from gpt.checkpoint.digest import base_digest, identify
from gpt.checkpoint.logical_tensor import Checkpoint, InMemoryTensor, concat_rows
from gpt.config import GPTConfig
from gpt.dtypes import FLOAT_DTYPES
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.linear_adapters import METHODS, merge_into, random_linears
from tests.support.models import CLASSIC, EXPERTS, MODERN, lively
from tests.support.peft_adapters import adapted_logits, relative_difference

CONFIGS = {
    "classic": CLASSIC,
    "modern": MODERN,
    "experts": EXPERTS.with_fields(activation="silu", proj_bias=False, mlp_bias=False),
}
IDS = torch.arange(3, 39).view(3, 12)

FAST = ("classic", "ia3")

CapturedOutput = pytest.CaptureFixture[str]


def write_source(folder: Path, config: GPTConfig, dtype: str = "float32") -> Checkpoint:
    write_native(lively(config), folder / "source", dtype=FLOAT_DTYPES[dtype])
    return open_checkpoint(folder / "source")


def write_adapter(folder: Path, adapter: Adapter) -> Path:
    save_adapter(adapter, folder / "change.safetensors")
    return folder / "change.safetensors"


def run(*arguments: object) -> int:
    return preamble.main(["convert", *map(str, arguments)])


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "split", "method"),
    [
        pytest.param(*case, method, marks=[pytest.mark.slow] if (case[0], method) != FAST else [])
        for case in (
            ("classic", ("--tp", "2")),
            ("modern", ("--pp", "2")),
            ("experts", ("--tp", "2")),
        )
        for method in METHODS
    ],
)
def test_merged_model_has_the_logits_of_the_adapter(
    tmp_path: Path, capsys: CapturedOutput, name: str, split: tuple[str, str], method: str
) -> None:
    config = CONFIGS[name].with_fields(dtype="float32")
    source = write_source(tmp_path, config)
    linears = random_linears(config, method, by_parts=name == "modern", strength=0.5)
    adapter = build_adapter(Card("change", base_digest=identify(source).digest), None, linears)
    target = tmp_path / "merged"
    file = write_adapter(tmp_path, adapter)

    assert run(source.path, target, "--to", "megatron", *split, "--merge", file) == 0

    output = capsys.readouterr()
    merged = open_checkpoint(target)
    digest = re.search(r"digest (\w+)", output.out)
    assert digest is not None and digest[1] == base_digest(merged) != identify(source).digest
    assert "merged - W equals the change within the rounding of float32" in output.err
    expected = adapted_logits(source, adapter, IDS)
    assert relative_difference(adapted_logits(merged, None, IDS), expected) < 2e-6
    assert relative_difference(adapted_logits(source, None, IDS), expected) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("target_dtype", [None, "float16"])
@pytest.mark.parametrize("method", METHODS)
def test_merged_weights_are_rounded_once(
    tmp_path: Path, method: str, target_dtype: str | None
) -> None:
    config = MODERN.with_fields(dtype="bfloat16")
    source = write_source(tmp_path, config, "bfloat16")
    linears = random_linears(config, method, by_parts=True, strength=0.1)
    adapter = build_adapter(Card("change"), None, linears)
    file = write_adapter(tmp_path, adapter)
    flags = () if target_dtype is None else ("--dtype", target_dtype)

    assert run(source.path, tmp_path / "merged", "--to", "native", *flags, "--merge", file) == 0

    merged = open_checkpoint(tmp_path / "merged")
    dtype = FLOAT_DTYPES[target_dtype or "bfloat16"]
    reference = merge_into(load_model(source, Mesh.single(), dtype=torch.float64), linears)
    assert merged.tensors.keys() == source.tensors.keys()
    for parameter_name, value in reference.state_dict().items():
        if parameter_name in merged.tensors:
            assert torch.equal(merged.read(parameter_name), value.to(dtype)), parameter_name


def test_a_wrong_merged_weight_is_found(tmp_path: Path) -> None:
    config = MODERN.with_fields(dtype="float32")
    source = write_source(tmp_path, config)
    adapter = build_adapter(Card("change"), None, random_linears(config))
    file = write_adapter(tmp_path, adapter)
    merged = merge_adapter(source, adapter, file)
    assert check_merge(source, merged, adapter).checked_rows > 100
    name = "decoder.layers.1.mlp.linear_fc2.weight"
    weight = merged.read(name)
    weight[3, 5] *= 1 + 1e-5
    tensors = {**merged.tensors, name: concat_rows([(InMemoryTensor(weight, name), 0, 32)])}
    with pytest.raises(CheckpointError, match=r"linear_fc2\.weight differs from its base weight"):
        check_merge(source, replace(merged, tensors=tensors), adapter)


def test_adapters_that_weights_cannot_express_are_refused(
    tmp_path: Path, capsys: CapturedOutput
) -> None:
    config = MODERN.with_fields(dtype="float32")
    source = write_source(tmp_path, config)
    linears = random_linears(config)
    adapters = {
        "is an activated LoRA": build_adapter(Card("a", invocation=(3, 4)), None, linears),
        "has bottlenecks": build_adapter(Card("a"), None, random_linears(config, "bottleneck")),
        "has 2 virtual tokens": build_adapter(
            Card("a"), torch.ones(2, config.hidden_size), linears
        ),
        "has 3 virtual tokens": build_adapter(Card("a"), torch.ones(3, config.hidden_size)),
        "was trained on the model with digest": build_adapter(
            Card("a", base_digest="0" * 64), None, linears
        ),
    }
    for message, adapter in adapters.items():
        file = write_adapter(tmp_path, adapter)
        target = tmp_path / "merged"
        assert run(source.path, target, "--to", "native", "--merge", file) == 1
        assert message in capsys.readouterr().err
        assert not target.exists()
