"""Adapter files: round trips, versions, and refusal of every invalid file."""

import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gpt.adapters.adapter_file import (
    HEADER_BYTES_MAX,
    Adapter,
    Card,
    GoldenExample,
    build_adapter,
    check_adapter,
    check_publish_directory,
    instruction_adapter,
    open_adapter,
    open_verified_adapter,
    parse_name,
    publish_adapter,
    save_adapter,
)
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.logical_tensor import ModelIdentity
from gpt.config import GPTConfig
from gpt.errors import AdapterError, RequestError

GOLDEN = Path(__file__).parents[2] / "golden" / "adapter-v1.safetensors"
TEMPLATE = PromptTemplate(
    "<|VIRTUAL_PROMPT_0|>{text}<|VIRTUAL_PROMPT_1|> = {label}",
    (2, 1),
    truncate_field="text",
    answer_field="label",
    bos="first",
)
CARD = Card(
    name="golden",
    task="what version one of the format says",
    base_digest="ab" * 32,
    base_fingerprint="cd" * 32,
    template=TEMPLATE,
    method="prompt_tuning",
    metrics={"accuracy": 0.9375, "seeds": [1, 2, 3], "best": {"step": 200, "loss": 1e-3}},
    stop=("\n", "—"),
    max_new_tokens=16,
    golden=(GoldenExample({"text": "naïve 漢字"}, "yes"),),
    notes=("made by tests/test_adapter.py",),
    created="2026-01-02T03:04:05Z",
)
# Eighths, which fp32 holds exactly: 0.0, 0.125, ... so that a reader's mistake is visible.
TABLE = torch.arange(12, dtype=torch.float32).reshape(3, 4) / 8
BASE = ModelIdentity("ab" * 32, "cd" * 32)
MODEL = GPTConfig(
    num_layers=1, hidden_size=4, num_attention_heads=1, vocab_size=50, max_position_embeddings=64
)
WIDE = GPTConfig(
    num_layers=1, hidden_size=32, num_attention_heads=1, vocab_size=50, max_position_embeddings=64
)


def write_golden() -> None:
    """How the golden file was written; a later version of the format gets a file of its own."""
    GOLDEN.parent.mkdir(exist_ok=True)
    save_adapter(build_adapter(CARD, TABLE), GOLDEN)


def test_version_1_golden_file_is_read() -> None:
    adapter = open_adapter(GOLDEN)

    assert torch.equal(adapter.table, TABLE)
    assert adapter.card == replace(CARD, hidden_size=4, virtual_tokens=3)
    assert adapter.digest == "4a34594ca306fee0d365f7fd21c5a700ab381d0c4a13422969347e40dbac4d69"


def test_adapter_round_trip(tmp_path: Path) -> None:
    torch.manual_seed(0)
    adapter = build_adapter(CARD, torch.randn(3, 8))
    path = tmp_path / "golden@1.safetensors"

    save_adapter(adapter, path)
    loaded = open_adapter(path)

    assert loaded.card == adapter.card
    assert torch.equal(loaded.table, adapter.table)
    assert loaded.digest == adapter.digest
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask()


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
TEXTS = st.lists(st.text(), max_size=3).map(tuple)
CARDS = st.builds(
    Card,
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}", fullmatch=True),
    task=st.text(),
    base_digest=st.none() | st.text(),
    base_fingerprint=st.none() | st.text(),
    template=st.none() | st.just(TEMPLATE),
    metrics=st.dictionaries(st.text(), JSON, max_size=3),
    stop=st.lists(st.text(min_size=1, max_size=60), max_size=3).map(tuple),
    max_new_tokens=st.none() | st.integers(1, 2**31 - 1),
    golden=st.lists(
        st.builds(GoldenExample, st.dictionaries(st.text(), st.text(), max_size=2), st.text()),
        max_size=2,
    ).map(tuple),
    notes=TEXTS,
    created=st.text(),
)


@settings(max_examples=50, deadline=None)
@given(card=CARDS)
def test_card_json_round_trip(card: Card) -> None:
    assert Card.from_json(card.to_json()) == card


@settings(max_examples=25, deadline=None)
@given(card=CARDS)
def test_card_file_round_trip(tmp_path_factory: pytest.TempPathFactory, card: Card) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    adapter = build_adapter(card, TABLE)
    save_adapter(adapter, path)
    assert open_adapter(path).card == adapter.card


