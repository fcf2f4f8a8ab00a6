"""Each rank reads its own part of the model into place, and nothing else."""

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
from gpt.checkpoint.logical_tensor import in_memory
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import device_of, load, load_model
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import parameters, part, stage_layers
from tests.support.checkpoints.hf_models import edit_json, model_of
from tests.support.models import CLASSIC, CONFIGS, MODERN, lively

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_every_rank_holds_its_part_of_every_parameter_of_its_stage(
    name: str, tp: int, pp: int
) -> None:
    source = lively(CONFIGS[name])
    table, stages = parameters(source.config), stage_layers(source.config.num_layers, pp)
    for rank in range(tp * pp):
        mesh = Mesh(CPU, tp=tp, pp=pp, rank=rank)
        model = load_model(source, mesh)
        assert model.layers == stages[mesh.pp_rank][0]
        for key, value in model.named_parameters():
            held, full = part(table[key], source.config, mesh.tp_rank, tp), source.read(key)
            rows = [full.narrow(held.dim, a, b - a) for a, b in held.ranges]
            cut = torch.cat(rows, dim=held.dim)
            filled = cut.shape[held.dim]
            assert torch.equal(value.narrow(held.dim, 0, filled), cut)
            assert not value.narrow(held.dim, filled, held.size - filled).any()


def test_a_model_is_loaded_as_stored_or_as_asked(tmp_path: Path) -> None:
    write_native(lively(MODERN.with_fields(dtype="bfloat16")), tmp_path / "m")
    assert {value.dtype for value in gpt.load(tmp_path / "m").parameters()} == {torch.bfloat16}
    wide = load(tmp_path / "m", dtype="float64", config={"rotary_base": 500.0})
    assert {value.dtype for value in wide.parameters()} == {torch.float64}
    assert wide.config.rotary_base == 500.0
    assert not any(value.requires_grad for value in wide.parameters())
    with pytest.raises(ConfigError, match="dtype is 'int4'; known are: float64"):
        load(tmp_path / "m", dtype="int4")
    with pytest.raises(ConfigError, match=r"dtype is 'torch\.int8'; known are: float64"):
        load(tmp_path / "m", dtype=torch.int8)


def test_a_device_that_is_unknown_or_absent_is_refused_before_anything_is_read() -> None:
    for device, sentence in (
        ("meta", "device is 'meta'; known are: cpu, cuda, cuda:N"),
        ("gpu", "device 'gpu' cannot be used"),
        ("cuda:99", "device 'cuda:99' cannot be used"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            load("nowhere", device)
    assert device_of("cpu") == device_of(CPU) == CPU


def test_heads_that_tensor_parallel_does_not_divide_are_refused(tmp_path: Path) -> None:
    write_native(lively(MODERN), tmp_path / "m")
    with pytest.raises(ConfigError, match=r"tensor parallel 3 does not divide .* --tp can be 1, 2"):
        load_model(open_checkpoint(tmp_path / "m"), Mesh(CPU, tp=3))


def test_a_bad_checkpoint_is_refused_before_anything_is_allocated(tmp_path: Path) -> None:
    # A config of a model far larger than this machine: allocating it would fail otherwise.
    model_of("llama, multi-head").save_pretrained(tmp_path / "m")
    shutil.copytree(tmp_path / "m", tmp_path / "large")
    edit_json(tmp_path / "large" / "config.json", lambda r: r.update(intermediate_size=1 << 30))
    with pytest.raises(CheckpointError, match="the weights disagree"):
        load(tmp_path / "large")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_the_tensors_name(value: float) -> None:
    name = "decoder.layers.1.self_attention.linear_qkv.weight"
    tensors = {key: lively(CLASSIC).read(key) for key in parameters(CLASSIC)}
    tensors[name][3, 5] = value
    with pytest.raises(CheckpointError, match=f"{name} holds values that are not finite"):
        load_model(in_memory(CLASSIC, tensors), Mesh.single())


def test_a_model_outlives_its_files(tmp_path: Path) -> None:
    write_native(lively(MODERN), tmp_path / "m")
    model = load(tmp_path / "m")
    ids = torch.arange(12).view(1, 12)
    before = model.logits(ids)
    shutil.rmtree(tmp_path / "m")
    assert torch.equal(model.logits(ids), before)


RANK = """
import sys, time, torch
from gpt.formats.registry import open_checkpoint
from gpt.model.loading import load_model
from gpt.parallel.mesh import Mesh
from tests.support.process_memory import Peak, anonymous_bytes
torch.set_num_threads(1)
idle = anonymous_bytes()
with Peak() as peak:
    mesh = Mesh(torch.device("cpu"), tp=2, rank=int(sys.argv[2]))
    start = time.monotonic()
    model = load_model(open_checkpoint(sys.argv[1]), mesh)
share = sum(value.nbytes for value in model.parameters())
print(peak.bytes - idle, share, int(1000 * (time.monotonic() - start)))
"""

LARGE = {
    "model_type": "llama",
    "num_hidden_layers": 18,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 50257,
    "max_position_embeddings": 2048,
}


def write_large(folder: Path) -> int:
    """A Llama of 2 GB, a shard for each layer; the bytes written."""
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
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        save_file(
            {key: torch.full(shape, 0.5).bfloat16() for key, shape in shard.items()}, folder / file
        )
        places |= dict.fromkeys(shard, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(LARGE))
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@pytest.mark.slow
def test_two_ranks_load_two_gigabytes_in_the_memory_of_their_shares(tmp_path: Path) -> None:
    if shutil.disk_usage(tmp_path).free < 6 << 30:
        pytest.skip("needs 6 GB of disk")
    large = tmp_path / "large"
    large.mkdir()
    try:
        assert write_large(large) > 1.9e9
        command = [sys.executable, "-c", RANK, str(large)]
        root = Path(__file__).resolve().parents[3]
        ranks = [
            subprocess.Popen([*command, str(rank)], cwd=root, stdout=subprocess.PIPE, text=True)
            for rank in range(2)
        ]
        for rank in ranks:
            output, _ = rank.communicate(timeout=300)
            peak, share, ms = map(int, output.split())
            print(f"{peak / 1e6:.0f} MB above idle for {share / 1e6:.0f} MB, in {ms} ms")
            assert share > 0.9e9
            assert peak <= share + 300e6
    finally:
        shutil.rmtree(large)
