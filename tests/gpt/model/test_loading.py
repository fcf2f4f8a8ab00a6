"""Each rank reads only its own shards, directly into the model's memory."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import gpt
from checkpoints_tools.conversion.convert import write_native
from gpt.checkpoint.logical_tensor import checkpoint_from_tensors
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load, load_model, parse_device
from gpt.parallel.mesh import Mesh
from gpt.parallel.pipeline_stages import stage_layers
from gpt.parallel.weight_sharding import parameter_specs, shard_spec
from tests.support.checkpoints.hf_models import edit_json, model_of
from tests.support.models import CLASSIC, CONFIGS, MODERN, lively

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_every_rank_loads_its_shards_of_the_parameters_of_its_stage(
    name: str, tp: int, pp: int
) -> None:
    source = lively(CONFIGS[name])
    table, stages = parameter_specs(source.config), stage_layers(source.config.num_layers, pp)
    for rank in range(tp * pp):
        mesh = Mesh(CPU, tp=tp, pp=pp, rank=rank)
        model = load_model(source, mesh)
        assert model.layers == stages[mesh.pp_rank][0]
        for key, parameter in model.named_parameters():
            spec = shard_spec(table[key], source.config, mesh.tp_rank, tp)
            full = source.read(key)
            pieces = [full.narrow(spec.dim, start, end - start) for start, end in spec.ranges]
            shard = torch.cat(pieces, dim=spec.dim)
            size = shard.shape[spec.dim]
            assert torch.equal(parameter.narrow(spec.dim, 0, size), shard)
            padding = parameter.narrow(spec.dim, size, spec.size - size)
            assert not padding.any()


def test_a_model_is_loaded_in_its_own_dtype_or_in_the_requested_dtype(tmp_path: Path) -> None:
    write_native(lively(MODERN.with_fields(dtype="bfloat16")), tmp_path / "m")
    assert {parameter.dtype for parameter in gpt.load(tmp_path / "m").parameters()} == {
        torch.bfloat16
    }
    fp64_model = load(tmp_path / "m", dtype="float64", config={"rotary_base": 500.0})
    assert {parameter.dtype for parameter in fp64_model.parameters()} == {torch.float64}
    assert fp64_model.config.rotary_base == 500.0
    assert not any(parameter.requires_grad for parameter in fp64_model.parameters())
    with pytest.raises(ConfigError, match="dtype is 'int4'; choose one of: float64"):
        load(tmp_path / "m", dtype="int4")
    with pytest.raises(ConfigError, match=r"dtype is 'torch\.int8'; choose one of: float64"):
        load(tmp_path / "m", dtype=torch.int8)


def test_an_unavailable_device_is_refused_before_reading() -> None:
    for device, message in (
        ("meta", "device is 'meta'; choose one of: cpu, cuda, cuda:N"),
        ("gpu", "device 'gpu' is unavailable"),
        ("cuda:99", "device 'cuda:99' is unavailable"),
    ):
        with pytest.raises(ConfigError, match=message):
            load("nowhere", device)
    assert parse_device("cpu") == parse_device(CPU) == CPU


def test_tensor_parallel_sizes_that_do_not_divide_the_heads_are_refused(tmp_path: Path) -> None:
    write_native(lively(MODERN), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"tensor parallel 3 does not divide .* --tp can be 1, 2"):
        load_model(open_checkpoint(tmp_path / "m"), Mesh(CPU, tp=3))


def test_a_contradictory_checkpoint_is_refused_before_allocating(tmp_path: Path) -> None:
    # The model of this config is far larger than the memory of the machine.
    model_of("llama, multi-head").save_pretrained(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "large")
    edit_json(
        tmp_path / "large" / "config.json", lambda config: config.update(intermediate_size=1 << 30)
    )
    with pytest.raises(CheckpointError, match="the weights disagree"):
        load(tmp_path / "large")


@pytest.mark.parametrize("element", [float("nan"), float("inf")])
def test_non_finite_weights_are_refused_by_tensor_name(element: float) -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    tensors = {key: lively(CLASSIC).read(key) for key in parameter_specs(CLASSIC)}
    tensors[name][3, 5] = element
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        load_model(checkpoint_from_tensors(CLASSIC, tensors), Mesh.single())


def test_a_loaded_model_does_not_need_its_files(tmp_path: Path) -> None:
    write_native(lively(MODERN), tmp_path / "m")
    model = load(tmp_path / "m")
    ids = torch.arange(12).view(1, 12)
    before = model.logits(ids)
    shutil.rmtree(tmp_path / "m")
    assert torch.equal(model.logits(ids), before)


LOADER_OF_RANK = """
import sys, time, torch
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.process_memory import PeakMemory, anonymous_bytes
torch.set_num_threads(1)
idle = anonymous_bytes()
with PeakMemory() as peak:
    mesh = Mesh(torch.device("cpu"), tp=2, rank=int(sys.argv[2]))
    start = time.monotonic()
    model = load_model(open_checkpoint(sys.argv[1]), mesh)
shard_bytes = sum(parameter.nbytes for parameter in model.parameters())
print(peak.bytes - idle, shard_bytes, int(1000 * (time.monotonic() - start)))
"""

LARGE_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 18,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
}


def write_large_checkpoint(folder: Path) -> int:
    """Write a Llama of 2 GB with a file for each layer; return the bytes written."""
    h, f = 2048, 5632
    shapes = {"q": (h, h), "k": (h // 4, h), "v": (h // 4, h), "o": (h, h)}
    layer = {f"self_attn.{key}_proj": shape for key, shape in shapes.items()}
    layer |= {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
    norms = ("input_layernorm", "post_attention_layernorm")
    tops = {"model.embed_tokens.weight": (50257, h), "lm_head.weight": (50257, h)}
    shards: list[dict[str, tuple[int, ...]]] = [{**tops, "model.norm.weight": (h,)}]
    for n in range(18):
        names = {**layer, **dict.fromkeys(norms, (h,))}
        shards.append({f"model.layers.{n}.{name}.weight": names[name] for name in names})
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {key: torch.full(shape, 0.5).bfloat16() for key, shape in shard.items()}, folder / file
        )
        weight_map |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(LARGE_CONFIG))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_the_peak_memory_of_a_rank_is_the_size_of_its_shards(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 6 << 30:
        pytest.skip("needs 6 GB of disk")
    large = tmp_path / "large"
    large.mkdir()
    try:
        assert write_large_checkpoint(large) > 1.9e9
        command = [sys.executable, "-c", LOADER_OF_RANK, str(large)]
        root = Path(__file__).resolve().parents[3]
        processes = [
            subprocess.Popen([*command, str(rank)], cwd=root, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for process in processes:
            output, _ = process.communicate(timeout=300)
            peak, shard_bytes, ms = map(int, output.split())
            print(f"{peak / 1e6:.0f} MB above idle for {shard_bytes / 1e6:.0f} MB, in {ms} ms")
            assert shard_bytes > 0.9e9
            assert peak <= shard_bytes + 300e6
    finally:
        shutil.rmtree(large)