def test_digest_covers_table_template_and_base_only() -> None:
    digest = build_adapter(CARD, TABLE).digest
    with_other_metadata = replace(CARD, name="other", metrics={}, notes=(), stop=(), created="")
    variants = [
        build_adapter(replace(CARD, base_digest="00" * 32), TABLE),
        build_adapter(replace(CARD, template=replace(TEMPLATE, bos="text")), TABLE),
        build_adapter(replace(CARD, template=None), TABLE),
        build_adapter(CARD, TABLE + 1e-6),
        build_adapter(replace(CARD, template=None), TABLE.reshape(4, 3)),
    ]
    assert build_adapter(with_other_metadata, TABLE).digest == digest
    assert len({digest, *(other.digest for other in variants)}) == 6


@pytest.mark.parametrize("stage", ["write", "fsync", "replace"])
def test_failed_saves_keep_the_existing_file_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = tmp_path / "a.safetensors"
    original = build_adapter(CARD, TABLE)
    save_adapter(original, path)

    def fail(*_: object) -> None:
        assert not [file for file in tmp_path.glob("*.safetensors") if file != path]
        raise OSError(28, "No space left on device")

    if stage == "write":
        existing = path
        path = tmp_path / "none" / "a.safetensors"
    else:
        monkeypatch.setattr(os, stage, fail)
        existing = path
    with pytest.raises(AdapterError, match=r"cannot be written: No .*; give an existing"):
        save_adapter(build_adapter(CARD, TABLE + 1), path)

    assert open_adapter(existing).digest == original.digest
    assert [file.name for file in tmp_path.iterdir()] == ["a.safetensors"]


def test_save_refuses_another_file_suffix(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"must end with \.safetensors"):
        save_adapter(build_adapter(CARD, TABLE), tmp_path / "a.bin")


def test_versions_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first_adapter = build_adapter(CARD, TABLE)
    second_adapter = build_adapter(CARD, TABLE + 1)
    link = os.link

    def publish_late(part: Path, path: Path) -> None:
        """Another run takes the number between its choice and its use."""
        monkeypatch.setattr(os, "link", link)
        assert publish_adapter(first_adapter, tmp_path) == path
        os.link(part, path)

    monkeypatch.setattr(os, "link", publish_late)

    assert publish_adapter(second_adapter, tmp_path) == tmp_path / "golden@2.safetensors"

    digests_by_file = {file.name: open_adapter(file).digest for file in tmp_path.iterdir()}
    expected = {
        "golden@1.safetensors": first_adapter.digest,
        "golden@2.safetensors": second_adapter.digest,
    }
    assert digests_by_file == expected


def test_concurrent_publishers_get_distinct_versions(tmp_path: Path) -> None:
    adapters = [build_adapter(CARD, TABLE + n) for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda adapter: publish_adapter(adapter, tmp_path), adapters))

    assert sorted(paths) == [tmp_path / f"golden@{n}.safetensors" for n in range(1, 9)]
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    assert [open_adapter(path).digest for path in paths] == [adapter.digest for adapter in adapters]


def test_versions_are_numbered_per_name(tmp_path: Path) -> None:
    adapter = build_adapter(CARD, TABLE)
    for name in ("golden", "golden@7", "golden-2@9", "golden@x", "other@12"):
        (tmp_path / f"{name}.safetensors").touch()
    assert publish_adapter(adapter, tmp_path).name == "golden@8.safetensors"
    (tmp_path / "golden@999999.safetensors").touch()
    with pytest.raises(
        AdapterError, match=r"all version numbers of 'golden' in .* are used; choose a new name"
    ):
        publish_adapter(adapter, tmp_path)


def test_publish_directory_is_checked_in_advance(tmp_path: Path) -> None:
    check_publish_directory(tmp_path / "new" / "adapters")
    assert list((tmp_path / "new" / "adapters").iterdir()) == []
    (tmp_path / "file").touch()
    for folder, message in (
        (tmp_path / "file", "is not a directory"),
        (tmp_path / "file" / "adapters", "cannot be written to: Not a directory; give"),
        (Path("/proc/self"), "cannot be written to: .*; give"),
    ):
        with pytest.raises(AdapterError, match=message):
            check_publish_directory(folder)


