"""Adapters come from PEFT, TGIS and NeMo and go back, by the command; PEFT itself is the oracle."""

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
from gpt.adapters.prompt_template import Template
from gpt.checkpoint.digest import identify
from gpt.formats.registry import open_checkpoint
from tests.support.adapter_exchange import CONFIG_1, TABLE, TASK, TEXT, WIDTH, V, nemo, run
from tests.support.checkpoints.hf_models import VOCABULARY, ids, model_of
from tests.support.models import lively
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@pytest.fixture(scope="module", params=["gpt2", "llama, multi-head"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model of transformers', and the directory that it saved itself to."""
    theirs = model_of(request.param)
    folder = tmp_path_factory.mktemp("base")
    theirs.save_pretrained(folder)
    return theirs, folder


@torch.no_grad()
def ours(folder: Path, table: Tensor, tokens: Tensor) -> Tensor:
    """The logits after virtual tokens that stand before a text."""
    virtual = (VOCABULARY + torch.arange(len(table))).expand(len(tokens), -1)
    return gpt.load(folder).logits(torch.cat([virtual, tokens], 1), table)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # Between peft and transformers.
@pytest.mark.parametrize("kind", ["PROMPT_TUNING", "P_TUNING"])
def test_what_peft_saved_gives_pefts_own_logits_once_imported(
    base: "tuple[PreTrainedModel, Path]",
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    import peft

    theirs, folder = base
    common: Any = {"task_type": "CAUSAL_LM", "num_virtual_tokens": V}
    config: Any = peft.PromptTuningConfig(**common)
    if kind == "P_TUNING":
        config = peft.PromptEncoderConfig(
            **common, encoder_reparameterization_type="LSTM", encoder_hidden_size=6
        )
    tuned: Any = peft.get_peft_model(theirs, config).eval()
    tuned.save_pretrained(tmp_path / "tuned")
    tokens = ids(2, 16)
    with torch.no_grad():
        wanted = tuned(tokens).logits

    code, out, err = run(
        *(capsys, "import", tmp_path / "tuned", tmp_path / "mood@2.safetensors"),
        *("--model", folder, "--description", "moods", "--stop", "\n", "--max-new-tokens", "7"),
        *("--template", "Text: {text}\nMood:", "--truncate-field", "text", "--json"),
    )

    assert (code, err) == (0, "")
    adapter = open_adapter(tmp_path / "mood@2.safetensors")
    assert (ours(folder, adapter.table, tokens) - wanted).abs().max() < 1e-4
    card, identity = adapter.card, identify(open_checkpoint(folder))
    assert (card.name, card.task, card.stop, card.max_new_tokens) == ("mood", "moods", ("\n",), 7)
    assert (card.base_digest, card.base_fingerprint) == (identity.digest, identity.fingerprint)
    assert card.template == Template(
        "<|VIRTUAL_PROMPT_0|>Text: {text}\nMood:", (V,), truncate_field="text"
    )
    assert json.loads(out)["digest"] == adapter.digest


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_what_is_exported_gives_the_same_logits_in_peft(
    base: "tuple[PreTrainedModel, Path]", tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    theirs, folder = base
    torch.manual_seed(0)
    table, tokens = torch.randn(V, WIDTH), ids(2, 16)
    # The rows stand in another order than in the table.
    template = Template("<|VIRTUAL_PROMPT_1|><|VIRTUAL_PROMPT_0|>{text}", (2, 1))
    digest = identify(open_checkpoint(folder)).digest
    card = Card("mood", base_digest=digest, template=template, stop=("\n",))
    save_adapter(build_adapter(card, table), tmp_path / "mood.safetensors")

    code, out, err = run(
        *(capsys, "export", tmp_path / "mood.safetensors", tmp_path / "peft"),
        *("--to", "peft", "--model", folder, "--base-name", "acme/base"),
    )

    assert (code, out) == (0, f"{tmp_path / 'peft'}\n")
    assert "no place for the template and the stop strings" in err and "special tokens" in err
    tuned: Any = peft.PeftModel.from_pretrained(theirs, str(tmp_path / "peft")).eval()
    with torch.no_grad():
        found = tuned(tokens).logits[:, V:]
    wanted = ours(folder, table[[2, 0, 1]], tokens)[:, V:]
    assert (found - wanted).abs().max() < 1e-4
    told = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (told["num_layers"], told["base_model_name_or_path"]) == (3, "acme/base")
    assert torch.equal(open_adapter(tmp_path / "peft").table, table[[2, 0, 1]])


def named(task: str = "mood", table: Tensor = TABLE) -> dict[str, Tensor]:
    return {
        f"prompt_table.{task}.prompt_embeddings.weight": table,
        f"prompt_table.{task}.indices": torch.arange(len(table)),
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "1.9, flat": {"state": named()},
    "1.16, two tasks": {
        "state": {"prompt_table": named() | named("other", TABLE * 2)},
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
    "unpacked, in bf16": {"state": {"prompt_table": named(table=TABLE.bfloat16())}, "pack": "dir"},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_layout_of_nemos_prompt_learning_is_read_with_its_template(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    layout: str,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = nemo(tmp_path, **LAYOUTS[layout])
    (tmp_path / "adapters").mkdir()
    task = ["--task", "mood"] if "two" in layout else []

    code, out, _ = run(capsys, "import", source, tmp_path / "adapters", *task)

    assert code == 0
    adapter = open_adapter(tmp_path / "adapters" / "mood@1.safetensors")
    assert torch.equal(adapter.table, TABLE)
    assert adapter.card.template == Template(
        TEXT, (2, 1), truncate_field="question", answer_field="answer", bos="first"
    )
    assert "no --model was given" in out and str(tmp_path / "adapters") in out


def test_an_adapter_inside_nemos_model_loses_the_positions_that_are_in_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs: Any = model_of("gpt2")
    theirs.save_pretrained(tmp_path / "base")
    torch.manual_seed(1)
    rows, tokens = torch.randn(V, WIDTH), ids(1, 8)
    state = {
        "model.embedding.adapter_layer.ptuning_adapter.inference_table": rows,
        "model.embedding.adapter_layer.ptuning_adapter.embedding.weight": torch.randn(V, 9),
    }
    source = nemo(tmp_path, state, {"position_embedding_type": "learned_absolute"})
    target = tmp_path / "mood.safetensors"

    def swap(module: Any, args: Any, output: Tensor) -> Tensor:
        return torch.cat([rows[None], output[:, V:]], 1)

    # As NeMo runs it: any ids stand first, and what they became with positions is replaced.
    held = theirs.transformer.drop.register_forward_hook(swap)
    with torch.no_grad():
        wanted = theirs(torch.cat([torch.zeros(1, V, dtype=torch.long), tokens], 1)).logits
    held.remove()

    code, _, err = run(capsys, "import", source, target)
    assert code == 1 and "give the model it was trained on with --model" in err
    assert run(capsys, "import", source, target, "--model", tmp_path / "base")[0] == 0
    found = ours(tmp_path / "base", open_adapter(target).table, tokens)
    assert (found - wanted).abs().max() < 1e-4

    rotary = nemo(tmp_path / "r", state, {"position_embedding_type": "rope"})
    assert torch.equal(open_adapter(rotary).table, rows)


@pytest.mark.parametrize(
    ("state", "config", "message"),
    [
        (named(table=TABLE * 0), CONFIG_1, "is all zeros, or not finite, as NeMo saves it"),
        (named(table=TABLE / 0), CONFIG_1, "is all zeros, or not finite"),
        (named() | named("b"), CONFIG_1, "has several tasks; say which of b, mood"),
        ({"model.word": TABLE}, CONFIG_1, "holds no prompt that NeMo learned, but model.word"),
        ([TABLE], CONFIG_1, "is a list, not a model's state"),
        (named(table=TABLE.long()), CONFIG_1, r"is torch\.int64"),
        (named() | {"prompt_table.b.prompt_embeddings.weight": "x"}, CONFIG_1, "is a str, where"),
        ({5: TABLE}, CONFIG_1, "holds no prompt that NeMo learned, but 5"),
        (named(), {"task_templates": [TASK | {"virtual_token_splits": [2]}]}, "and 1 splits"),
        (named(), {"task_templates": [TASK | {"prompt_template": 5}]}, "needed are a text"),
        (named(table=TABLE[:2]), CONFIG_1, "has 3 virtual tokens, its table 2 rows"),
    ],
)
def test_a_nemo_file_without_a_whole_prompt_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], state: Any, config: Any, message: str
) -> None:
    code, out, err = run(
        capsys, "import", nemo(tmp_path, state, config), tmp_path / "a.safetensors"
    )
    assert (code, out) == (1, "")
    assert re.search(message, err) and err.count("\n") == 1
    assert not list(tmp_path.glob("*a.safetensors*"))


def saved(path: Path, template: Template | None = None, table: Tensor = TABLE) -> Path:
    save_adapter(build_adapter(Card("a", template=template), table), path)
    return path


def test_a_begin_token_before_the_rows_is_exported_as_a_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    write_native(lively(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    table = torch.randn(V, CONFIG.hidden_size)
    bos_first = Template("<|VIRTUAL_PROMPT_0|>{x}", (V,), bos="first")
    file = saved(tmp_path / "a.safetensors", bos_first, table)

    code, _, err = run(capsys, "export", file, tmp_path / "t", "--to", "tgis")
    assert code == 1 and "give its model with --model" in err and not (tmp_path / "t").exists()
    code, _, err = run(
        capsys, "export", file, tmp_path / "t", "--to", "tgis", "--model", tmp_path / "model"
    )
    assert code == 0 and "the first row is the begin-of-text token" in err
    words = open_checkpoint(tmp_path / "model").read("embedding.word_embeddings.weight")
    assert torch.equal(
        torch.load(tmp_path / "t" / "decoder.pt", weights_only=True), torch.cat([words[1:2], table])
    )


def test_rows_after_a_text_cannot_be_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "a.safetensors", Template("{x}<|VIRTUAL_PROMPT_0|>", (V,)))
    code, _, err = run(capsys, "export", file, tmp_path / "t", "--to", "peft")
    assert code == 1 and "virtual tokens after some of its text" in err


def test_what_lies_at_a_target_stays_unless_it_may_go(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = saved(tmp_path / "a.safetensors"), saved(tmp_path / "b.safetensors")
    before = first.read_bytes()
    assert "exists already; give --overwrite" in run(capsys, "import", second, first)[2]
    assert first.read_bytes() == before
    assert run(capsys, "import", second, first, "--overwrite")[0] == 0

    target = tmp_path / "t"
    assert run(capsys, "export", first, target, "--to", "tgis")[0] == 0
    assert "exists already, with decoder.pt" in run(capsys, "export", first, target, "--to=peft")[2]
    assert run(capsys, "export", first, target, "--to", "peft", "--overwrite")[0] == 0
    assert sorted(os.listdir(target)) == ["adapter_config.json", "adapter_model.safetensors"]
    (target / "thesis.tex").touch()
    code, _, err = run(capsys, "export", first, target, "--to", "peft", "--overwrite")
    assert code == 1 and "holds thesis.tex, which is not an adapter's" in err
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors", "t"]


@pytest.mark.parametrize("action", ["import", "export"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    action: str,
) -> None:
    file = saved(tmp_path / "a.safetensors")
    target = tmp_path / ("b.safetensors" if action == "import" else "b")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    code, out, err = run(capsys, action, file, target, *(["--to=peft"] * (action == "export")))
    assert (code, out) == (1, "") and "cannot be written: No space left" in err
    assert os.listdir(tmp_path) == ["a.safetensors"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--name", "a@1"], "leave the version out"),
        (["--name", "../a"], "is no adapter's name"),
        (["--bos", "text"], "has no template, whose the flags bos are; give --template"),
        (["--template", "<|VIRTUAL_PROMPT_1|>"], "number the markers from 0"),
        (["--template", "@nothing"], "nothing cannot be read"),
        (["--template", "{x}", "--truncate-field", "y"], "'y' is not in the template"),
        (["--stop", ""], "a stop of 0 bytes"),
        (["--model", "nothing"], "nothing"),
    ],
)
def test_what_is_wrong_with_the_flags_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    file = saved(tmp_path / "a.safetensors")
    code, out, err = run(capsys, "import", file, tmp_path / "b.safetensors", *words)
    assert (code, out) == (1, "") and message in err and err.count("\n") == 1
    assert os.listdir(tmp_path) == ["a.safetensors"]


def test_an_adapter_of_another_model_is_neither_imported_nor_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native(lively(CONFIG), tmp_path / "model")
    table = torch.randn(V, CONFIG.hidden_size)
    other: Adapter = build_adapter(Card("a", base_digest="0" * 64), table)
    save_adapter(other, tmp_path / "a.safetensors")
    source, target, model = (
        tmp_path / name for name in ("a.safetensors", "b.safetensors", "model")
    )
    for words in (["import"], ["export", "--to", "peft"]):
        code, _, err = run(capsys, *words, source, target, "--model", model)
        assert code == 1 and "was trained on the model 000000000000" in err
    assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "model"]
    safetensors.torch.save_file({"table": table}, tmp_path / "c.safetensors")
    assert "nothing says that they are an adapter" in run(
        capsys, "import", tmp_path / "c.safetensors", tmp_path / "b.safetensors"
    )[2]  # fmt: skip


def test_a_place_where_no_adapter_can_be_is_refused_before_a_model_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = saved(tmp_path / "a.safetensors")
    for target in ("b.txt", "nowhere/b.safetensors"):
        code, _, err = run(capsys, "import", file, tmp_path / target, "--model", "nothing")
        assert code == 1 and "cannot be written; give a directory that is there" in err
    assert os.listdir(tmp_path) == ["a.safetensors"]
