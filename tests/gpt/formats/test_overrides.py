"""What a user knows better than the files, told to the programs that serve and tune."""

import json
from pathlib import Path

import pytest

import preamble
from checkpoints_tools.conversion.convert import write_native
from gpt.errors import ConfigError
from gpt.formats.overrides import open_overridden, read_overrides
from tests.support.models import CLASSIC, lively
from tests.support.trained_tokenizers import sentencepiece_model


def test_a_file_of_fields_and_a_size_become_changes(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps({"layernorm_epsilon": 1e-6}))
    changes = read_overrides(str(tmp_path / "c.json"), 90)
    assert changes == {"layernorm_epsilon": 1e-6, "vocab_size": 90}
    write_native(lively(CLASSIC), tmp_path / "m")
    found = open_overridden(str(tmp_path / "m"), changes)
    assert (found.config.vocab_size, found.config.layernorm_epsilon) == (90, 1e-6)
    assert found.tensors["embedding.word_embeddings.weight"].shape == (90, 32)
    assert found.identity is None  # Another model than the one that was written.


@pytest.mark.parametrize(
    ("text", "size", "says"),
    [
        ("{", None, "is not JSON"),
        ("[1]", None, "is not a JSON object of fields and values"),
        ('{"layernorm_epsilom": 1}', None, "did you mean 'layernorm_epsilon'"),
        ('{"vocab_size": 7}', 8, "give one of them"),
        ("{}", 0, "must be a whole number of at least 1"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(
    text: str, size: int | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "c.json").write_text(text)
    with pytest.raises(ConfigError, match=says):
        read_overrides(str(tmp_path / "c.json"), size)


def test_a_model_without_a_tokenizer_is_given_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_native(lively(CLASSIC.with_fields(vocab_size=1000)), tmp_path / "m")
    model = tmp_path / "words.model"
    model.write_bytes(sentencepiece_model())
    words = ["generate", "Once", "--model", str(tmp_path / "m"), "--max-new-tokens", "2"]
    assert preamble.main([*words, "--tokenizer", str(model)]) == 0
    capsys.readouterr()
    assert preamble.main([*words, "--tokenizer", str(tmp_path / "none")]) == 1
    assert "none does not exist; give its file" in capsys.readouterr().err
