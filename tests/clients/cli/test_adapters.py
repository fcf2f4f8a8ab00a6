"""`preamble adapters`: each action against a real server, as text and JSON; and a check."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import preamble
from tests.support.servers import Server, serving, write_adapter, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


TOKEN = "a-token-of-enough-letters"


class AdapterCommandServer:
    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder, tokenizer=False)
        self.file = folder / "one.safetensors"
        self.other = folder / "other.safetensors"
        write_adapter(self.file, self.checkpoint, [1, 2])
        write_adapter(self.other, self.checkpoint, [1], base="0" * 64)
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")
        self.server: Server


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdapterCommandServer]:
    folder = tmp_path_factory.mktemp("command")
    deployment = AdapterCommandServer(folder)
    tokens = folder / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"acme": {"token": TOKEN, "roles": ["generate", "adapters"]}}))
    tokens.chmod(0o600)
    (folder / "adapters").mkdir()
    with serving(
        deployment.checkpoint,
        folder / "s.yaml",
        adapters=str(folder / "adapters"),
        tokens=str(tokens),
    ) as deployment.server:
        yield deployment


def run(
    deployment: AdapterCommandServer, capsys: pytest.CaptureFixture[str], *arguments: str | Path
) -> tuple[int, str, str]:
    flags = ["--server", deployment.server.address, "--token", f"@{deployment.token}"]
    code = preamble.main(["adapters", *map(str, arguments), *flags])
    output = capsys.readouterr()
    return code, output.out, output.err


def test_commands_cover_an_adapters_lifecycle(
    deployment: AdapterCommandServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(deployment, capsys, "upload", "tax", deployment.file, "--json")
    uploaded = json.loads(out)
    assert (code, uploaded["name"], uploaded["version"], uploaded["current"]) == (0, "tax", 1, True)
    assert run(deployment, capsys, "upload", "tax", deployment.file)[1].startswith("* tax@2 ")
    assert run(deployment, capsys, "promote", "tax@1")[1].startswith("* tax@1 ")
    _, out, _ = run(deployment, capsys, "list")
    assert [line[:7] for line in out.splitlines()] == ["* tax@1", "  tax@2"]
    _, out, _ = run(deployment, capsys, "list", "--json")
    assert [(load["version"], load["current"]) for load in json.loads(out)] == [
        (1, True),
        (2, False),
    ]
    _, out, _ = run(deployment, capsys, "show", "tax")
    assert out.startswith("tax@1 (current)\n") and "virtual tokens   2" in out
    assert json.loads(run(deployment, capsys, "show", "tax@1", "--json")[1]) == uploaded
    assert run(deployment, capsys, "rollback", "tax")[1].startswith("* tax@2 ")
    assert run(deployment, capsys, "load", "tax@1")[1].startswith("  tax@1 ")
    assert run(deployment, capsys, "unload", "tax@2") == (0, "tax@2 is unloaded\n", "")
    code, out, _ = run(deployment, capsys, "unload", "tax@1", "--json")
    assert json.loads(out) == {"unloaded": "tax@1"}
    assert run(deployment, capsys, "list") == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "nil"], "NOT_FOUND: adapter 'nil' does not exist"),
        (["promote", "nil"], "INVALID_ARGUMENT: name is 'nil'; give it with a version"),
        (["upload", "tax", "none.safetensors"], "none.safetensors cannot be read"),
        (["upload", "../tax", "FILE"], "INVALID_ARGUMENT: '../tax' is not an adapter name"),
        (["upload", "tax", "OTHER"], "FAILED_PRECONDITION: adapter 'instruction' was trained on"),
    ],
)
def test_errors_are_one_line_on_stderr(
    deployment: AdapterCommandServer,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    files = {"FILE": str(deployment.file), "OTHER": str(deployment.other)}
    code, out, err = run(
        deployment, capsys, *[files.get(argument, argument) for argument in arguments]
    )
    assert (code, out) == (1, "")
    assert err.startswith(f"preamble adapters: {message}") and err.count("\n") == 1


def test_files_are_checked_without_a_server(
    deployment: AdapterCommandServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = ["--model", str(deployment.checkpoint)]
    assert preamble.main(["adapters", "check", str(deployment.file), *model]) == 0
    assert capsys.readouterr().out.endswith("good for this model\n")
    assert preamble.main(["adapters", "check", str(deployment.other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["virtual_tokens"] == 1
    assert preamble.main(["adapters", "check", str(deployment.other), *model]) == 1
    assert "was trained on the model" in capsys.readouterr().err
    (tmp_path / "x.safetensors").write_bytes(deployment.file.read_bytes()[:-1])
    assert preamble.main(["adapters", "check", str(tmp_path / "x.safetensors")]) == 1
    assert "truncated" in capsys.readouterr().err