def own_file(tensors: dict[str, Tensor], **metadata: str | None) -> bytes:
    """A file of our format, with some of its metadata replaced or omitted."""
    adapter = build_adapter(CARD, TABLE)
    defaults = {"format": "preamble.adapter", "version": "1", "digest": adapter.digest}
    defaults["card"] = adapter.card.to_json()
    present = {key: value for key, value in {**defaults, **metadata}.items() if value is not None}
    return safetensors.torch.save(tensors, present)


def card_with(**changes: Any) -> str:
    return json.dumps(build_adapter(CARD, TABLE).card.to_dict() | changes)


def header_with(**changes: Any) -> bytes:
    """A valid file with a changed header."""
    content = own_file({"table": TABLE})
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for key, value in changes.items():
        header[key] = value if key == "__metadata__" else {**header.get(key, {}), **value}
    return with_header(json.dumps(header), content[8 + length :])


def with_header(header: str, data: bytes = b"") -> bytes:
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + data


VALID_FILE = own_file({"table": TABLE})
NAN = TABLE.clone()
NAN[1, 2] = float("nan")
INVALID_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is truncated"),
    "cut in the header": (VALID_FILE[:50], "is truncated"),
    "cut in the table": (VALID_FILE[:-4], "truncated"),
    "bytes behind": (VALID_FILE + b"x", "has bytes that its header does not describe"),
    "giant header": (b"\xff" * 7 + b"\x00" + VALID_FILE[8:], "header"),
    "shape lies": (
        header_with(table={"shape": [30, 40]}),
        "needs 4800 bytes, but its data_offsets span 48",
    ),
    "span lies": (
        header_with(table={"data_offsets": [0, 4800]}),
        "needs 48 bytes, but its data_offsets span 4800",
    ),
    "metadata lies": (header_with(__metadata__={"format": 3}), "broken header"),
    "a pickle": (pickle.dumps({"table": [1.0]}), "truncated|header"),
    "one byte flipped": (
        VALID_FILE[:-1] + b"\x40",
        "was changed after it was saved: its digest is",
    ),
    "no metadata": (safetensors.torch.save({"table": TABLE}), "has no adapter metadata"),
    "another format": (own_file({"table": TABLE}, format="pt"), "has no adapter metadata"),
    "newer": (own_file({"table": TABLE}, version="3"), "has format version 3, but this release"),
    "no version": (
        own_file({"table": TABLE}, version=None),
        "''; it must be 1 or 2:",
    ),
    "odd version": (own_file({"table": TABLE}, version="²"), "the format version '²'"),
    "no digest": (own_file({"table": TABLE}, digest=None), "its metadata records nothing; copy"),
    "no table": (own_file({"rows": TABLE}), r"rows \(torch.float32\); version 1"),
    "more tensors": (own_file({"table": TABLE, "kv": TABLE + 1}), "has one tensor, table"),
    "half precision": (own_file({"table": TABLE.half()}), r"table \(torch\.float16\); version 1"),
    "a vector": (own_file({"table": TABLE[0]}), "must be floating-point of shape"),
    "no rows": (own_file({"table": TABLE[:0]}), "must be floating-point of shape"),
    "not finite": (own_file({"table": NAN}), "values that are not finite"),
    "no card": (own_file({"table": TABLE}, card=None), "card cannot be read"),
    "broken card": (own_file({"table": TABLE}, card="{"), "card cannot be read"),
    "a list": (own_file({"table": TABLE}, card="[]"), "card cannot be read: it is not a JSON"),
    "deep card": (own_file({"table": TABLE}, card="[" * 100_000), "card cannot be read"),
    "huge card": (own_file({"table": TABLE}, card=" " * (1 << 23)), "at most 5242880 are allowed"),
    "unknown key": (own_file({"table": TABLE}, card=card_with(kv=1)), "card: unknown key 'kv'"),
    "wrong kind": (own_file({"table": TABLE}, card=card_with(stop="x")), "stop is 'x'"),
    "bad template": (
        own_file({"table": TABLE}, card=card_with(template={"text": "{a}", "x": 1})),
        "template: unknown key 'x'",
    ),
    "no template": (own_file({"table": TABLE}, card=card_with(template=[])), r"template is \[\]"),
    "bad golden": (
        own_file({"table": TABLE}, card=card_with(golden=[{"inputs": {"a": 1}, "output": ""}])),
        "golden: inputs must be strings",
    ),
    "vast length": (
        own_file({"table": TABLE}, card=card_with(max_new_tokens=2**32)),
        "from 1 to 2",
    ),
    "vast metric": (own_file({"table": TABLE}, card=card_with(metrics={"f1": 10**400})), "f1"),
    "many names": (
        own_file(
            {f"{i:01000000}": torch.zeros(0) for i in range(1 + HEADER_BYTES_MAX // 1_000_000)}
        ),
        "states a header of",
    ),
    "many short names": (
        with_header("{" + 700_000 * '"":1,' + '"":1}'),
        "has a header of more than 131072 tensors",
    ),
    "empty stop": (own_file({"table": TABLE}, card=card_with(stop=[""])), "stop string of 0 b"),
    "long stop": (own_file({"table": TABLE}, card=card_with(stop=["é" * 129])), "string of 258 b"),
    "many stops": (own_file({"table": TABLE}, card=card_with(stop=["x"] * 17)), "has 17 stop str"),
    "half a character": (
        own_file({"table": TABLE}, card=card_with(task="a\ud800")),
        r"has '\\ud800', a lone surrogate",
    ),
    "half a note": (own_file({"table": TABLE}, card=card_with(notes=["\udfff"])), "UTF-8 cannot"),
    "climbing name": (
        own_file({"table": TABLE}, card=card_with(name="../../etc/passwd")),
        "has the name '../../etc/passwd'",
    ),
    "other size": (own_file({"table": TABLE}, card=card_with(hidden_size=5)), "its table is 3 x 4"),
    "other rows": (
        own_file(
            {"table": TABLE},
            card=card_with(
                virtual_tokens=0, template={"text": "<|VIRTUAL_PROMPT_0|>", "splits": [4]}
            ),
        ),
        "template's splits sum to 3",
    ),
}


@pytest.mark.parametrize("fault", INVALID_FILES)
def test_invalid_files_are_refused_in_one_sentence(tmp_path: Path, fault: str) -> None:
    content, message = INVALID_FILES[fault]
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(AdapterError, match=message) as caught:
        open_adapter(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


@settings(max_examples=150, deadline=None)
@given(
    offset=st.integers(0, len(VALID_FILE) - 1), byte=st.integers(0, 255), truncated=st.booleans()
)
def test_any_changed_byte_is_detected(
    tmp_path_factory: pytest.TempPathFactory, offset: int, byte: int, truncated: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(
        VALID_FILE[:offset]
        if truncated
        else VALID_FILE[:offset] + bytes([byte]) + VALID_FILE[offset + 1 :]
    )
    original = build_adapter(CARD, TABLE)
    try:
        loaded = open_adapter(path)
    except AdapterError:
        return
    # The digest does not cover the descriptions; the fields that affect a prompt are unchanged.
    assert loaded.digest == original.digest
    assert torch.equal(loaded.table, TABLE)


def test_files_that_are_not_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    for path, message in (
        (tmp_path / "nowhere", "does not exist; give the file"),
        (tmp_path, "has no adapter; give a PEFT directory"),
        (tmp_path / "notes.txt", "is not an adapter; give"),
        (tmp_path / ("n" * 300), "cannot read .*: File name too long"),
    ):
        with pytest.raises(AdapterError, match=message):
            open_adapter(path)


def test_adapters_are_checked_against_their_model() -> None:
    adapter = build_adapter(CARD, TABLE)
    assert check_adapter(adapter, MODEL, BASE) == ()
    identity_with_note = replace(BASE, note="converted from float32 to bfloat16")
    assert check_adapter(adapter, MODEL, identity_with_note) == (identity_with_note.note,)
    assert "was not compared" in check_adapter(adapter, MODEL, None)[0]
    foreign = build_adapter(replace(CARD, base_digest=None), TABLE)
    assert "does not record its base model" in check_adapter(foreign, MODEL, BASE)[0]
    # Without a digest the fingerprint decides; a digest that differs decides over it.
    printed = build_adapter(replace(CARD, base_fingerprint="f"), TABLE)
    assert check_adapter(printed, MODEL, ModelIdentity("", "f")) == ()
    assert check_adapter(printed, MODEL, replace(BASE, fingerprint="g")) == ()

    for wrong, config, identity, message in (
        (adapter, WIDE, BASE, "has rows of width 4, but the model has hidden_size 32"),
        (
            adapter,
            MODEL,
            ModelIdentity("ef" * 32, "e"),
            "with digest abababababab, but this model has digest efefefefefef",
        ),
        (adapter, MODEL.with_fields(max_position_embeddings=5), BASE, r"3 virtual .* limit of 2 "),
        (
            scaled(1e6),
            MODEL.with_fields(dtype="float16"),
            BASE,
            r"values up to 1\.38e\+06, which overflow in float16",
        ),
    ):
        with pytest.raises(AdapterError, match=message):
            check_adapter(wrong, config, identity)
    check_adapter(scaled(1e6), MODEL.with_fields(dtype="bfloat16"), BASE)
    with pytest.raises(AdapterError, match="limit of 2"):
        check_adapter(adapter, MODEL, BASE, rows_max=2)


def scaled(factor: float) -> Adapter:
    return build_adapter(CARD, TABLE * factor)


def test_an_adapter_does_not_change_with_the_tensor_it_was_built_from() -> None:
    source_table = TABLE.clone().requires_grad_()
    adapter = build_adapter(CARD, source_table)
    with torch.no_grad():
        source_table += 1
    assert torch.equal(adapter.table, TABLE)
    assert not adapter.table.requires_grad


def test_embeddings_of_an_instruction_are_an_adapter() -> None:
    embedding = torch.arange(40.0).reshape(10, 4)
    ids = [7, 0, 7]
    adapter = instruction_adapter(Card("say-it"), ids, embedding[ids])
    assert adapter.table[:, 0].tolist() == [28.0, 0.0, 28.0]
    assert adapter.card.method == "instruction"
    with pytest.raises(AdapterError, match="has 3 tokens, but 10 embedding rows were given"):
        instruction_adapter(Card("say-it"), ids, embedding)


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": float("nan")}, "cannot be written as JSON"),
        ({"loss": torch.ones(1)}, "cannot be written as JSON"),
        ({1: "x"}, "would change if it were written as JSON"),
        ({"x": (1, 2)}, "would change if it were written as JSON"),
    ],
)
def test_card_that_json_would_change_is_refused(metrics: Any, message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        Card("a", metrics=metrics)
    with pytest.raises(AdapterError, match="max_new_tokens 0; it must be from 1"):
        Card("a", max_new_tokens=0)
    with pytest.raises(AdapterError, match="at most 1048576 are allowed"):
        Card("a", task="x" * (1 << 20))


def test_names_and_versions_are_parsed() -> None:
    assert parse_name("a@3") == ("a", 3)
    assert parse_name("Refunds_v2.1-de") == ("Refunds_v2.1-de", None)
    assert parse_name("a" * 100).name == "a" * 100


NOT_NAMES = [
    "",
    "@1",
    "a@",
    "a@0",
    "a@03",
    "a@-1",
    "a@1@2",
    "a@1e3",
    "a@1234567",
    "../a",
    "a/b",
    ".a",
]
NOT_NAMES += ["-a", "a b", "a\n", "a\0", "é", "a" * 101, "a@²", "\\a", "..", "C:a", "a@3 "]


@pytest.mark.parametrize("text", NOT_NAMES)
def test_invalid_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="is not an adapter name; a name has") as caught:
        parse_name(text)
    assert caught.value.field == "adapter"


def test_a_truncation_after_the_file_was_read_ends_no_process(tmp_path: Path) -> None:
    """An access to a mapped file beyond its end would be a SIGBUS."""
    adapter = build_adapter(CARD, torch.randn(3, 2048, generator=torch.Generator().manual_seed(1)))
    path = tmp_path / "golden.safetensors"
    save_adapter(adapter, path)
    opened = open_verified_adapter(path)
    os.truncate(path, 0)
    assert torch.equal(opened.table, adapter.table)
    with pytest.raises(AdapterError, match="truncated"):
        open_adapter(path)


def test_a_sparse_file_larger_than_the_memory_is_refused_without_reading_it(
    tmp_path: Path,
) -> None:
    size = 1 << 40
    table = {"dtype": "F32", "shape": [size // 256, 64], "data_offsets": [0, size]}
    header = json.dumps({"table": table}).encode()
    path = tmp_path / "sparse.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    os.truncate(path, 8 + len(header) + size)
    with pytest.raises(
        AdapterError, match=r"tensors of 1048576 MiB, more than half of the \d+ MiB"
    ):
        open_adapter(path)
