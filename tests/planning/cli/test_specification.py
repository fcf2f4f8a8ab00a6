"""Plan specifications: presets, sizes, files, flags, and invalid values."""

from pathlib import Path

import pytest
import yaml

from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.costs.training import forward_flops, step_flops
from gpt.errors import ConfigError, PreambleError
from planning.cli.specification import Specification, parse_count
from planning.model_presets import find_preset, presets


def specification_of(**flags: object) -> Specification:
    return Specification.read(None, flags)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("5b", 5.05), ("20b", 20.3), ("22b", 22.1), ("40b", 39.1), ("175b", 174.6)),
        *(("530b", 529.6), ("1t", 1008.0), ("llama2-7b", 6.74), ("llama2-70b", 68.98)),
        *(("llama3-8b", 8.03), ("llama3-70b", 70.55)),
        *(("gpt-oss-20b", 20.91), ("gpt-oss-120b", 116.83)),
        *(("mixtral-8x7b", 46.70), ("mixtral-8x22b", 140.63)),
        *(("qwen3-30b-a3b", 30.53), ("qwen3-235b-a22b", 235.09)),
        # The embedding and the layers of the model card, without the vision encoder.
        *(("gemma3-4b", 0.675 + 3.209), ("gemma3-12b", 1.012 + 10.759)),
        *(("gemma3-27b", 1.416 + 25.600), ("Gemma 3 27B", 1.416 + 25.600)),
    ],
)
def test_presets_have_their_published_sizes(name: str, billions: float) -> None:
    assert parameter_count(find_preset(name)) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_presets_have_the_windows_of_their_layers() -> None:
    windows = [layer.window_size for layer in find_preset("gpt-oss-20b").layers]
    assert windows == [128, None] * 12
    windows = [layer.window_size for layer in find_preset("gemma3-27b").layers]
    assert windows == ([1024] * 5 + [None]) * 10 + [1024] * 2


@pytest.mark.parametrize("name", ["175B", "gpt3-175b", "GPT-3 175B", "gpt3_175b", "gpt-175b"])
def test_preset_names_ignore_case_and_separators(name: str) -> None:
    assert find_preset(name) is presets()["gpt3-175b"]


def test_sizes_without_preset_give_a_gpt3_model() -> None:
    model = specification_of(layers=24, hidden=4096, heads=32, seq=2048, vocab=51200).model
    assert model.config() == presets()["gpt3-5b"]
    assert model.sequence_length(model.config()) == 2048


def test_gated_sizes_give_a_llama_model() -> None:
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "seq": 4096}
    assert specification_of(**sizes, gated=True).model.config() == presets()["llama2-7b"]


def test_size_flags_override_a_preset_and_its_derived_fields() -> None:
    config = specification_of(model="5b", hidden=2048, vocab=32000).model.config()
    expected = GPTConfig(24, 2048, 32, 32000, 2048, dtype="bfloat16")
    assert config == expected
    flops = forward_flops(config, 1, 2048)
    assert step_flops(flops, "all") == step_flops(forward_flops(expected, 1, 2048), "all")


def test_presets_keep_their_context_with_shorter_sequences() -> None:
    model = specification_of(model="llama2-7b", seq=1024).model
    assert model.config().max_position_embeddings == 4096
    assert model.sequence_length(model.config()) == 1024


