"""The preamble command: help, failures, and start-up time."""

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
# Modules that take longer to import than the whole help text.
HEAVY = ("torch", "numpy", "grpc", "aiohttp", "yaml", "msgspec", "google.protobuf")


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for word, module in preamble.COMMANDS.items():
        assert f"  {word:10}{module.summary}" in lines


@pytest.mark.parametrize("word", preamble.COMMANDS)
def test_every_command_has_help(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = preamble.main([word, "--help"])
    except SystemExit as exit_error:  # Raised by argparse.
        code = exit_error.code
    assert code == 0
    assert f"usage: preamble {word}" in capsys.readouterr().out


def test_help_imports_no_slow_module() -> None:
    program = "import sys, preamble; preamble.main(['--help']); print(*sys.modules)"
    completed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded = completed.stdout.splitlines()[-1].split()
    assert "preamble" in loaded and not {*HEAVY} & {*loaded}


@pytest.mark.slow  # A time limit, which a busy machine may exceed.
def test_help_is_fast() -> None:
    usage_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    program = "import preamble; preamble.main(['--help'])"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, check=True)
    usage_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert usage_after.ru_utime - usage_before.ru_utime < HELP_S


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("preamble ")


def test_unknown_commands_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["srve"]) == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err
    assert preamble.main(["xyz"]) == 2
    assert "choose one of serve, generate, ray, tune" in capsys.readouterr().err
    assert preamble.main([]) == 2


def test_generate_completes_a_prompt_in_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "1 2 3", "--max-new-tokens", "5"]
    checkpoint = str(write_checkpoint(tmp_path, tokenizer=False))

    assert preamble.main([*arguments, "--model", checkpoint]) == 0
    output = capsys.readouterr().out
    assert preamble.main([*arguments, "--model", checkpoint]) == 0

    assert capsys.readouterr().out == output
    assert len(output.split()) == 5


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
def test_invalid_flags_are_refused_before_loading(
    flags: list[str],
    word: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    checkpoint = str(write_checkpoint(tmp_path, tokenizer=False))
    # Adapters are read after the weights, and reading this one would be logged.
    (tmp_path / "broken.safetensors").write_bytes(b"not an adapter")
    arguments = ["generate", "1", "--model", checkpoint, "--adapters", str(tmp_path)]

    assert preamble.main([*arguments, *flags]) == 1

    assert word in capsys.readouterr().err
    assert "adapter_refused" not in caplog.text


@pytest.mark.parametrize(
    ("redirection", "sentence"),
    [
        (">&-", "preamble generate: stdout is closed, but the command writes to it; "),
        (">/dev/full", "preamble generate: stdout cannot be written (No space left on device); "),
    ],
)
def test_write_errors_of_stdout_are_one_sentence(
    redirection: str, sentence: str, tmp_path: Path
) -> None:
    checkpoint = write_checkpoint(tmp_path, tokenizer=False)
    arguments = command("generate", "1 2 3", "--model", checkpoint, "--max-new-tokens", "5")
    completed = subprocess.run(
        f"{shlex.join(arguments)} {redirection}",
        shell=True,
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert completed.returncode == 1
    assert completed.stderr.startswith(sentence)
    assert completed.stderr.count("\n") == 1


@pytest.mark.slow
def test_unencodable_characters_become_question_marks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["generate", "的 ☃", "--model", str(write_checkpoint(tmp_path))]
    arguments += ["--max-new-tokens", "200", "--temperature", "5", "--seed", "1"]
    ascii_ = subprocess.run(
        command(*arguments),
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
    )
    assert preamble.main(arguments) == 0
    output = capsys.readouterr().out
    assert not output.isascii()
    assert (ascii_.returncode, ascii_.stderr) == (0, b"")
    assert ascii_.stdout == output.encode("ascii", errors="replace")


def test_failures_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preamble.main(["generate", "a", "--model", str(tmp_path / "nothing")]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("preamble generate: ")
    assert err.count("\n") == 1


def test_closed_pipes_are_no_failure(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, tokenizer=False)
    arguments = command("generate", "1 2 3", "--model", checkpoint, "--max-new-tokens", "3000")
    process = subprocess.Popen(
        arguments,
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
