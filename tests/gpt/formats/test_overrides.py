"""Overrides of checkpoint fields by users, in the programs that serve and tune."""

import json
from pathlib import Path

import pytest

import preamble
from checkpoints_tools.conversion.convert import write_native
from gpt.errors import ConfigError
from gpt.formats.overrides import open_with_overrides, read_overrides
from tests.support.models import CLASSIC, lively
from tests.support.trained_tokenizers import sentencepiece_model


def test_override_files_and_vocab_size_are_applied(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"layernorm_epsilon": 1e-6}))
    changes = read_overrides(str(tmp_path / "c.json"), 90)
    assert changes == {"layernorm_epsilon": 1e-6, "vocab_size": 90}
    write_native(lively(CLASSIC), tmp_path / "m")
    opened = open_with_overrides(str(tmp_path / "m"), changes)
    assert (opened.config.vocab_size, opened.config.layernorm_epsilon) == (90, 1e-6)
    assert opened.tensors["embedding.word_embeddings.weight"].shape == (90, 32)
    assert opened.identity is None  # It is another model than the one on disk.


@pytest.mark.parametrize(
    ("text", "size", "message"),
    [
        ("{", None, "is not JSON"),
        ("[1]", None, "is not a JSON object; it must map field names to values"),
        ('{"layernorm_epsilom": 1}', None, "did you mean 'layernorm_epsilon'"),
        ('{"vocab_size": 7}', 8, "remove one of them"),
        ("{}", 0, "must be a whole number of at least 1"),
    ],
)
def test_invalid_overrides_are_refused(
    text: str, size: int | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_overrides(str(tmp_path / "c.json"), size)


def test_tokenizers_can_be_given_separately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native(lively(CLASSIC.with_fields(vocab_size=1000)), tmp_path / "m")
    model = tmp_path / "words.model"
    model.write_bytes(sentencepiece_model())
    arguments = ["generate", "Once", "--model", str(tmp_path / "m"), "--max-new-tokens", "2"]
    assert preamble.main([*arguments, "--tokenizer", str(model)]) == 0
    capsys.readouterr()
    assert preamble.main([*arguments, "--tokenizer", str(tmp_path / "none")]) == 1
    assert "none does not exist; give a tokenizer file" in capsys.readouterr().err
