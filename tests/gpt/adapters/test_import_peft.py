"""Import of PEFT and TGIS adapters: tables are equal, and other adapter types are refused."""

import io
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from gpt.adapters.adapter_file import open_adapter, save_adapter
from gpt.errors import AdapterError

# Eighths, which are exact in half precision too.
TABLE = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
NAN = TABLE.clone()
NAN[1, 2] = float("nan")


@pytest.fixture(scope="module")
def peft_base() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=32))


@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING-MLP", "P_TUNING-LSTM"])
@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.filterwarnings("ignore::FutureWarning")  # Between peft and transformers.
def test_peft_adapters_are_read(tmp_path: Path, peft_base: Any, kind: str, safe: bool) -> None:
    import peft

    common: Any = {"task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    config: Any = peft.PromptTuningConfig(**common)
    if kind != "PROMPT_TUNING":
        config = peft.PromptEncoderConfig(
            **common, encoder_reparameterization_type=kind.split("-")[1], encoder_hidden_size=6
        )
    model = peft.get_peft_model(peft_base, config).eval()
    peft_table = model.get_prompt(1)[0].detach()
    folder = tmp_path / "my tuned: prompt"
    model.save_pretrained(folder)
    if not safe:  # In the format of older versions of PEFT.
        tensors = safetensors.torch.load_file(folder / "adapter_model.safetensors")
        torch.save(tensors, folder / "adapter_model.bin")
        (folder / "adapter_model.safetensors").unlink()

    adapter = open_adapter(folder)

    assert torch.equal(adapter.table, peft_table)
    assert adapter.card.name == "my-tuned-prompt"
    assert adapter.card.method == kind.split("-")[0].lower()
    assert adapter.card.base_digest is None
    assert open_adapter(next(folder.glob("adapter_model.*"))).digest == adapter.digest
    save_adapter(adapter, tmp_path / "a.safetensors")
    assert open_adapter(tmp_path / "a.safetensors").digest == adapter.digest


def peft_folder(folder: Path, config: dict[str, Any], **tensors: Tensor) -> Path:
    folder.mkdir(exist_ok=True)
    defaults = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": 3}
    present = {key: value for key, value in {**defaults, **config}.items() if value is not None}
    (folder / "adapter_config.json").write_text(json.dumps(present))
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_multitask_prompt_is_reduced_to_the_chosen_task(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cols = torch.randn(2, 3, 1)
    rows = torch.randn(2, 1, 4)
    config = {"peft_type": "MULTITASK_PROMPT_TUNING"}
    multitask = peft_folder(
        tmp_path / "m",
        config,
        prompt_embeddings=TABLE,
        prefix_task_cols=cols,
        prefix_task_rows=rows,
    )
    expected = TABLE * (cols[1] @ rows[1])

    assert torch.allclose(open_adapter(multitask, task="1").table, expected, atol=0, rtol=1e-6)
    with pytest.raises(AdapterError, match="has 2 tasks; set task to a number from 0 to 1"):
        open_adapter(multitask)
    for absent in ("2", "01", "-1", "1" * 5000):
        with pytest.raises(AdapterError, match=f"has no task {absent[:20]}"):
            open_adapter(multitask, task=absent)
    many = {
        "prefix_task_cols": torch.empty(1 << 40, 3, 0),
        "prefix_task_rows": torch.empty(1 << 40, 0, 4),
    }
    peft_folder(tmp_path / "many", config, prompt_embeddings=TABLE, **many)
    assert not open_adapter(tmp_path / "many", task="7").table.any()  # At once.
    single_task = {"prefix_task_cols": cols[:1], "prefix_task_rows": rows[:1]}
    peft_folder(multitask, config, prompt_embeddings=TABLE, **single_task)
    assert open_adapter(multitask).table.shape == (3, 4)
    peft_folder(
        multitask, config, prompt_embeddings=TABLE, **single_task | {"prefix_task_cols": cols}
    )
    with pytest.raises(AdapterError, match="inconsistent shapes"):
        open_adapter(multitask)
    peft_folder(multitask, config, prompt_embeddings=TABLE)
    with pytest.raises(AdapterError, match="adapter must have exactly prefix_task_cols"):
        open_adapter(multitask)


def test_a_peft_config_without_task_type_is_read_with_a_note(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "p", {"task_type": None}, prompt_embeddings=TABLE.bfloat16())
    adapter = open_adapter(folder)
    assert any("no task_type" in note for note in adapter.card.notes)
    assert torch.equal(adapter.table, TABLE)  # Eighths are exact in bfloat16 too.
    (folder / "adapter_config.json").unlink()
    assert any("no adapter_config" in note for note in open_adapter(folder).card.notes)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        (
            {"peft_type": "LOHA"},
            {"prompt_embeddings": TABLE},
            "has peft_type LOHA, which is not supported",
        ),
        ({"peft_type": "CARTRIDGE"}, {"prompt_embeddings": TABLE}, "has peft_type CARTRIDGE"),
        (
            {"peft_type": "PREFIX_TUNING", "num_layers": 2, "token_dim": 2},
            {"prompt_embeddings": TABLE},
            "3 x 4, but its config has token_dim 2",
        ),
        ({"peft_type": None}, {"prompt_embeddings": TABLE}, "has peft_type None"),
        ({"task_type": "SEQ_2_SEQ_LM"}, {"prompt_embeddings": TABLE}, "task_type SEQ_2_SEQ_LM and"),
        (
            {"num_transformer_submodules": 2},
            {"prompt_embeddings": TABLE},
            "num_transformer_submodules 2; only CAUSAL_LM",
        ),
        ({"modules_to_save": ["wte"]}, {"prompt_embeddings": TABLE}, "also replaces weights"),
        ({"num_virtual_tokens": 4}, {"prompt_embeddings": TABLE}, "3 x 4, .*num_virtual_tokens 4"),
        ({"token_dim": 8}, {"prompt_embeddings": TABLE}, "3 x 4, but its config has token_dim 8"),
        ({}, {"lora_A": TABLE}, "has the tensors lora_A; a PROMPT_TUNING adapter must"),
        ({}, {"prompt_embeddings": TABLE, "x": TABLE + 1}, "has the tensors prompt_embeddings, x;"),
        ({}, {"prompt_embeddings": TABLE.double()}, r"is torch\.float64, .* must be a dense"),
        ({}, {"prompt_embeddings": TABLE.int()}, r"is torch\.int32, .* must be a dense"),
        ({}, {"prompt_embeddings": NAN}, "values that are not finite"),
        ({}, {"prompt_embeddings": TABLE[None]}, r"table of 1 x 3 x 4, but its config has num"),
    ],
)
def test_unsupported_peft_adapter_is_refused(
    tmp_path: Path, config: dict[str, Any], tensors: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        open_adapter(peft_folder(tmp_path / "p", config, **tensors))


@pytest.mark.filterwarnings("ignore::UserWarning")  # Sparse tensors warn when they are loaded.
def test_a_peft_directory_that_is_broken_is_refused(tmp_path: Path) -> None:
    folder = peft_folder(tmp_path / "p", {}, prompt_embeddings=TABLE)
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(AdapterError, match="truncated"):
        open_adapter(folder)
    weights.unlink()
    with pytest.raises(AdapterError, match=r"has adapter_config\.json but no weights"):
        open_adapter(folder)
    torch.save([TABLE], folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match="is not a plain state dict of names and tensors"):
        open_adapter(folder)
    torch.save({"prompt_embeddings": TABLE.to_sparse()}, folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"is torch\.sparse_coo on cpu; it must be a dense"):
        open_adapter(folder)
    for text in ("{", "[]", "[" * 100_000):
        (folder / "adapter_config.json").write_text(text)
        with pytest.raises(AdapterError, match=r"adapter_config\.json cannot be read"):
            open_adapter(folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_tgis_prompt_is_read_from_its_directory_or_file(
    tmp_path: Path, dtype: torch.dtype, zipped: bool
) -> None:
    (tmp_path / "refunds").mkdir()
    path = tmp_path / "refunds" / "decoder.pt"
    parameter = torch.nn.Parameter(TABLE.to(dtype))
    torch.save(parameter, path, _use_new_zipfile_serialization=zipped)
    for source in (path, path.parent):
        adapter = open_adapter(source)
        assert torch.equal(adapter.table, TABLE)
        assert (adapter.card.name, adapter.card.method) == ("refunds", "tgis")
    path.with_name("encoder.pt").write_bytes(b"")
    with pytest.raises(AdapterError, match="for a model with an encoder"):
        open_adapter(path)


class Payload:
    """An attacker's pickle payload: code that runs on loading."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch payload-ran",)


def saved(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def without_last_member(content: bytes) -> bytes:
    """A valid zip file with one record missing."""
    target = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as source, zipfile.ZipFile(target, "w") as output:
        for member_info in source.infolist():
            if not member_info.filename.endswith("/0"):
                output.writestr(member_info, source.read(member_info))
    return target.getvalue()


PICKLES: dict[str, tuple[bytes, str]] = {
    "payload": (
        saved(Payload()),
        "contains more than tensors: it asks to run (posix|nt).system; save",
    ),
    "bare payload": (pickle.dumps(Payload()), "is not a readable torch file"),
    "payload beside": (
        saved({"table": TABLE, "x": Payload()}),
        "contains more than tensors: it asks to run",
    ),
    "empty": (b"", "is truncated or broken"),
    "text": (b"hello, this is no pickle", "is truncated or broken"),
    "truncated": (saved(TABLE)[:-200], "is truncated or broken"),
    "missing record": (without_last_member(saved(TABLE)), "is truncated or broken"),
    "a dictionary": (saved({"prompt": TABLE}), "contains a dict; a decoder.pt must be one matrix"),
    "sparse": (saved(TABLE.to_sparse()), "it must be a dense"),
    "numbers": (saved(TABLE.long()), r"torch\.int64"),
    "a vector": (saved(TABLE[0]), "must be floating-point of shape"),
    "not finite": (saved(NAN), "values that are not finite"),
    # A few bytes that claim four terabytes by strides of zero.
    "a bomb": (saved(torch.zeros(1).expand(10**6, 10**6)), "over the limit of 1073741824"),
}


@pytest.mark.parametrize("fault", PICKLES)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Sparse tensors warn when they are loaded.
def test_a_torch_file_that_is_more_than_a_matrix_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    content, message = PICKLES[fault]
    path = tmp_path / "decoder.pt"
    path.write_bytes(content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AdapterError, match=message) as caught:
        open_adapter(path)
    assert not (tmp_path / "payload-ran").exists()
    assert "\n" not in str(caught.value)
    assert re.search(r"; |: ", str(caught.value))
