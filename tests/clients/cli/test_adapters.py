"""`preamble adapters`: each action against a real server, for a person and as JSON; and a check."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import preamble
from tests.support.servers import Server, serving, write_adapter, write_checkpoint

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.


TOKEN = "a-token-of-enough-letters"


class World:
    def __init__(self, folder: Path) -> None:
        self.checkpoint = write_checkpoint(folder, tokenizer=False)
        self.file, self.other = folder / "one.safetensors", folder / "other.safetensors"
        write_adapter(self.file, self.checkpoint, [1, 2])
        write_adapter(self.other, self.checkpoint, [1], base="0" * 64)
        self.token = folder / "token"
        self.token.write_text(f"{TOKEN}\n")
        self.server: Server


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("command")
    world = World(folder)
    tokens = folder / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"acme": {"token": TOKEN, "roles": ["generate", "adapters"]}}))
    tokens.chmod(0o600)
    (folder / "adapters").mkdir()
    with serving(
        world.checkpoint,
        folder / "s.yaml",
        adapters=str(folder / "adapters"),
        tokens=str(tokens),
    ) as world.server:
        yield world


def run(
    world: World, capsys: pytest.CaptureFixture[str], *words: str | Path
) -> tuple[int, str, str]:
    flags = ["--server", world.server.address, "--token", f"@{world.token}"]
    code = preamble.main(["adapters", *map(str, words), *flags])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_an_adapters_life_by_the_command(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(world, capsys, "upload", "tax", world.file, "--json")
    first = json.loads(out)
    assert (code, first["name"], first["version"], first["current"]) == (0, "tax", 1, True)
    assert run(world, capsys, "upload", "tax", world.file)[1].startswith("* tax@2 ")
    assert run(world, capsys, "promote", "tax@1")[1].startswith("* tax@1 ")
    _, out, _ = run(world, capsys, "list")
    assert [line[:7] for line in out.splitlines()] == ["* tax@1", "  tax@2"]
    _, out, _ = run(world, capsys, "list", "--json")
    assert [(one["version"], one["current"]) for one in json.loads(out)] == [(1, True), (2, False)]
    _, out, _ = run(world, capsys, "show", "tax")
    assert out.startswith("tax@1 (current)\n") and "virtual tokens   2" in out
    assert json.loads(run(world, capsys, "show", "tax@1", "--json")[1]) == first
    assert run(world, capsys, "rollback", "tax")[1].startswith("* tax@2 ")
    assert run(world, capsys, "load", "tax@1")[1].startswith("  tax@1 ")
    assert run(world, capsys, "unload", "tax@2") == (0, "tax@2 is unloaded\n", "")
    code, out, _ = run(world, capsys, "unload", "tax@1", "--json")
    assert json.loads(out) == {"unloaded": "tax@1"}
    assert run(world, capsys, "list") == (0, "", "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "nil"], "NOT_FOUND: there is no adapter 'nil' here"),
        (["promote", "nil"], "INVALID_ARGUMENT: name is 'nil'; give it with a version"),
        (["upload", "tax", "none.safetensors"], "none.safetensors cannot be read"),
        (["upload", "../tax", "FILE"], "INVALID_ARGUMENT: '../tax' is no adapter's name"),
        (["upload", "tax", "OTHER"], "FAILED_PRECONDITION: adapter 'instruction' was trained on"),
    ],
)
def test_what_goes_wrong_is_one_line_on_stderr(
    world: World, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    files = {"FILE": str(world.file), "OTHER": str(world.other)}
    code, out, err = run(world, capsys, *[files.get(word, word) for word in words])
    assert (code, out) == (1, "")
    assert err.startswith(f"preamble adapters: {said}") and err.count("\n") == 1


def test_a_file_is_checked_without_a_server(
    world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    model = ["--model", str(world.checkpoint)]
    assert preamble.main(["adapters", "check", str(world.file), *model]) == 0
    assert capsys.readouterr().out.endswith("good for this model\n")
    assert preamble.main(["adapters", "check", str(world.other), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["virtual_tokens"] == 1
    assert preamble.main(["adapters", "check", str(world.other), *model]) == 1
    assert "was trained on the model" in capsys.readouterr().err
    (tmp_path / "x.safetensors").write_bytes(world.file.read_bytes()[:-1])
    assert preamble.main(["adapters", "check", str(tmp_path / "x.safetensors")]) == 1
    assert "truncated" in capsys.readouterr().err
