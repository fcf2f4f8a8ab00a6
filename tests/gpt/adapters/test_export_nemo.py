"""Export of adapters to NeMo: the layout, and a round trip of rows and template."""

import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.prompt_template import PromptTemplate
from gpt.formats.registry import open_checkpoint
from tests.support.adapter_exchange import run_adapters_command
from tests.support.models import lively
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

TABLE = torch.arange(24, dtype=torch.float32).reshape(6, 4) / 8 + 0.125
TEXT = "<|VIRTUAL_PROMPT_0|>Q: {question}\nIs it<|VIRTUAL_PROMPT_1|> {answer}"
FULL = PromptTemplate(TEXT, (4, 2), truncate_field="question", answer_field="answer", bos="first")


def save(folder: Path, template: PromptTemplate | None, table: Tensor = TABLE, **card: Any) -> Path:
    path = folder / "source.safetensors"
    save_adapter(build_adapter(Card(**{"name": "mood", "template": template} | card), table), path)
    return path


def open_nemo_adapter(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The contents as NeMo opens them: a plain tar with a config and a torch.save file."""
    with tarfile.open(path, "r:") as archive:
        assert archive.getnames() == ["./model_config.yaml", "./model_weights.ckpt"]
        config, weights = (archive.extractfile(name) for name in archive.getnames())
        assert config is not None and weights is not None
        return yaml.safe_load(config), torch.load(io.BytesIO(weights.read()), weights_only=True)


class Prompt(nn.Module):
    """The module into which NeMo 1.20 loads a table, by name and strictly."""

    def __init__(self, task: str, rows: int, width: int) -> None:
        super().__init__()
        inner = nn.Module()
        inner.prompt_embeddings = nn.Embedding(rows, width)
        self.prompt_table = nn.ModuleDict({task: inner})


@pytest.mark.parametrize(
    "template",
    [
        FULL,
        PromptTemplate(TEXT, (1, 5), answer_field="answer", eos=False),
        PromptTemplate("<|VIRTUAL_PROMPT_0|>{x} {y}", (6,)),
        PromptTemplate("é {x}:<|VIRTUAL_PROMPT_0|>", (6,), truncate_field="x"),
    ],
)
def test_nemo_export_and_import_round_trip(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: PromptTemplate
) -> None:
    target = tmp_path / "mood.nemo"
    reimported_path = tmp_path / "back.safetensors"
    file = save(tmp_path, template)
    assert run_adapters_command(capsys, "export", file, target, "--to", "nemo")[:2] == (
        0,
        f"{target}\n",
    )
    assert run_adapters_command(capsys, "import", target, reimported_path, "--name", "mood")[0] == 0
    reimported = open_adapter(reimported_path)
    assert torch.equal(reimported.table, TABLE) and reimported.table.dtype == torch.float32
    assert reimported.card.template == template and reimported.card.name == "mood"


def test_exported_config_has_every_field_that_nemo_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mood.nemo"
    file = save(tmp_path, FULL, stop=("\n",), max_new_tokens=3, task="moods")
    code, _, err = run_adapters_command(
        capsys, "export", file, target, "--to", "nemo", "--base-name", "gpt.nemo"
    )
    assert code == 0
    config, weights = open_nemo_adapter(target)
    (task,) = config["task_templates"]
    assert task == {
        "taskname": "mood",
        "prompt_template": TEXT,
        "total_virtual_tokens": 6,
        "virtual_token_splits": [4, 2],
        "truncate_field": "question",
        "answer_only_loss": True,
        "answer_field": "answer",
    }
    assert (config["existing_tasks"], config["new_tasks"]) == ([], ["mood"])
    assert config["language_model_path"] == "gpt.nemo"
    assert (config["virtual_prompt_style"], config["p_tuning"]["encoder_type"]) == (
        *("p-tuning", "embedding"),
    )
    assert (config["data"]["add_bos"], config["data"]["add_eos"]) == (True, True)
    prompt = Prompt("mood", 6, 4)
    prompt.load_state_dict(weights["prompt_table"])
    assert torch.equal(dict(prompt.named_parameters()).popitem()[1], TABLE)
    nn.Embedding(6, 4).load_state_dict(weights["embeddings"])
    assert torch.equal(weights["embeddings"]["weight"], TABLE)
    assert err.splitlines() == [
        "note: set inference.add_BOS=True in NeMo, which does not read it from the file",
        "note: the template has virtual tokens after text; NeMo places these correctly only at "
        "batch size 1",
        "note: the format has no field for the stops and the max_new_tokens and the description",
    ]


def test_rows_are_sorted_by_template_position_and_task_names_are_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "a.nemo"
    reimported_path = tmp_path / "back.safetensors"
    swapped = PromptTemplate("<|VIRTUAL_PROMPT_1|>{x}<|VIRTUAL_PROMPT_0|>{y}", (4, 2))
    file = save(tmp_path, swapped, name="v1.keys")
    code, _, err = run_adapters_command(capsys, "export", file, target, "--to", "nemo")
    assert code == 0 and "sorted by their position" in err and "the task is named 'v1_keys'" in err
    assert run_adapters_command(capsys, "import", target, reimported_path)[0] == 0
    reimported = open_adapter(reimported_path)
    assert torch.equal(reimported.table, torch.cat([TABLE[4:], TABLE[:4]]))
    assert reimported.card.template == PromptTemplate(
        "<|VIRTUAL_PROMPT_0|>{x}<|VIRTUAL_PROMPT_1|>{y}", (2, 4)
    )
    file = save(tmp_path, None, name="keys")
    code, _, err = run_adapters_command(
        capsys, "export", file, target, "--to", "nemo", "--overwrite"
    )
    assert code == 0 and "its rows are placed before {prompt}" in err and "gpt_model_file" in err
    config, weights = open_nemo_adapter(target)
    assert config["new_tasks"] == ["keys_"]
    Prompt("keys_", 6, 4).load_state_dict(weights["prompt_table"])


def test_bos_after_the_rows_becomes_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    model = write_native(lively(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    embedding = open_checkpoint(tmp_path / "model").read("embedding.word_embeddings.weight")
    table = torch.randn(3, CONFIG.hidden_size)
    two = "<|VIRTUAL_PROMPT_0|><|VIRTUAL_PROMPT_1|>{x}<|VIRTUAL_PROMPT_2|>"
    file = save(tmp_path, PromptTemplate(two, (1, 1, 1), bos="text"), table)
    target = tmp_path / "a.nemo"
    code, _, err = run_adapters_command(capsys, "export", file, target, "--to", "nemo")
    assert code == 1 and "give the base model with --model" in err and not target.exists()
    code, _, err = run_adapters_command(
        capsys, "export", file, target, "--to", "nemo", "--model", tmp_path / "model"
    )
    assert code == 0 and "became an extra row" in err, model
    config, weights = open_nemo_adapter(target)
    rows = torch.cat([table[:2], embedding[1:2].float(), table[2:]])
    assert torch.equal(weights["embeddings"]["weight"], rows)
    assert config["task_templates"][0]["virtual_token_splits"] == [1, 2, 1]
    assert config["data"]["add_bos"] is False
    # Without rows in front of it, NeMo adds the token itself.
    file = save(tmp_path, PromptTemplate("{x}<|VIRTUAL_PROMPT_0|>", (3,), bos="text"), table)
    assert (
        run_adapters_command(capsys, "export", file, target, "--to", "nemo", "--overwrite")[0] == 0
    )
    assert open_nemo_adapter(target)[0]["data"]["add_bos"] is True


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('<|VIRTUAL_PROMPT_0|>{"a": {x}}', "'{' in its text"),
        ("<|VIRTUAL_PROMPT_0|>{x} 5}", "'}' in its text"),
        ("<|VIRTUAL_PROMPT_0|><prompt_3>{x}", "'<prompt_3>' in its text"),
        ("<|VIRTUAL_PROMPT_0|>${x}", "'$' before a field in its text"),
    ],
)
def test_template_text_that_nemo_would_parse_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    file = save(tmp_path, PromptTemplate(text, (6,)))
    code, out, err = run_adapters_command(
        capsys, "export", file, tmp_path / "a.nemo", "--to", "nemo"
    )
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.nemo*"))


def test_existing_file_is_replaced_only_with_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = save(tmp_path, FULL)
    target = tmp_path / "a.nemo"
    target.write_bytes(b"x")
    assert (
        "exists already" in run_adapters_command(capsys, "export", file, target, "--to", "nemo")[2]
    )
    assert target.read_bytes() == b"x"
    assert (
        run_adapters_command(capsys, "export", file, target, "--to", "nemo", "--overwrite")[0] == 0
    )
    first_bytes = target.read_bytes()
    assert (
        run_adapters_command(capsys, "export", file, target, "--to", "nemo", "--overwrite")[0] == 0
    )
    assert target.read_bytes() == first_bytes
    for target_name in ("a.tar", "none/a.nemo"):
        output = run_adapters_command(
            capsys, "export", file, tmp_path / target_name, "--to", "nemo"
        )[2]
        assert "a file name that ends with .nemo" in output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.nemo", "source.safetensors"]
