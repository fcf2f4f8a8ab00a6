"""What is asked of a plan: names, sizes, files and flags, and what cannot be."""

from pathlib import Path

import pytest
import yaml

from gpt.config import GPTConfig
from gpt.costs.inference import parameter_count
from gpt.costs.training import forward_flops, step_flops
from gpt.errors import ConfigError, PreambleError
from planning.cli.specification import Specification, count_of
from planning.model_presets import find_preset, presets


def wish(**flags: object) -> Specification:
    return Specification.read(None, flags)


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        *(("5b", 5.05), ("20b", 20.3), ("22b", 22.1), ("40b", 39.1), ("175b", 174.6)),
        *(("530b", 529.6), ("1t", 1008.0), ("llama2-7b", 6.74), ("llama2-70b", 68.98)),
        *(("llama3-8b", 8.03), ("llama3-70b", 70.55)),
    ],
)
def test_presets_have_their_published_sizes(name: str, billions: float) -> None:
    assert parameter_count(find_preset(name)) / 1e9 == pytest.approx(billions, rel=2e-3)


@pytest.mark.parametrize("name", ["175B", "gpt3-175b", "GPT-3 175B", "gpt3_175b", "gpt-175b"])
def test_a_preset_is_found_however_its_name_is_written(name: str) -> None:
    assert find_preset(name) is presets()["gpt3-175b"]


def test_sizes_alone_are_a_model_like_gpt3() -> None:
    told = wish(layers=24, hidden=4096, heads=32, seq=2048, vocab=51200).model
    assert told.config() == presets()["gpt3-5b"]
    assert told.sequence(told.config()) == 2048


def test_a_gated_model_of_sizes_is_like_llamas() -> None:
    sizes = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 11008, "vocab": 32000, "seq": 4096}
    assert wish(**sizes, gated=True).model.config() == presets()["llama2-7b"]


def test_a_flag_changes_a_preset_and_what_was_derived_of_it() -> None:
    config = wish(model="5b", hidden=2048, vocab=32000).model.config()
    wanted = GPTConfig(24, 2048, 32, 32000, 2048, dtype="bfloat16")
    assert config == wanted
    flops = forward_flops(config, 1, 2048)
    assert step_flops(flops, "all") == step_flops(forward_flops(wanted, 1, 2048), "all")


def test_a_preset_keeps_its_context_where_sequences_are_shorter() -> None:
    told = wish(model="llama2-7b", seq=1024).model
    assert told.config().max_position_embeddings == 4096
    assert told.sequence(told.config()) == 1024


