"""Every command in the documents runs: what stands in a ```sh block is run as a reader would.

Of those that load torch, which takes seconds, only the first has a process of its own. What costs
minutes, or waits for someone, is listed with the reason and with where it is run for real; of such
a command it is still checked that the target, the subcommand and the flags exist.
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
    *("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md"),
    *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    "examples/demo/README.md",
)
COMMAND_SECONDS_MAX = 60

# The beginning of a command: why it is not run here.
NOT_RUN = {
    "git clone": "this checkout is what it makes",
    "cd": "this is where it leads",
    "make setup": "it made the environment that runs this test",
    "make demo": "tests/e2e/test_demo.py runs it",
    "make serve-demo": "it serves until it is stopped",
    "make test": "it runs this test",
    "make check": "it runs beside this test",
    "make test-slow": "it takes minutes, and runs after this test",
    "make test-gpu": "it needs a CUDA device",
    "make bench": "it takes minutes, and a timing says nothing beside other tests",
    "make wheel": "test_wheel.py builds one",
    "preamble serve": "it serves until it is stopped",
    "preamble generate --server": "it asks a running server; tests/clients/test_client.py does",
    "preamble bench": "it asks a running server; tests/clients/load/test_generator.py does",
    "preamble tune examples/tune/one.yaml": "it takes a while; "
    "tests/ptuning/test_config.py runs all "
    "that are there",
    "preamble tune --evaluate": "it needs an adapter, as "
    "tests/ptuning/evaluation/test_answer_metrics.py has one",
    "preamble plan serve": "it plays a load for seconds; tests/planning/cli/test_commands.py does",
    "preamble plan train gpt3-175b": "it searches for seconds; docs/planning.md has the like",
    "preamble plan train --tune": "tests/planning/training/test_search.py writes one, and runs it",
    "preamble tune --check build/plan/tune/train_config.yaml": "the line above it writes that",
    "preamble adapters": "it needs an adapter or a server, as "
    "tests/checkpoints_tools/adapters/test_exchange.py and "
    "tests/clients/cli/test_adapters.py have them",
    "S=localhost:9000": "the lines after it use it",
    "grpcurl": "it is a program of others, and asks a running server",
    "curl": "it is a program of others, and asks a running server",
    "lm_eval": "it asks a running server; tests/e2e/test_lm_eval.py does",
    "TOKEN=$(openssl": "openssl is a program of others",
    "printf": "it needs the token",
}


# Of these one is run as a reader would; in the others' processes most of the time would be imports.
ALIKE = (
    *("preamble inspect ", "preamble convert ", "preamble verify ", "preamble tune --check "),
    "preamble plan ",
)


class Command(NamedTuple):
    where: str  # file:line
    line: str

    @property
    def listed(self) -> bool:
        return any(f"{self.line} ".startswith(f"{start} ") for start in NOT_RUN)


def commands() -> Iterator[Command]:
    for document in DOCUMENTS:
        if not (ROOT / document).exists():
            continue
        text = (ROOT / document).read_text("utf-8")
        for block in re.finditer(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            first = text[: block.start(1)].count("\n") + 1
            yield from in_block(document, first, block[1])


def in_block(document: str, first: int, block: str) -> Iterator[Command]:
    line = ""
    for number, part in enumerate(block.splitlines(), first):
        line += re.sub(r"(^|\s)#.*", "", part).strip()
        if line.endswith("\\"):
            line = line[:-1]
        elif line:
            yield Command(f"{document}:{number}", line)
            line = ""


def run(line: str) -> subprocess.CompletedProcess[str]:
    """As a reader would, in the checkout, with the environment that `make setup` has made."""
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


def named(command: Command) -> str:
    return f"{command.where}: {command.line}"


RUN = [command for command in commands() if not command.listed]
LOADING = [command for command in RUN if command.line.startswith(ALIKE)]


@pytest.mark.parametrize("command", RUN, ids=named)
def test_a_command_of_the_documents_runs(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    if command in LOADING[1:]:
        monkeypatch.chdir(ROOT)
        assert preamble.main(shlex.split(command.line)[1:]) == 0, command
        return
    done = run(command.line)
    assert done.returncode == 0, f"{command.where}: {command.line}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("command", [c for c in commands() if c.listed], ids=named)
def test_a_command_that_is_not_run_here_exists(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    program, *words = shlex.split(command.line)
    if program == "make":
        done = run(f"make -n {shlex.join(words)}")
        assert done.returncode == 0, f"{command.where}: {done.stderr}"
    elif program == "preamble":
        flags = {word.split("=")[0] for word in words if word.startswith("--")}
        # An action of `adapters` or `plan` has flags of its own; so has `generate`, of a server.
        asked = words[: 2 if words[0] in ("adapters", "plan") else 1]
        server = ["--server", "x"] if "--server" in flags else []
        with pytest.raises(SystemExit) as ended:
            preamble.main([*asked, *server, "--help"])
        said = capsys.readouterr()
        missing = {flag for flag in flags if not re.search(rf"{flag}\b", said.out)}
        assert ended.value.code == 0, f"{command.where}: {said.err}"
        assert not missing, f"{command.where}: preamble {words[0]} has no {missing}"


def test_the_documents_have_commands_at_all() -> None:
    assert {command.where.split(":")[0] for command in commands()} >= set(DOCUMENTS[:2])


def test_comments_and_broken_lines_are_read_as_a_shell_reads_them() -> None:
    block = "make demo  # the main job\n\n# nothing\npreamble generate \\\n  hello\n"
    lines = [command.line for command in in_block("x.md", 1, block)]
    assert lines == ["make demo", "preamble generate hello"]
