"""Commands of the documents: each command in a ```sh block runs as a reader would run it.

Importing torch takes seconds, so only the first command that loads torch gets its own process.
NOT_RUN lists the commands that take minutes or wait for input, with the reason and with the test
that runs them. For these commands the tests check that the make target, the subcommand and the
flags exist.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import preamble

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "ARCHITECTURE.md",
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    "examples/demo/README.md",
    "examples/real_model/README.md",
)
COMMAND_SECONDS_MAX = 600  # Time limit for a command that hangs; a command takes seconds.

# Maps the beginning of a command to the reason why this test does not run it.
NOT_RUN = {
    "git clone": "it creates a checkout, and the test runs in one",
    "cd": "the test runs in that folder",
    "make setup": "it created the environment that runs this test",
    "make demo": "tests/e2e/test_demo.py runs it",
    "make real-model": "it downloads packages; tests/e2e/test_real_model.py runs its other steps",
    "make serve-demo": "it serves until it is stopped",
    "make test": "it runs this test",
    "make check": "it runs separately from the test suite",
    "make test-slow": "it takes minutes, and runs after this test",
    "make test-clients": "it takes minutes, and runs after this test",
    "make clients-tools": "it downloads packages",
    "make test-gpu": "it needs a CUDA device",
    "make gpu-proof": "it needs a CUDA device; tests/bench/gpu_proof rehearses it",
    "make bench": "it takes minutes, and other tests would disturb its timings",
    "make wheel": "test_wheel.py builds a wheel",
    "build/clients/envoy/bin/envoy": "it serves until it is stopped; tests/scale_out runs it",
    "vllm-router": "it serves until it is stopped; tests/scale_out/test_routers.py runs it",
    "python -m sglang_router.launch_router": "it serves until it is stopped; "
    "tests/scale_out/test_routers.py runs it",
    "smg launch": "it serves until it is stopped; tests/scale_out/test_routers.py runs it",
    "preamble ray": "it needs a Ray cluster; tests/scale_out/test_ray.py runs it",
    "ray start": "it starts a Ray cluster",
    "preamble serve": "it serves until it is stopped",
    "preamble generate --server": "it calls a running server; tests/clients/test_client.py runs it",
    "preamble bench": "it calls a running server; tests/clients/load/test_generator.py runs it",
    "preamble tune examples/tune/one.yaml": "it takes a while; "
    "tests/ptuning/test_config.py runs all files of that folder",
    "preamble tune --evaluate": "it needs an adapter; "
    "tests/ptuning/evaluation/test_answer_metrics.py has one",
    "preamble plan serve": "it simulates a load for seconds; "
    "tests/planning/cli/test_commands.py runs it",
    "preamble plan train gpt3-175b": "it searches for seconds; "
    "docs/planning.md has a similar command that runs",
    "preamble plan train --tune": "it needs a tune file; "
    "tests/planning/training/test_search.py writes and uses such a file",
    "preamble tune --check build/plan/tune/train_config.yaml": "the command in the line above "
    "writes that file",
    "preamble adapters": "it needs an adapter or a server; "
    "tests/checkpoints_tools/adapters/test_exchange.py and "
    "tests/clients/cli/test_adapters.py run it",
    "python examples/usage/sum_usage.py": "it needs a usage file; tests/e2e/test_usage.py runs it",
    "S=localhost:9000": "it sets a variable for the next lines",
    "grpcurl": "it is an external program, and calls a running server",
    "curl": "it is an external program, and calls a running server",
    "lm_eval": "it calls a running server; tests/third_party_clients/test_lm_eval.py runs it",
    "TOKEN=$(openssl": "openssl is an external program",
    "printf": "it needs the token",
}


# Commands that load torch. The first of them in the documents runs in its own process, as a reader
# would run it. The others run in the test's process, because imports would take most of their time.
TORCH_COMMANDS = (
    "preamble inspect ",
    "preamble convert ",
    "preamble verify ",
    "preamble tune --check ",
    "preamble plan ",
)


class Command(NamedTuple):
    location: str  # file:line
    line: str

    @property
    def is_not_run(self) -> bool:
        return any(f"{self.line} ".startswith(f"{start} ") for start in NOT_RUN)


def commands() -> Iterator[Command]:
    for document in DOCUMENTS:
        if not (ROOT / document).exists():
            continue
        text = (ROOT / document).read_text("utf-8")
        for block in re.finditer(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            first_line = text[: block.start(1)].count("\n") + 1
            yield from commands_of_block(document, first_line, block[1])


def commands_of_block(document: str, first_line: int, block: str) -> Iterator[Command]:
    line = ""
    for number, part in enumerate(block.splitlines(), first_line):
        line += re.sub(r"(^|\s)#.*", "", part).strip()
        if line.endswith("\\"):
            line = line[:-1]
        elif line:
            yield Command(f"{document}:{number}", line)
            line = ""


def run(line: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, in the environment that `make setup` created."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        ["bash", "-c", line],
        cwd=ROOT,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS_MAX,
        check=False,
    )


def command_id(command: Command) -> str:
    return f"{command.location}: {command.line}"


RUN = [command for command in commands() if not command.is_not_run]
LOADING_TORCH = [command for command in RUN if command.line.startswith(TORCH_COMMANDS)]


@pytest.mark.parametrize("command", RUN, ids=command_id)
def test_a_command_of_the_documents_runs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if command in LOADING_TORCH[1:]:
        monkeypatch.chdir(ROOT)
        assert preamble.main(shlex.split(command.line)[1:]) == 0, command
        return
    process = run(command.line)
    output = process.stdout + process.stderr
    assert process.returncode == 0, f"{command.location}: {command.line}\n{output}"


@pytest.mark.parametrize("command", [c for c in commands() if c.is_not_run], ids=command_id)
def test_a_command_that_is_not_run_exists(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *arguments = shlex.split(command.line)
    if program == "make":
        process = run(f"make -n {shlex.join(arguments)}")
        assert process.returncode == 0, f"{command.location}: {process.stderr}"
    elif program == "preamble":
        flags = {word.split("=")[0] for word in arguments if word.startswith("--")}
        # Each subcommand of a group has its own flags; so has `generate --server`.
        subcommand = arguments[: 2 if arguments[0] in ("adapters", "plan", "ray") else 1]
        server = ["--server", "x:1"] if "--server" in flags else []
        with pytest.raises(SystemExit) as exit_info:
            preamble.main([*subcommand, *server, "--help"])
        output = capsys.readouterr()
        missing = {flag for flag in flags if not re.search(rf"{flag}\b", output.out)}
        assert exit_info.value.code == 0, f"{command.location}: {output.err}"
        assert not missing, f"{command.location}: preamble {arguments[0]} has no {missing}"


def test_the_readme_and_contributing_have_commands() -> None:
    assert {command.location.split(":")[0] for command in commands()} >= set(DOCUMENTS[:2])


def test_comments_are_removed_and_continued_lines_are_joined() -> None:
    block = "make demo  # the main job\n\n# nothing\npreamble generate \\\n  hello\n"
    lines = [command.line for command in commands_of_block("x.md", 1, block)]
    assert lines == ["make demo", "preamble generate hello"]
