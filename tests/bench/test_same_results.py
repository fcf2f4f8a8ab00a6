"""`python -m bench.same_results`: the table, usage errors, and a comparison with itself."""

import json
from pathlib import Path

import pytest

from bench import same_results
from bench.regression import conversion_results
from bench.regression.checkout_pair import ComparedRow

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_counts_and_lists_differences() -> None:
    rows = [
        ComparedRow("tuning", "a"),
        ComparedRow("tuning", "b", "from byte 1 on"),
        ComparedRow("requests", "c"),
    ]
    lines = list(same_results.format_table(rows))
    assert lines[1].split() == ["tuning", "2", "1", "1"]
    assert lines[2].split() == ["requests", "1", "1", "0"]
    assert lines[3:] == ["DIFFERS tuning: b: from byte 1 on"]


def test_invalid_arguments_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert same_results.main([str(tmp_path)]) == 2
    assert "has no preamble.py" in capsys.readouterr().err
    assert same_results.main([str(ROOT)]) == 2
    assert "is this checkout" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_info:
        same_results.main([str(tmp_path), "--only", "nothing"])
    assert exit_info.value.code == 2


# A conversion to each format, and conversions of earlier targets. The other ones differ from these
# only in the dtype and the split.
CONVERSIONS = (
    "demo-native",
    "demo-dist",
    "demo.nemo",
    "random-megatron",
    "random-hf",
    "demo-2x1",
    "demo-hf-sharded",
)


@pytest.mark.soak  # Each conversion is a process in either checkout, and takes seconds.
def test_a_copy_of_this_checkout_has_the_same_conversions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversions = [case for case in conversion_results.CONVERSIONS if case.target in CONVERSIONS]
    assert len(conversions) == len(CONVERSIONS)
    monkeypatch.setattr(conversion_results, "CONVERSIONS", conversions)
    other = tmp_path / "other"
    other.mkdir()
    for path in ROOT.iterdir():  # A second root with the same files.
        if path.name not in (".git", ".venv", "build", "preamble.py"):
            (other / path.name).symlink_to(path)
    (other / "preamble.py").write_bytes((ROOT / "preamble.py").read_bytes())
    code = same_results.main([str(other), "--only", "conversions", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0 and report["equal"] and len(report["rows"]) > 30
