"""Wishes that cannot be: targets, splits, fields and tokenizers, each told in one sentence.

Nothing is written when one is refused, and where it is written nothing is left half done.
"""

import json
import os
import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

import preamble
from tests.support.broken.checkpoints import GOOD
from tests.support.checkpoints import megatron_writer
from tests.support.checkpoints.megatron_writer import GROUPED, Layout
from tests.support.privileges import plain_user

Told = pytest.CaptureFixture[str]
Case = Callable[[Path], object]


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron") / "source"
    GOOD["megatron"](root)
    return root


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


def refused(
    root: Path, capsys: Told, *words: object, source: object = None, target: object = None
) -> str:
    """The sentence; nothing may have been written, and nothing more than a plan be said before."""
    before = tree(root)
    capsys.readouterr()
    places = (str(source or root / "source"), str(target or root / "there" / "target"))
    assert preamble.main(["convert", *places, *map(str, words)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("preamble convert: ") and err.count("preamble convert: ") == 1
    assert tree(root) == before
    return last.removeprefix("preamble convert: ")


def converted(root: Path, *words: object) -> int:
    places = [str(root / "source"), str(root / "there" / "target")]
    return preamble.main(["convert", *places, "--to", "native", *map(str, words)])


@pytest.fixture
def root(megatron: Path, tmp_path: Path) -> Path:
    shutil.copytree(megatron, tmp_path / "source")
    (tmp_path / "there").mkdir()
    return tmp_path


def a_file(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def a_link(path: Path, target: Path) -> Path:
    path.symlink_to(target)
    return path


def a_pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


TARGETS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a file": (lambda root: a_file(root / "there" / "target"), "exists already"),
    "a full directory": (
        lambda root: a_file(root / "there" / "target" / "x").parent,
        "exists already",
    ),
    "the source": (lambda root: root / "source" / "iter_0000100", "exists already"),
    "inside the source": (
        lambda root: root / "source" / "iter_0000100" / "new",
        "is inside the source",
    ),
    "below a file": (lambda root: a_file(root / "x") / "target", "Not a directory"),
    "a link to nothing": (lambda root: a_link(root / "link", root / "gone"), "is a link"),
    "a link to a directory": (lambda root: a_link(root / "link", root / "there"), "is a link"),
    "no name of a file": (lambda root: root / "there" / ("x" * 300), "File name too long"),
    "where nothing can be": (lambda root: Path("/proc/preamble/target"), "/proc has 0 free"),
}


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_that_cannot_be_is_refused(name: str, root: Path, capsys: Told) -> None:
    make, words = TARGETS[name]
    target = make(root)
    told = refused(root, capsys, "--to", "native", target=target)
    assert words in told and str(target) in told


def test_a_directory_that_may_not_be_written_is_named(root: Path, capsys: Told) -> None:
    (root / "there").chmod(0o500)
    with plain_user():
        assert "Permission denied" in refused(root, capsys, "--to", "native")


def test_a_disk_without_room_is_told_with_what_is_needed(
    root: Path, capsys: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10, 0, 1000))
    told = refused(root, capsys, "--to", "native")
    assert "needs 17," in told and "1,000 free; make room" in told


SPLITS = {
    "--to megatron --tp 3": "--tp can be 1, 2, 4",
    "--to megatron --tp 1000000000": "--tp can be 1, 2, 4",
    "--to megatron --pp 5": "--pp can be at most 4",
    "--to megatron --ep 2": "it has no experts",
    "--to megatron --vpp 2": "--vpp can be 1",
    "--to megatron-dist --tp 3": "--tp can be 1, 2, 4",
    "--to native --tp 2": "--to native has no split",
    "--to hf --family rwkv": "known are: llama",
    "--to hf --family llama": "has no place for learned positions",
    "--to megatron --make-vocab-size-divisible-by 1000000000": "give at most 65536",
}


@pytest.mark.parametrize("flags", SPLITS)
def test_a_form_that_the_model_cannot_have_is_refused_with_what_works(
    flags: str, root: Path, capsys: Told
) -> None:
    assert SPLITS[flags] in refused(root, capsys, *flags.split())


def test_experts_that_do_not_divide_are_told_what_does(root: Path, capsys: Told) -> None:
    megatron_writer.saved(GROUPED, Layout(), root / "experts")
    told = refused(root, capsys, "--to", "megatron", "--ep", "3", source=root / "experts")
    assert "--ep can be 1, 2, 4" in told


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
    '{"num_layers": 5}': "has 5 layers, the weights have 4",
    '{"num_attention_heads": 7}': "7 attention heads do not divide",
    '{"layernorm_epsilon": NaN}': "layernorm_epsilon is nan",
    '{"rope_scaling": 3}': "rope_scaling is 3",
    '{"moe_layers": [1, 2]}': "moe_layers is (1, 2)",
    '{"dtype": "float8"}': "dtype",
    '{"hidden_size": 64}': "need",
    '{"vocab_size": 1000}': "the embedding has 112 rows",
}


@pytest.mark.parametrize("text", FIELDS)
def test_fields_that_cannot_be_are_refused(text: str, root: Path, capsys: Told) -> None:
    file = a_file(root / "fields.json", text)
    assert FIELDS[text] in refused(root, capsys, "--to", "native", "--config-json", file)


