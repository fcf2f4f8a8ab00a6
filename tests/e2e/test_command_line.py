"""The one command: what it knows, how it fails, and how quickly it helps."""

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import preamble
from tests.support.servers import ROOT, WAIT_S, command, write_checkpoint

HELP_S = 0.3


def test_help_names_every_command_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for word, known in preamble.COMMANDS.items():
        assert f"  {word:10}{known.line}" in lines


@pytest.mark.parametrize("word", preamble.COMMANDS)
def test_every_command_explains_itself(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = preamble.main([word, "--help"])
    except SystemExit as done:  # As argparse ends.
        code = done.code
    assert code == 0
    assert f"usage: preamble {word}" in capsys.readouterr().out


def test_help_costs_nothing() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = "import sys, preamble; preamble.main(['--help']); print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.stdout.endswith("False\n")
    assert after.ru_utime - before.ru_utime < HELP_S


def test_a_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("preamble ")


def test_what_is_no_command_is_misuse(capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["srve"]) == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err
    assert preamble.main(["xyz"]) == 2
    assert "known are: serve, generate, tune" in capsys.readouterr().err
    assert preamble.main([]) == 2


def test_a_prompt_is_completed_in_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "1 2 3", "--max-new-tokens", "5"]
    checkpoint = str(write_checkpoint(tmp_path, tokenizer=False))

    assert preamble.main([*words, "--model", checkpoint]) == 0
    first = capsys.readouterr().out
    assert preamble.main([*words, "--model", checkpoint]) == 0

    assert capsys.readouterr().out == first
    assert len(first.split()) == 5


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--temperature", "-1"], "temperature"),
        (["--max-new-tokens", "0"], "max_new_tokens"),
        (["--top-p", "2"], "top_p"),
        (["--seed", "-1"], "seed"),
        (["--stop", ""], "stops.strings"),
    ],
)
def test_flags_that_cannot_be_are_refused_before_anything_is_loaded(
    flags: list[str],
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = str(write_checkpoint(tmp_path, tokenizer=False))
    # Adapters are read after the weights, and this one would be in the log.
    (tmp_path / "broken.safetensors").write_bytes(b"not an adapter")
    words = ["generate", "1", "--model", checkpoint, "--adapters", str(tmp_path)]

    assert preamble.main([*words, *flags]) == 1

    assert word in capsys.readouterr().err
    assert "adapter_refused" not in caplog.text


@pytest.mark.parametrize(
    ("redirection", "sentence"),
    [
        (">&-", "preamble generate: stdout is closed, and the answer goes there; "),
        (">/dev/full", "preamble generate: stdout cannot be written (No space left on device); "),
    ],
)
def test_a_stdout_that_takes_nothing_is_told_in_one_sentence(
    redirection: str, sentence: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, tokenizer=False)
    words = command("generate", "1 2 3", "--model", checkpoint, "--max-new-tokens", "5")
    done = subprocess.run(
        f"{shlex.join(words)} {redirection}",
        shell=True,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.startswith(sentence)
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_what_a_terminal_cannot_show_becomes_a_question_mark(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "的 ☃", "--model", str(write_checkpoint(tmp_path))]
    words += ["--max-new-tokens", "200", "--temperature", "5", "--seed", "1"]
    ascii_ = subprocess.run(
        command(*words),
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert preamble.main(words) == 0
    whole = capsys.readouterr().out
    assert not whole.isascii()
    assert (ascii_.returncode, ascii_.stderr) == (0, b"")
    assert ascii_.stdout == whole.encode("ascii", errors="replace")


def test_a_failure_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["generate", "a", "--model", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("preamble generate: ")
    assert err.count("\n") == 1


def test_a_reader_that_leaves_is_no_fault(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, tokenizer=False)
    words = command("generate", "1 2 3", "--model", checkpoint, "--max-new-tokens", "3000")
    process = subprocess.Popen(
        words,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.wait(WAIT_S) == 1
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.stderr.close()