def test_checkpoint_sizes_cannot_be_overridden(tmp_path: Path) -> None:
    from tests.support.servers import write_checkpoint

    model = specification_of(model=str(write_checkpoint(tmp_path))).model
    assert model.config().hidden_size == 32
    with pytest.raises(ConfigError, match="remove --layers"):
        specification_of(model=model.path, layers=3).model.config()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "no model is given"),
        ({"model": "175c"}, "did you mean '175b'"),
        ({"model": "./none"}, "does not exist"),
        ({"layers": 24, "hidden": 4096, "heads": 30}, "the nearest numbers of heads are 16 and 32"),
        (
            {"layers": 24, "hidden": 4096, "heads": 32, "kv_heads": 5},
            "the nearest numbers of KV heads are 4 and 8",
        ),
        ({"layers": -1, "hidden": 64, "heads": 2}, "layers is -1; it must be more than 0"),
        ({"layers": 1, "hidden": 0, "heads": 2}, "hidden is 0; it must be more than 0"),
        ({"model": "5b", "heads": 31}, "the nearest numbers of heads are 16 and 32"),
        ({"model": "5b", "gated": True}, "remove --gated"),
        ({"model": "5b", "ffn": -5}, "ffn is -5"),
    ],
)
def test_invalid_models_raise_with_a_remedy(flags: dict[str, object], message: str) -> None:
    with pytest.raises(PreambleError, match=message):
        specification_of(**flags).model.config()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpu": "a100-90g", "gpus": 8}, "did you mean 'a100-80g'"),
        ({"gpus": 8}, "no GPU is given; set --gpu"),
        ({"gpu": "h100"}, "set --gpus N"),
        ({"gpu": "h100", "gpus": -8}, "gpus is -8; it must be more than 0"),
        (
            {"gpu": "h100", "gpus": 12, "nodes": 2},
            "are 16 GPUs, but --gpus is 12",
        ),
    ],
)
def test_invalid_hardware_raises_with_a_remedy(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specification_of(**flags).hardware.cluster()


def test_nodes_flag_sets_the_number_of_gpus() -> None:
    cluster = specification_of(gpu="H100", nodes=4).hardware.cluster()
    assert (cluster.gpus, cluster.nodes, cluster.device.name) == (32, 4, "h100")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtype": "bf17"}, "did you mean"),
        ({"request_rate": 1.0, "concurrency": 4}, "are both set"),
        ({"input_tokens": 600.0, "input_tokens_p95": 500.0}, "it must be at least 600"),
        ({"memory_fraction": 1.5}, "at most 1"),
        ({"margin_latency": 1.0}, "at least 0 and less than 1"),
        ({"trainable": "some"}, "adapter, all"),
        ({"itl_ms_p95": 0.0}, "must be more than 0"),
        ({"tokens": float("inf")}, "finite"),
        ({"adapters": -1}, "0 or more"),
    ],
)
def test_invalid_values_raise_with_a_remedy(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        specification_of(**flags)


FILE = """
model: {path: gpt3-20b, seq: 1024}
hardware: {gpu: a100-80g, gpus_per_node: 8, nodes: 4}
workload:
  input_tokens: {mean: 600, p95: 1500}
  output_tokens: 200
  request_rate: 4.0
  adapters: 16
constraints: {ttft_ms_p95: 1500, itl_ms_p95: 60, max_gpus: 16, quality: [bf16, int8]}
training: {tokens: 300B, global_batch: 1440, virtual_tokens: 50}
objective: throughput_per_gpu
margins: {latency: 0.10, memory: 0.05}
dtype: bf16
"""


def test_flags_override_the_specification_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(FILE)
    specification = Specification.read(
        str(path), {"request_rate": 8.0, "gpus": None, "max_gpus": 8}
    )
    assert specification.model.config() == presets()["gpt3-20b"]
    assert specification.hardware.cluster().gpus == 32
    load = specification.workload
    assert (load.input_tokens, load.input_tokens_p95, load.output_tokens) == (600, 1500, 200)
    assert (load.output_tokens_p95, load.request_rate, load.adapters) == (None, 8.0, 16)
    assert (specification.constraints.max_gpus, specification.constraints.quality) == (
        8,
        ("bf16", "int8"),
    )
    assert (specification.training.tokens, specification.training.global_batch) == (3e11, 1440)
    assert (specification.training.train_virtual_tokens, specification.margins.latency) == (50, 0.1)
    assert (specification.objective, specification.dtype) == ("throughput_per_gpu", "bfloat16")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle: 5b", "unknown key 'modle'; did you mean 'model'"),
        ("hardware: {gpuz: h100}", "unknown key 'gpuz'; did you mean 'gpu"),
        ("hardware: h100", "must be a mapping of keys to values"),
        ("workload: {input_tokens: {p95: 3}}", "must be a number, or a mapping with mean"),
        ("workload: {concurrency: many}", "must be a whole number"),
        ("training: {tokens: 300X}", "write it as 300B"),
        ("objective: {a: 1}", "it must be a string"),
        ("model: {layers: 2.5}", "must be a whole number"),
    ],
)
def test_errors_in_a_specification_file_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        Specification.read(str(path), {})


def test_hardware_section_round_trips(tmp_path: Path) -> None:
    """A section that is written to a file and read again is unchanged."""
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"hardware": {"gpu": "h100", "gpus": 8, "calibration": "c"}}))
    specification = Specification.read(str(path), {})
    assert specification == specification_of(gpu="h100", gpus=8, calibration="c")


@pytest.mark.parametrize(
    ("text", "count"), [("300B", 3e11), ("1.5t", 1.5e12), ("3e11", 3e11), ("250m", 2.5e8)]
)
def test_parse_count_accepts_suffixes(text: str, count: float) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize("text", ["", "B", "-3B", "many", "nan", "inf"])
def test_parse_count_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ConfigError, match="300B"):
        parse_count(text)