def test_a_file_of_fields_that_is_not_there_is_named(root: Path, capsys: Told) -> None:
    for path, words in ((root / "none.json", "No such file"), (root, "Is a directory")):
        told = refused(root, capsys, "--to", "native", "--config-json", path)
        assert str(path) in told and words in told


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("0", "at least 1"),
        ("-5", "at least 1"),
        ("113", "the embedding has 112 rows"),
        (str(10**30), "vocab_size is"),
    ],
)
def test_a_vocabulary_that_cannot_be_is_refused(
    size: str, words: str, root: Path, capsys: Told
) -> None:
    assert words in refused(root, capsys, "--to", "native", "--true-vocab-size", size)


TOKENIZERS: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda root: root / "none", "does not exist"),
    "a link to nothing": (lambda root: a_link(root / "link", root / "none"), "does not exist"),
    "a pipe": (lambda root: a_pipe(root / "pipe"), "is no file"),
    "a device": (lambda root: Path("/dev/zero"), "is no file"),
    "a directory without one": (lambda root: root / "there", "is a directory without one"),
    "a BPE without its merges": (
        lambda root: a_file(root / "vocab.json", "{}"),
        "has no merges.txt beside its vocab.json",
    ),
    "a directory of a BPE without its merges": (
        lambda root: a_file(root / "words" / "vocab.json", "{}").parent,
        "has no merges.txt beside its vocab.json",
    ),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_tokenizer_that_cannot_be_is_refused(name: str, root: Path, capsys: Told) -> None:
    make, words = TOKENIZERS[name]
    path = make(root)
    told = refused(root, capsys, "--to", "native", "--tokenizer", path)
    assert words in told and str(path) in told


def test_a_file_too_large_for_a_tokenizer_is_not_copied(root: Path, capsys: Told) -> None:
    path = root / "tokenizer.model"
    with open(path, "wb") as file:
        file.truncate(1 << 40)  # A hole; no disk is taken.
    told = refused(root, capsys, "--to", "native", "--tokenizer", path)
    assert "1,099,511,627,776 bytes, more than any has" in told


def test_merges_that_are_lost_beside_the_weights_are_told(root: Path, capsys: Told) -> None:
    a_file(root / "source" / "iter_0000100" / "vocab.json", "{}")
    assert "has no merges.txt" in refused(root, capsys, "--to", "native")
    words = a_file(root / "null.json", json.dumps({"vocab_size": 101}))
    assert converted(root, "--tokenizer", words) == 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", b"{", "tokenizer.json"),
        ("tokenizer.model", b"\xff" * 100, "tokenizer.model"),
        ("null.json", b'{"vocab_size": 5000}', "has ids up to 4999"),
        ("words.tiktoken", b"IQ== 0\n", "is no tokenizer"),
    ],
)
def test_a_tokenizer_that_is_of_no_use_is_taken_along_and_told(
    name: str, content: bytes, words: str, root: Path, capsys: Told
) -> None:
    (root / name).write_bytes(content)
    places = [str(root / "source"), str(root / "there" / "target")]
    assert (
        preamble.main(["convert", *places, "--to", "native", "--tokenizer", f"{root / name}"]) == 0
    )
    err = capsys.readouterr().err
    (note,) = [line for line in err.splitlines() if "taken along as it is, but" in line]
    assert words in note
    assert (root / "there" / "target" / "tokenizer" / name).read_bytes() == content


def test_a_whole_tokenizer_is_taken_along_without_a_word(root: Path, capsys: Told) -> None:
    words = json.dumps({"vocab_size": 101}).encode()
    (root / "source" / "iter_0000100" / "null.json").write_bytes(words)
    assert converted(root) == 0
    assert "taken along" not in capsys.readouterr().err
    assert (root / "there" / "target" / "tokenizer" / "null.json").read_bytes() == words


SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {
    "nothing": (lambda root: root / "none", "does not exist"),
    "an empty directory": (lambda root: root / "there", "found nothing"),
    "a device": (lambda root: Path("/dev/null"), "is not a checkpoint"),
    "a name that is too long": (lambda root: root / ("x" * 300), "File name too long"),
    "a link in a circle": (lambda root: a_link(root / "circle", root / "circle"), "circle"),
    "a user who is not here": (lambda root: Path("~nobody-of-this-name/x"), "no home here"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_source_that_is_none_is_told(name: str, root: Path, capsys: Told) -> None:
    make, words = SOURCES[name]
    assert words in refused(root, capsys, "--to", "native", source=make(root))


JOURNALS = {
    "noise": "\x00\x01noise\n",
    "a list": "[]\n{}\n",
    "another plan": '{"plan": "x"}\n',
}


@pytest.mark.parametrize("name", JOURNALS)
def test_what_no_run_of_this_wish_left_is_not_continued(
    name: str, root: Path, capsys: Told
) -> None:
    journal = a_file(root / "there" / ".target.partial" / "journal", JOURNALS[name])
    assert "add --resume" in refused(root, capsys, "--to", "native")
    assert "is of another source" in refused(root, capsys, "--to", "native", "--resume")
    assert journal.exists()
