"""Format detection: each format is recognized by its files, and unsupported ones by name."""

import json
from pathlib import Path

import pytest
import torch

import gpt
from checkpoints_tools.conversion.convert import write_native
from gpt.config import GPTConfig
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints.hf_models import model_of
from tests.support.models import CLASSIC, lively


def test_native_and_hugging_face_are_distinguished(tmp_path: Path) -> None:
    write_native(lively(CLASSIC), tmp_path / "native")
    model_of("gpt2").save_pretrained(tmp_path / "hf")
    assert open_checkpoint(tmp_path / "native").format == "native"
    assert open_checkpoint(str(tmp_path / "hf")).format == "huggingface"
    assert open_checkpoint(tmp_path / "native" / "preamble.json").format == "native"
    assert open_checkpoint(tmp_path / "hf" / "config.json").format == "huggingface"


def test_the_package_exports_open_checkpoint(tmp_path: Path) -> None:
    write_native(lively(CLASSIC), tmp_path / "m")
    assert gpt.open_checkpoint(tmp_path / "m").config == CLASSIC


def test_user_fields_override_the_config(tmp_path: Path) -> None:
    write_native(lively(CLASSIC), tmp_path / "m")
    assert open_checkpoint(tmp_path / "m", {"activation": "gelu"}).config.activation == "gelu"
    full_config = CLASSIC.with_fields(layernorm_epsilon=1e-3)
    assert open_checkpoint(tmp_path / "m", full_config).config == full_config
    with pytest.raises(CheckpointError, match="unknown key 'activations'"):
        open_checkpoint(tmp_path / "m", {"activations": "gelu"})


# A file that identifies each format, and the format's name in the error.
FORMAT_FILES = {
    "iter_0000100/metadata.json": "is a Megatron checkpoint root",
    "context/io.json": "is a NeMo 2.0 checkpoint",
    "global_step100/mp_rank_00_model_states.pt": "is a DeepSpeed checkpoint",
    "mp_rank_00_model_states.pt": "is a DeepSpeed checkpoint",
    "model.gguf": "is a directory of GGUF files",
    "consolidated.00.pth": "is not a checkpoint",
    "adapter_config.json": "is an adapter, which cannot be opened as a model",
}


@pytest.mark.parametrize("sign", FORMAT_FILES)
def test_formats_without_a_reader_are_refused_by_name(sign: str, tmp_path: Path) -> None:
    (tmp_path / sign).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / sign).write_bytes(b"")
    if sign.startswith("iter_"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    with pytest.raises(CheckpointError, match=FORMAT_FILES[sign]) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "gpt.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"is a GGUF file, .* convert it to Hugging Face's"):
        open_checkpoint(tmp_path / "gpt.gguf")
    (tmp_path / "gpt.gguf").unlink()
    with pytest.raises(CheckpointError, match="does not exist; give the directory"):
        open_checkpoint("meta-llama/Llama-3.2-1B")
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(CheckpointError, match=r"looked for preamble.json .* found a file"):
        open_checkpoint(tmp_path / "notes.txt")
    with pytest.raises(CheckpointError, match=r"config.json .* found notes.txt; give"):
        open_checkpoint(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="found nothing; give the directory"):
        open_checkpoint(tmp_path / "empty")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        (
            "~nosuchuser/x",
            "~nosuchuser/x begins with ~ and the name of a user without a home directory; give",
        ),
        ("/" + "a" * 256, "cannot read /a+: File name too long; give the directory of"),
        (__file__ + "/below", "does not exist; give the directory"),
    ],
)
def test_invalid_path_is_a_checkpoint_error(path: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert "\n" not in str(caught.value)


def test_hugging_face_files_have_precedence_over_trainer_files(tmp_path: Path) -> None:
    model_of("gpt2").save_pretrained(tmp_path)
    (tmp_path / "global_step10").mkdir()
    (tmp_path / "global_step10" / "mp_rank_00_model_states.pt").write_bytes(b"")
    (tmp_path / "params.json").write_text(json.dumps({"dim": 1}))
    assert open_checkpoint(tmp_path).format == "huggingface"


def test_opening_reads_headers_only(tmp_path: Path) -> None:
    config = GPTConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=8,
        vocab_size=2000,
        max_position_embeddings=64,
    )
    write_native(lively(config), tmp_path / "m")
    checkpoint = open_checkpoint(tmp_path / "m")
    mapped = Path("/proc/self/maps").read_text()
    assert str(tmp_path) not in mapped
    checkpoint.read("decoder.final_layernorm.weight", out=torch.empty(64))
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
