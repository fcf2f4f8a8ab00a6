"""Adapter exchange with PEFT, TGIS and NeMo from the command line; PEFT itself is the reference."""

import errno
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

import gpt
from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.digest import identify
from gpt.formats.registry import open_checkpoint
from tests.support.adapter_exchange import (
    CONFIG_1,
    TABLE,
    TASK,
    TEXT,
    WIDTH,
    V,
    run_adapters_command,
    write_nemo_adapter,
)
from tests.support.checkpoints.hf_models import VOCABULARY, ids, model_of
from tests.support.models import lively
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="module", params=["gpt2", "llama, multi-head"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A transformers model, and the directory that it was saved to."""
    hf_model = model_of(request.param)
    folder = tmp_path_factory.mktemp("base")
    hf_model.save_pretrained(folder)
    return hf_model, folder


@torch.no_grad()
def logits_after_virtual_tokens(folder: Path, table: Tensor, tokens: Tensor) -> Tensor:
    """Our logits for a text after virtual tokens."""
    virtual = (VOCABULARY + torch.arange(len(table))).expand(len(tokens), -1)
    return gpt.load(folder).logits(torch.cat([virtual, tokens], 1), table)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Between peft and transformers.
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_imported_peft_adapter_gives_the_logits_of_peft(
    base: "tuple[PreTrainedModel, Path]",
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    import peft

    hf_model, folder = base
    common: Any = {"task_type": "CAUSAL_LM", "num_virtual_tokens": V}
    config: Any = peft.PromptTuningConfig(**common)
    if kind == "P_TUNING":
        config = peft.PromptEncoderConfig(
            **common, encoder_reparameterization_type="LSTM", encoder_hidden_size=6
        )
    peft_model: Any = peft.get_peft_model(hf_model, config).eval()
    peft_model.save_pretrained(tmp_path / "tuned")
    tokens = ids(2, 16)
    with torch.no_grad():
        expected = peft_model(tokens).logits

    code, out, err = run_adapters_command(
        capsys,
        "import",
        tmp_path / "tuned",
        tmp_path / "mood@2.safetensors",
        "--model",
        folder,
        "--description",
        "moods",
        "--stop",
        "\n",
        "--max-new-tokens",
        "7",
        "--template",
        "Text: {text}\nMood:",
        "--truncate-field",
        "text",
        "--json",
    )

    assert (code, err) == (0, "")
    adapter = open_adapter(tmp_path / "mood@2.safetensors")
    assert (
        logits_after_virtual_tokens(folder, adapter.table, tokens) - expected
    ).abs().max() < 1e-4
    card = adapter.card
    identity = identify(open_checkpoint(folder))
    assert (card.name, card.task, card.stop, card.max_new_tokens) == ("mood", "moods", ("\n",), 7)
    assert (card.base_digest, card.base_fingerprint) == (identity.digest, identity.fingerprint)
    assert card.template == PromptTemplate(
        "<|VIRTUAL_PROMPT_0|>Text: {text}\nMood:", (V,), truncate_field="text"
    )
    assert json.loads(out)["digest"] == adapter.digest


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_exported_adapter_gives_the_same_logits_in_peft(
    base: "tuple[PreTrainedModel, Path]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    hf_model, folder = base
    torch.manual_seed(0)
    table = torch.randn(V, WIDTH)
    tokens = ids(2, 16)
    # The rows stand in another order than in the table.
    template = PromptTemplate("<|VIRTUAL_PROMPT_1|><|VIRTUAL_PROMPT_0|>{text}", (2, 1))
    digest = identify(open_checkpoint(folder)).digest
    card = Card("mood", base_digest=digest, template=template, stop=("\n",))
    save_adapter(build_adapter(card, table), tmp_path / "mood.safetensors")

    code, out, err = run_adapters_command(
        capsys,
        "export",
        tmp_path / "mood.safetensors",
        tmp_path / "peft",
        "--to",
        "peft",
        "--model",
        folder,
        "--base-name",
        "acme/base",
    )

    assert (code, out) == (0, f"{tmp_path / 'peft'}\n")
    assert "no field for the template and the stop strings" in err and "special tokens" in err
    peft_model: Any = peft.PeftModel.from_pretrained(hf_model, str(tmp_path / "peft")).eval()
    with torch.no_grad():
        logits = peft_model(tokens).logits[:, V:]
    expected = logits_after_virtual_tokens(folder, table[[2, 0, 1]], tokens)[:, V:]
    assert (logits - expected).abs().max() < 1e-4
    exported_config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (exported_config["num_layers"], exported_config["base_model_name_or_path"]) == (
        3,
        "acme/base",
    )
    assert torch.equal(open_adapter(tmp_path / "peft").table, table[[2, 0, 1]])


def nemo_state(task: str = "mood", table: Tensor = TABLE) -> dict[str, Tensor]:
    return {
        f"prompt_table.{task}.prompt_embeddings.weight": table,
        f"prompt_table.{task}.indices": torch.arange(len(table)),
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "1.9, flat": {"state": nemo_state()},
    "1.16, two tasks": {
        "state": {"prompt_table": nemo_state() | nemo_state("other", TABLE * 2)},
        "rank": "mp_rank_00",
    },
    "1.17, with its encoder": {
        "state": {
            "prompt_table": {"prompt_table.mood.prompt_embeddings.weight": TABLE},
            "embeddings": {"weight": TABLE * 3},
            "tpmlp": {"first.weight": TABLE},
        },
        "rank": "tp_rank_00_pp_rank_000",
        "pack": "w:gz",
    },
    "unpacked, in bf16": {
        "state": {"prompt_table": nemo_state(table=TABLE.bfloat16())},
        "pack": "dir",
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_nemo_prompt_learning_layout_is_imported_with_its_template(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write_nemo_adapter(tmp_path, **LAYOUTS[layout])
    (tmp_path / "adapters").mkdir()
    task = ["--task", "mood"] if "two" in layout else []

    code, out, _ = run_adapters_command(capsys, "import", source, tmp_path / "adapters", *task)

    assert code == 0
    adapter = open_adapter(tmp_path / "adapters" / "mood@1.safetensors")
    assert torch.equal(adapter.table, TABLE)
    assert adapter.card.template == PromptTemplate(
        TEXT, (2, 1), truncate_field="question", answer_field="answer", bos="first"
    )
    assert "the adapter does not record its base model" in out and str(tmp_path / "adapters") in out


def test_positions_are_subtracted_from_rows_of_an_adapter_inside_a_nemo_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_model: Any = model_of("gpt2")
    hf_model.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    rows = torch.randn(V, WIDTH)
    tokens = ids(1, 8)
    state = {
        "model.embedding.adapter_layer.ptuning_adapter.inference_table": rows,
        "model.embedding.adapter_layer.ptuning_adapter.embedding.weight": torch.randn(V, 9),
    }
    source = write_nemo_adapter(tmp_path, state, {"position_embedding_type": "learned_absolute"})
    target = tmp_path / "mood.safetensors"

    def swap(module: Any, args: Any, output: Tensor) -> Tensor:
        return torch.cat([rows[None], output[:, V:]], 1)

    # As NeMo runs it: placeholder ids come first, and their embeddings with positions are replaced.
    hook = hf_model.transformer.drop.register_forward_hook(swap)
    with torch.no_grad():
        expected = hf_model(torch.cat([torch.zeros(1, V, dtype=torch.long), tokens], 1)).logits
    hook.remove()

    code, _, err = run_adapters_command(capsys, "import", source, target)
    assert code == 1 and "give the model that the prompt was trained on with --model" in err
    assert (
        run_adapters_command(capsys, "import", source, target, "--model", tmp_path / "base")[0] == 0
    )
    logits = logits_after_virtual_tokens(tmp_path / "base", open_adapter(target).table, tokens)
    assert (logits - expected).abs().max() < 1e-4

    rotary = write_nemo_adapter(tmp_path / "r", state, {"position_embedding_type": "rope"})
    assert torch.equal(open_adapter(rotary).table, rows)


@pytest.mark.parametrize(
    ("state", "config", "message"),
    [
        (
            nemo_state(table=TABLE * 0),
            CONFIG_1,
            "is missing, all zeros or not finite, probably because",
        ),
        (nemo_state(table=TABLE / 0), CONFIG_1, "is missing, all zeros or not finite"),
        (nemo_state() | nemo_state("b"), CONFIG_1, "has several tasks; set task to one of b, mood"),
        ({"model.word": TABLE}, CONFIG_1, "has no soft prompt of NeMo; it contains model.word"),
        ([TABLE], CONFIG_1, "is a list, not a state dict"),
        (nemo_state(table=TABLE.long()), CONFIG_1, r"is torch\.int64"),
        (
            nemo_state() | {"prompt_table.b.prompt_embeddings.weight": "x"},
            CONFIG_1,
            "is a str; it must be a matrix",
        ),
        ({5: TABLE}, CONFIG_1, "has no soft prompt of NeMo; it contains 5"),
        (
            nemo_state(),
            {"task_templates": [TASK | {"virtual_token_splits": [2]}]},
            r"`splits` is \[2\]; number the markers",
        ),
        (
            nemo_state(),
            {"task_templates": [TASK | {"prompt_template": 5}]},
            "the template must be a text",
        ),
        (nemo_state(table=TABLE[:2]), CONFIG_1, "has 3 virtual tokens, but the table has 2 rows"),
    ],
)
def test_nemo_file_with_an_incomplete_prompt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Any, config: Any, message: str
) -> None:
    code, out, err = run_adapters_command(
        capsys, "import", write_nemo_adapter(tmp_path, state, config), tmp_path / "a.safetensors"
    )
    assert (code, out) == (1, "")
    assert re.search(message, err) and err.count("\n") == 1
    assert not list(tmp_path.glob("*a.safetensors*"))


def save(path: Path, template: PromptTemplate | None = None, table: Tensor = TABLE) -> Path:
    save_adapter(build_adapter(Card("a", template=template), table), path)
    return path


def test_bos_token_before_the_rows_is_exported_as_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    write_native(lively(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    table = torch.randn(V, CONFIG.hidden_size)
    bos_first = PromptTemplate("<|VIRTUAL_PROMPT_0|>{x}", (V,), bos="first")
    file = save(tmp_path / "a.safetensors", bos_first, table)

    code, _, err = run_adapters_command(capsys, "export", file, tmp_path / "t", "--to", "tgis")
    assert code == 1 and "give the base model with --model" in err and not (tmp_path / "t").exists()
    code, _, err = run_adapters_command(
        capsys, "export", file, tmp_path / "t", "--to", "tgis", "--model", tmp_path / "model"
    )
    assert code == 0 and "the first row is the begin-of-text token" in err
    embedding = open_checkpoint(tmp_path / "model").read("embedding.word_embeddings.weight")
    assert torch.equal(
        torch.load(tmp_path / "t" / "decoder.pt", weights_only=True),
        torch.cat([embedding[1:2], table]),
    )


def test_virtual_tokens_after_text_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save(tmp_path / "a.safetensors", PromptTemplate("{x}<|VIRTUAL_PROMPT_0|>", (V,)))
    code, _, err = run_adapters_command(capsys, "export", file, tmp_path / "t", "--to", "peft")
    assert code == 1 and "virtual tokens after text of its template" in err


def test_existing_target_is_replaced_only_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first_file = save(tmp_path / "a.safetensors")
    second_file = save(tmp_path / "b.safetensors")
    content_before = first_file.read_bytes()
    assert (
        "already exists; give --overwrite"
        in run_adapters_command(capsys, "import", second_file, first_file)[2]
    )
    assert first_file.read_bytes() == content_before
    assert run_adapters_command(capsys, "import", second_file, first_file, "--overwrite")[0] == 0

    target = tmp_path / "t"
    assert run_adapters_command(capsys, "export", first_file, target, "--to", "tgis")[0] == 0
    assert (
        "exists already and contains decoder.pt"
        in run_adapters_command(capsys, "export", first_file, target, "--to=peft")[2]
    )
    assert (
        run_adapters_command(capsys, "export", first_file, target, "--to", "peft", "--overwrite")[0]
        == 0
    )
    assert sorted(os.listdir(target)) == ["adapter_config.json", "adapter_model.safetensors"]
    (target / "thesis.tex").touch()
    code, _, err = run_adapters_command(
        capsys, "export", first_file, target, "--to", "peft", "--overwrite"
    )
    assert code == 1 and "contains thesis.tex, which is not an adapter file" in err
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "t"]


@pytest.mark.parametrize("action", ["import", "export"])
def test_full_disk_leaves_no_files(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    file = save(tmp_path / "a.safetensors")
    target = tmp_path / ("b.safetensors" if action == "import" else "b")

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    code, out, err = run_adapters_command(
        capsys, action, file, target, *(["--to=peft"] * (action == "export"))
    )
    assert (code, out) == (1, "") and "cannot be written: No space left" in err
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--name", "a@1"], "remove the version"),
        (["--name", "../a"], "is not an adapter name"),
        (["--bos", "text"], "has no prompt template, so bos cannot be set; give --template"),
        (["--template", "<|VIRTUAL_PROMPT_1|>"], "number the markers from 0"),
        (["--template", "@nothing"], "nothing cannot be read"),
        (["--template", "{x}", "--truncate-field", "y"], "'y' is not in the template"),
        (["--stop", ""], "a stop string of 0 bytes"),
        (["--model", "nothing"], "nothing"),
    ],
)
def test_wrong_flags_give_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    file = save(tmp_path / "a.safetensors")
    code, out, err = run_adapters_command(
        capsys, "import", file, tmp_path / "b.safetensors", *arguments
    )
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_adapter_of_another_model_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native(lively(CONFIG), tmp_path / "model")
    table = torch.randn(V, CONFIG.hidden_size)
    other_adapter: Adapter = build_adapter(Card("a", base_digest="0" * 64), table)
    save_adapter(other_adapter, tmp_path / "a.safetensors")
    source, target, model = (
        tmp_path / name for name in ("a.safetensors", "b.safetensors", "model")
    )
    for arguments in (["import"], ["export", "--to", "peft"]):
        code, _, err = run_adapters_command(capsys, *arguments, source, target, "--model", model)
        assert code == 1 and "was trained on the model with digest 000000000000" in err
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "model"]
    safetensors.torch.save_file({"table": table}, tmp_path / "c.safetensors")
    assert (
        "has no adapter metadata"
        in run_adapters_command(
            capsys, "import", tmp_path / "c.safetensors", tmp_path / "b.safetensors"
        )[2]
    )


def test_unusable_target_is_refused_before_the_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save(tmp_path / "a.safetensors")
    for target in ("b.txt", "nowhere/b.safetensors"):
        code, _, err = run_adapters_command(
            capsys, "import", file, tmp_path / target, "--model", "nothing"
        )
        assert code == 1 and "give an existing directory, or a new .safetensors file" in err
    assert os.listdir(tmp_path) == ["a.safetensors"]