def test_a_checkpoint_tells_its_own_sizes(tmp_path: Path) -> None:
    from tests.support.servers import write_checkpoint

    told = wish(model=str(write_checkpoint(tmp_path))).model
    assert told.config().hidden_size == 32
    with pytest.raises(ConfigError, match="leave out --layers"):
        wish(model=told.path, layers=3).model.config()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({}, "no model is named"),
        ({"model": "175c"}, "did you mean '175b'"),
        ({"model": "./none"}, "does not exist"),
        ({"layers": 24, "hidden": 4096, "heads": 30}, "the nearest that do are 16 and 32"),
        (
            {"layers": 24, "hidden": 4096, "heads": 32, "kv_heads": 5},
            "the nearest that do are 4 and 8",
        ),
        ({"layers": -1, "hidden": 64, "heads": 2}, "layers is -1; it must be more than 0"),
        ({"layers": 1, "hidden": 0, "heads": 2}, "hidden is 0; it must be more than 0"),
        ({"model": "5b", "heads": 31}, "the nearest that do are 16 and 32"),
        ({"model": "5b", "gated": True}, "leave --gated out"),
        ({"model": "5b", "ffn": -5}, "ffn is -5"),
    ],
)
def test_what_is_no_model_is_told_what_is(flags: dict[str, object], words: str) -> None:
    with pytest.raises(PreambleError, match=words):
        wish(**flags).model.config()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"gpu": "a100-90g", "gpus": 8}, "did you mean 'a100-80g'"),
        ({"gpus": 8}, "no GPU is named; give --gpu"),
        ({"gpu": "h100"}, "give --gpus N"),
        ({"gpu": "h100", "gpus": -8}, "gpus is -8; it must be more than 0"),
        ({"gpu": "h100", "gpus": 12, "nodes": 2}, "2 nodes of 8 GPUs are 16, not 12"),
    ],
)
def test_what_is_no_hardware_is_told_what_is(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wish(**flags).hardware.cluster()


def test_nodes_are_as_many_gpus_as_they_have() -> None:
    cluster = wish(gpu="H100", nodes=4).hardware.cluster()
    assert (cluster.gpus, cluster.nodes, cluster.device.name) == (32, 4, "h100")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dtype": "bf17"}, "did you mean"),
        ({"request_rate": 1.0, "concurrency": 4}, "are both set"),
        ({"input_tokens": 600.0, "input_tokens_p95": 500.0}, "it must be 600 at least"),
        ({"memory_fraction": 1.5}, "at most 1"),
        ({"margin_latency": 1.0}, "from 0 to less than 1"),
        ({"trainable": "some"}, "known are: adapter, all"),
        ({"itl_ms_p95": 0.0}, "must be more than 0"),
        ({"tokens": float("inf")}, "finite"),
        ({"adapters": -1}, "0 or more"),
    ],
)
def test_what_cannot_be_is_refused_with_what_can(flags: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        wish(**flags)


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


def test_a_file_says_what_flags_can_say_and_flags_override_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(FILE)
    told = Specification.read(str(path), {"request_rate": 8.0, "gpus": None, "max_gpus": 8})
    assert told.model.config() == presets()["gpt3-20b"]
    assert told.hardware.cluster().gpus == 32
    load = told.workload
    assert (load.input_tokens, load.input_tokens_p95, load.output_tokens) == (600, 1500, 200)
    assert (load.output_tokens_p95, load.request_rate, load.adapters) == (None, 8.0, 16)
    assert (told.constraints.max_gpus, told.constraints.quality) == (8, ("bf16", "int8"))
    assert (told.training.tokens, told.training.global_batch) == (3e11, 1440)
    assert (told.training.train_virtual_tokens, told.margins.latency) == (50, 0.1)
    assert (told.objective, told.dtype) == ("throughput_per_gpu", "bfloat16")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle: 5b", "unknown key 'modle'; did you mean 'model'"),
        ("hardware: {gpuz: h100}", "unknown key 'gpuz'; did you mean 'gpu"),
        ("hardware: h100", "must be `key: value`s"),
        ("workload: {input_tokens: {p95: 3}}", "must be a number, or have mean and p95"),
        ("workload: {concurrency: many}", "must be a whole number"),
        ("training: {tokens: 300X}", "write it as 300B"),
        ("objective: {a: 1}", "it must be a text"),
        ("model: {layers: 2.5}", "must be a whole number"),
    ],
)
def test_what_a_file_says_wrongly_is_named(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        Specification.read(str(path), {})


def test_every_flag_of_a_file_reads_as_itself(tmp_path: Path) -> None:
    """A section has no two meanings: written out and read again, it is the same."""
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump({"hardware": {"gpu": "h100", "gpus": 8, "calibration": "c"}}))
    one = Specification.read(str(path), {})
    assert one == wish(gpu="h100", gpus=8, calibration="c")


@pytest.mark.parametrize(
    ("word", "count"), [("300B", 3e11), ("1.5t", 1.5e12), ("3e11", 3e11), ("250m", 2.5e8)]
)
def test_tokens_are_counted_as_people_write_them(word: str, count: float) -> None:
    assert count_of(word) == count


@pytest.mark.parametrize("word", ["", "B", "-3B", "many", "nan", "inf"])
def test_what_is_no_number_of_tokens_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="300B"):
        count_of(word)
