"""What is exported for NeMo: its layout, and back again the same rows and the same template."""

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
from gpt.adapters.prompt_template import Template
from gpt.formats.registry import open_checkpoint
from tests.support.adapter_exchange import run
from tests.support.models import lively
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

TABLE = torch.arange(24, dtype=torch.float32).reshape(6, 4) / 8 + 0.125
TEXT = "<|VIRTUAL_PROMPT_0|>Q: {question}\nIs it<|VIRTUAL_PROMPT_1|> {answer}"
FULL = Template(TEXT, (4, 2), truncate_field="question", answer_field="answer", bos="first")


def saved(folder: Path, template: Template | None, table: Tensor = TABLE, **card: Any) -> Path:
    path = folder / "source.safetensors"
    save_adapter(build_adapter(Card(**{"name": "mood", "template": template} | card), table), path)
    return path


def opened(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """As NeMo opens it: a plain tar of a config and of what torch saved."""
    with tarfile.open(path, "r:") as archive:
        assert archive.getnames() == ["./model_config.yaml", "./model_weights.ckpt"]
        config, weights = (archive.extractfile(name) for name in archive.getnames())
        assert config is not None and weights is not None
        return yaml.safe_load(config), torch.load(io.BytesIO(weights.read()), weights_only=True)


class Prompt(nn.Module):
    """What NeMo 1.20 loads a table into, by name and strictly."""

    def __init__(self, task: str, rows: int, width: int) -> None:
        super().__init__()
        inner = nn.Module()
        inner.prompt_embeddings = nn.Embedding(rows, width)
        self.prompt_table = nn.ModuleDict({task: inner})


@pytest.mark.parametrize(
    "template",
    [
        FULL,
        Template(TEXT, (1, 5), answer_field="answer", eos=False),
        Template("<|VIRTUAL_PROMPT_0|>{x} {y}", (6,)),
        Template("é {x}:<|VIRTUAL_PROMPT_0|>", (6,), truncate_field="x"),
    ],
)
def test_there_and_back_the_rows_and_the_template_are_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: Template
) -> None:
    target, back = tmp_path / "mood.nemo", tmp_path / "back.safetensors"
    file = saved(tmp_path, template)
    assert run(capsys, "export", file, target, "--to", "nemo")[:2] == (0, f"{target}\n")
    assert run(capsys, "import", target, back, "--name", "mood")[0] == 0
    found = open_adapter(back)
    assert torch.equal(found.table, TABLE) and found.table.dtype == torch.float32
    assert found.card.template == template and found.card.name == "mood"


def test_nemo_finds_every_name_that_it_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "mood.nemo"
    file = saved(tmp_path, FULL, stop=("\n",), max_new_tokens=3, task="moods")
    code, _, err = run(*(capsys, "export", file, target, "--to", "nemo", "--base-name", "gpt.nemo"))
    assert code == 0
    config, weights = opened(target)
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
        "note: NeMo places rows that stand after a text rightly only in batches of one",
        "note: that format has no place for the stops and the max_new_tokens and the description",
    ]


def test_rows_stand_in_the_order_of_the_text_and_names_are_a_modules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, back = tmp_path / "a.nemo", tmp_path / "back.safetensors"
    swapped = Template("<|VIRTUAL_PROMPT_1|>{x}<|VIRTUAL_PROMPT_0|>{y}", (4, 2))
    file = saved(tmp_path, swapped, name="v1.keys")
    code, _, err = run(capsys, "export", file, target, "--to", "nemo")
    assert code == 0 and "put into the order" in err and "it is 'v1_keys' there" in err
    assert run(capsys, "import", target, back)[0] == 0
    found = open_adapter(back)
    assert torch.equal(found.table, torch.cat([TABLE[4:], TABLE[:4]]))
    assert found.card.template == Template("<|VIRTUAL_PROMPT_0|>{x}<|VIRTUAL_PROMPT_1|>{y}", (2, 4))
    file = saved(tmp_path, None, name="keys")
    code, _, err = run(capsys, "export", file, target, "--to", "nemo", "--overwrite")
    assert code == 0 and "its rows stand before {prompt}" in err and "gpt_model_file" in err
    config, weights = opened(target)
    assert config["new_tasks"] == ["keys_"]
    Prompt("keys_", 6, 4).load_state_dict(weights["prompt_table"])


def test_a_begin_token_after_the_rows_becomes_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    model = write_native(lively(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    words = open_checkpoint(tmp_path / "model").read("embedding.word_embeddings.weight")
    table = torch.randn(3, CONFIG.hidden_size)
    two = "<|VIRTUAL_PROMPT_0|><|VIRTUAL_PROMPT_1|>{x}<|VIRTUAL_PROMPT_2|>"
    file = saved(tmp_path, Template(two, (1, 1, 1), bos="text"), table)
    target = tmp_path / "a.nemo"
    code, _, err = run(capsys, "export", file, target, "--to", "nemo")
    assert code == 1 and "give its model with --model" in err and not target.exists()
    code, _, err = run(
        capsys, "export", file, target, "--to", "nemo", "--model", tmp_path / "model"
    )
    assert code == 0 and "became a row of its own" in err, model
    config, weights = opened(target)
    rows = torch.cat([table[:2], words[1:2].float(), table[2:]])
    assert torch.equal(weights["embeddings"]["weight"], rows)
    assert config["task_templates"][0]["virtual_token_splits"] == [1, 2, 1]
    assert config["data"]["add_bos"] is False
    # Without rows in front of it the token is NeMo's own.
    file = saved(tmp_path, Template("{x}<|VIRTUAL_PROMPT_0|>", (3,), bos="text"), table)
    assert run(capsys, "export", file, target, "--to", "nemo", "--overwrite")[0] == 0
    assert opened(target)[0]["data"]["add_bos"] is True


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('<|VIRTUAL_PROMPT_0|>{"a": {x}}', "'{' in its text"),
        ("<|VIRTUAL_PROMPT_0|>{x} 5}", "'}' in its text"),
        ("<|VIRTUAL_PROMPT_0|><prompt_3>{x}", "'<prompt_3>' in its text"),
        ("<|VIRTUAL_PROMPT_0|>${x}", "'$ before a field' in its text"),
    ],
)
def test_what_nemo_would_take_for_something_else_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, words: str
) -> None:
    file = saved(tmp_path, Template(text, (6,)))
    code, out, err = run(capsys, "export", file, tmp_path / "a.nemo", "--to", "nemo")
    assert (code, out) == (1, "") and words in err and err.count("\n") == 1
    assert not list(tmp_path.glob("*.nemo*"))


def test_a_file_that_is_there_stays_unless_it_may_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = saved(tmp_path, FULL), tmp_path / "a.nemo"
    target.write_bytes(b"x")
    assert "exists already" in run(capsys, "export", file, target, "--to", "nemo")[2]
    assert target.read_bytes() == b"x"
    assert run(capsys, "export", file, target, "--to", "nemo", "--overwrite")[0] == 0
    first = target.read_bytes()
    assert run(capsys, "export", file, target, "--to", "nemo", "--overwrite")[0] == 0
    assert target.read_bytes() == first
    for other in ("a.tar", "none/a.nemo"):
        said = run(capsys, "export", file, tmp_path / other, "--to", "nemo")[2]
        assert "NeMo takes a .nemo file" in said
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.nemo", "source.safetensors"]
