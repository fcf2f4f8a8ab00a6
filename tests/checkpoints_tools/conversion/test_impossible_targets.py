"""Refused conversions: impossible targets, splits, config fields and tokenizers.

Each gives a one-line error, writes nothing, and leaves no incomplete files.
"""

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

import preamble
from gpt.software_versions import preamble_version
from tests.support.broken.checkpoints import GOOD
from tests.support.checkpoints import megatron_writer
from tests.support.checkpoints.megatron_writer import GROUPED, Layout
from tests.support.privileges import plain_user

CapturedOutput = pytest.CaptureFixture[str]
Case = Callable[[Path], object]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron") / "source"
    GOOD["megatron"](root)
    return root


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def check_refused(
    root: Path,
    capsys: CapturedOutput,
    *arguments: object,
    source: object = None,
    target: object = None,
) -> str:
    """The error line; checks that nothing was written and nothing but a plan was printed before."""
    tree_before = tree(root)
    capsys.readouterr()
    places = (str(source or root / "source"), str(target or root / "there" / "target"))
    assert preamble.main(["convert", *places, *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    last_line = err.splitlines()[-1]
    assert last_line.startswith("preamble convert: ") and err.count("preamble convert: ") == 1
    assert tree(root) == tree_before
    return last_line.removeprefix("preamble convert: ")


def convert(root: Path, *arguments: object) -> int:
    places = [str(root / "source"), str(root / "there" / "target")]
    return preamble.main(["convert", *places, "--to", "native", *map(str, arguments)])


@pytest.fixture
def root(megatron: Path, tmp_path: Path) -> Path:
    shutil.copytree(megatron, tmp_path / "source")
    (tmp_path / "there").mkdir()
    return tmp_path


def write_file(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def create_link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def create_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


TARGETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (lambda root: write_file(root / "there" / "target"), "already exists"),
    "a full directory": (
        lambda root: write_file(root / "there" / "target" / "x").parent,
        "already exists",
    ),
    "the source": (lambda root: root / "source" / "iter_0000100", "already exists"),
    "inside the source": (
        lambda root: root / "source" / "iter_0000100" / "new",
        "is inside the source",
    ),
    "below a file": (lambda root: write_file(root / "x") / "target", "Not a directory"),
    "a link to nothing": (
        lambda root: create_link(root / "link", root / "gone"),
        "is a symbolic link",
    ),
    "a link to a directory": (
        lambda root: create_link(root / "link", root / "there"),
        "is a symbolic link",
    ),
    "no name of a file": (lambda root: root / "there" / ("x" * 300), "File name too long"),
    "where nothing can be": (
        lambda root: Path("/proc/preamble/target"),
        "/proc has only 0 free",
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_unusable_target_path_is_refused(name: str, root: Path, capsys: CapturedOutput) -> None:
    make, message_words = TARGETS[name]
    target = make(root)
    error = check_refused(root, capsys, "--to", "native", target=target)
    assert message_words in error and str(target) in error


def test_unwritable_directory_is_named(root: Path, capsys: CapturedOutput) -> None:
    (root / "there").chmod(0o500)
    with plain_user():
        assert "Permission denied" in check_refused(root, capsys, "--to", "native")


def test_full_disk_error_states_the_needed_bytes(
    root: Path, capsys: CapturedOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 0, 1000))
    error = check_refused(root, capsys, "--to", "native")
    assert "needs 17," in error and "1,000 free bytes; free disk space" in error


SPLITS = {
    "--to megatron --tp 3": "--tp can be 1, 2, 4",
    "--to megatron --tp 1000000000": "--tp can be 1, 2, 4",
    "--to megatron --pp 5": "--pp can be at most 4",
    "--to megatron --ep 2": "the model has no experts",
    "--to megatron --vpp 2": "give --vpp 1",
    "--to megatron-dist --tp 3": "--tp can be 1, 2, 4",
    "--to native --tp 2": "--to native has no parallel split",
    "--to hf --family rwkv": "choose one of llama",
    "--to hf --family llama": "cannot express learned positions",
    "--to megatron --make-vocab-size-divisible-by 1000000000": "give at most 65536",
}


@pytest.mark.parametrize("flags", SPLITS)
def test_impossible_format_option_is_refused_with_valid_choices(
    flags: str, root: Path, capsys: CapturedOutput
) -> None:
    assert SPLITS[flags] in check_refused(root, capsys, *flags.split())


def test_invalid_expert_parallel_size_is_refused_with_valid_choices(
    root: Path, capsys: CapturedOutput
) -> None:
    megatron_writer.saved(GROUPED, Layout(), root / "experts")
    error = check_refused(root, capsys, "--to", "megatron", "--ep", "3", source=root / "experts")
    assert "--ep can be 1, 2, 4" in error


FIELDS = {
    "": "is not JSON",
    "{": "is not JSON",
    "[1]": "not a JSON object",
    '{"a": ' * 100_000: "is not JSON",
    '{"wings": 2}': "unknown key 'wings'",
    '{"hidden_sise": 2}': "did you mean 'hidden_size'?",
    '{"num_layers": "4"}': "num_layers is '4'",
    '{"num_layers": null}': "num_layers is None",
    '{"num_layers": 100000000}': "at most 65535",
    '{"num_layers": 5}': "has 5 layers, but the weights have 4",
    '{"num_attention_heads": 7}': "7 attention heads do not divide",
    '{"layernorm_epsilon": NaN}': "layernorm_epsilon is nan",
    '{"rope_scaling": 3}': "rope_scaling is 3",
    '{"moe_layers": [1, 2]}': "moe_layers is (1, 2)",
    '{"dtype": "float8"}': "dtype",
    '{"hidden_size": 64}': "need",
    '{"vocab_size": 1000}': "the embedding has only 112 rows",
}


@pytest.mark.parametrize("text", FIELDS)
def test_invalid_config_fields_are_refused(text: str, root: Path, capsys: CapturedOutput) -> None:
    file = write_file(root / "fields.json", text)
    assert FIELDS[text] in check_refused(root, capsys, "--to", "native", "--config-json", file)


def test_missing_config_json_is_named(root: Path, capsys: CapturedOutput) -> None:
    for path, message in ((root / "none.json", "No such file"), (root, "Is a directory")):
        error = check_refused(root, capsys, "--to", "native", "--config-json", path)
        assert str(path) in error and message in error


@pytest.mark.parametrize(
    ("size", "message"),
    [
        ("0", "at least 1"),
        ("-5", "at least 1"),
        ("113", "the embedding has only 112 rows"),
        (str(10**30), "vocab_size is"),
    ],
)
def test_invalid_vocabulary_size_is_refused(
    size: str, message: str, root: Path, capsys: CapturedOutput
) -> None:
    assert message in check_refused(root, capsys, "--to", "native", "--true-vocab-size", size)


TOKENIZERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda root: root / "none", "does not exist"),
    "a link to nothing": (lambda root: create_link(root / "link", root / "none"), "does not exist"),
    "a pipe": (lambda root: create_pipe(root / "pipe"), "is neither a file nor a directory"),
    "a device": (lambda root: Path("/dev/zero"), "is neither a file nor a directory"),
    "a directory without one": (lambda root: root / "there", "has no file whose name ends in"),
    "a BPE without its merges": (
        lambda root: write_file(root / "vocab.json", "{}"),
        "has no merges.txt beside its vocab.json",
    ),
    "a directory of a BPE without its merges": (
        lambda root: write_file(root / "words" / "vocab.json", "{}").parent,
        "has no merges.txt beside its vocab.json",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_invalid_tokenizer_is_refused(name: str, root: Path, capsys: CapturedOutput) -> None:
    make, message_words = TOKENIZERS[name]
    path = make(root)
    error = check_refused(root, capsys, "--to", "native", "--tokenizer", path)
    assert message_words in error and str(path) in error


def test_file_too_large_for_a_tokenizer_is_refused(root: Path, capsys: CapturedOutput) -> None:
    path = root / "tokenizer.model"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # Sparse; it takes no disk space.
    error = check_refused(root, capsys, "--to", "native", "--tokenizer", path)
    assert "1,099,511,627,776 bytes, which is too large for a tokenizer file" in error


def test_missing_merges_file_is_reported(root: Path, capsys: CapturedOutput) -> None:
    write_file(root / "source" / "iter_0000100" / "vocab.json", "{}")
    assert "has no merges.txt" in check_refused(root, capsys, "--to", "native")
    vocabulary_file = write_file(root / "null.json", json.dumps({"vocab_size": 101}))
    assert convert(root, "--tokenizer", vocabulary_file) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.model", b"\xff" * 100, "tokenizer.model"),
        ("null.json", b'{"vocab_size": 5000}', "has ids up to 4999"),
        ("words.tiktoken", b"IQ== 0\n", "has no tokenizer"),
    ],
)
def test_unusable_tokenizer_is_copied_with_a_note(
    name: str, content: bytes, message: str, root: Path, capsys: CapturedOutput
) -> None:
    (root / name).write_bytes(content)
    places = [str(root / "source"), str(root / "there" / "target")]
    assert (
        preamble.main(["convert", *places, "--to", "native", "--tokenizer", f"{root / name}"]) == 0
    )
    err = capsys.readouterr().err
    (note,) = [line for line in err.splitlines() if "copied unchanged, but" in line]
    assert message in note
    assert (root / "there" / "target" / "tokenizer" / name).read_bytes() == content


def test_complete_tokenizer_is_copied_without_a_note(root: Path, capsys: CapturedOutput) -> None:
    tokenizer_json = json.dumps({"vocab_size": 101}).encode()
    (root / "source" / "iter_0000100" / "null.json").write_bytes(tokenizer_json)
    assert convert(root) == 0
    assert "copied unchanged" not in capsys.readouterr().err
    assert (root / "there" / "target" / "tokenizer" / "null.json").read_bytes() == tokenizer_json


SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda root: root / "none", "does not exist"),
    "an empty directory": (lambda root: root / "there", "found nothing"),
    "a device": (lambda root: Path("/dev/null"), "is not a checkpoint"),
    "a name that is too long": (lambda root: root / ("x" * 300), "File name too long"),
    "a link in a circle": (lambda root: create_link(root / "circle", root / "circle"), "circle"),
    "a user who is not here": (
        lambda root: Path("~nobody-of-this-name/x"),
        "without a home",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_source_that_is_no_checkpoint_is_refused(
    name: str, root: Path, capsys: CapturedOutput
) -> None:
    make, message_words = SOURCES[name]
    assert message_words in check_refused(root, capsys, "--to", "native", source=make(root))


JOURNALS = {
    "noise": "\x00\x01noise\n",
    "a list": "[]\n{}\n",
    "another plan": json.dumps({"plan": "x", "release": preamble_version()}) + "\n",
}


@pytest.mark.parametrize("name", JOURNALS)
def test_partial_directory_of_other_options_is_not_resumed(
    name: str, root: Path, capsys: CapturedOutput
) -> None:
    journal = write_file(root / "there" / ".target.partial" / "journal", JOURNALS[name])
    assert "add --resume" in check_refused(root, capsys, "--to", "native")
    assert "has the files of a different conversion: of another source" in check_refused(
        root, capsys, "--to", "native", "--resume"
    )
    assert journal.exists()
