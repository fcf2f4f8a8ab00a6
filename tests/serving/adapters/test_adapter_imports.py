"""Adapter imports: paths, names and versions; PEFT's own files are in tests/gpt/adapters."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.change_log import AdapterChangeLog, ChangeAuthor
from gpt.checkpoint.digest import lookup_identity
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.errors import AdapterError, ConfigError, PreambleError
from gpt.formats.registry import open_checkpoint
from serving.adapters.adapter_imports import AdapterImporter, LoraModule
from serving.adapters.registry import AdapterRegistry, LoadedAdapter
from serving.adapters.version_updates import AdapterStore
from serving.config import AdapterConfig
from serving.request import RefusedError, UnknownAdapterError
from serving.service.error_reasons import reason_name
from tests.support.models import lively
from tests.support.peft_files import write_peft_lora
from tests.support.servers import CONFIG

AUTHOR = ChangeAuthor("acme", protocol="openai", method="POST /v1/load_lora_adapter")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("base") / "model"
    write_native(lively(CONFIG), folder)
    return open_checkpoint(folder)


def refuse_rank_9(adapter: Adapter) -> None:
    if adapter.rank == 9:
        raise AdapterError(f"adapter {adapter.card.name!r} has rank 9")


class Imports:
    """An adapter directory, an import directory with two adapters, and an importer."""

    def __init__(self, folder: Path, base: Checkpoint, *, has_folder: bool = True) -> None:
        self.adapters, self.folder = folder / "adapters", folder / "imports"
        for directory in (self.adapters, self.folder):
            directory.mkdir(exist_ok=True)
        for seed, name in enumerate(("one", "two")):
            write_peft_lora(self.folder / name, CONFIG, seed=seed)
        registry = AdapterRegistry(self.adapters, refuse_rank_9, adapters_max=20)
        registry.scan()
        self.store = AdapterStore(registry, AdapterConfig(), reason_name)
        self.importer = AdapterImporter(
            self.store, base, lambda: lookup_identity(base), self.folder if has_folder else None
        )
        self.base = base

    def load(
        self, name: str, path: str, tenant: str = "acme", *, replaces: bool = False
    ) -> LoadedAdapter:
        author = replace(AUTHOR, tenant=tenant)
        return self.importer.load(name, path, tenant, author, replaces=replaces)

    def digest(self, name: str) -> str:
        """The digest of an import folder's adapter, with the base's digest in its card."""
        adapter = open_adapter(self.folder / name, base=self.base)
        identity = lookup_identity(self.base)
        card = replace(adapter.card, base_digest=identity.digest or None)
        return build_adapter(card, adapter.table, adapter.linears).digest

    def keys(self, tenant: str = "acme") -> list[str]:
        return [adapter.key for adapter, _ in self.store.adapters.list_visible(tenant)]


@pytest.fixture
def imports(tmp_path: Path, base: Checkpoint) -> Imports:
    return Imports(tmp_path, base)


def test_a_loaded_adapter_has_the_name_and_the_base_and_is_on_record(imports: Imports) -> None:
    adapter = imports.load("mail", "one")
    assert (adapter.key, adapter.tenant) == ("mail@1", "acme")
    assert adapter.adapter_ref.digest == imports.digest("one")
    file = imports.adapters / "acme" / "mail@1.safetensors"
    written = open_adapter(file)
    assert (written.card.name, written.rank) == ("mail", 4)
    assert written.card.base_digest == (lookup_identity(imports.base).digest or None)
    assert adapter.info.method == "lora" and adapter.info.nbytes == written.nbytes
    assert imports.importer.source_of(adapter) == "one"
    assert imports.load("mail2", str(imports.folder / "two")).adapter_ref.digest == imports.digest(
        "two"
    )
    log = AdapterChangeLog.find(imports.adapters)
    assert log is not None
    first = next(iter(log.read()))
    assert (first["action"], first["status"], first["adapter"]) == ("upload", "done", "mail")
    assert (first["tenant"], first["protocol"]) == ("acme", "openai")


def test_a_taken_name_is_refused_and_replaced_on_request(imports: Imports) -> None:
    imports.load("mail", "one")
    with pytest.raises(PreambleError, match="has already been loaded") as caught:
        imports.load("mail", "two")
    assert reason_name(caught.value) == "INVALID_FIELD"
    assert imports.keys() == ["mail@1"]
    replaced = imports.load("mail", "two", replaces=True)
    assert replaced.adapter_ref.digest == imports.digest("two")
    assert imports.keys() == ["mail@2"], "the version that was loaded before is unloaded"
    assert imports.importer.source_of(replaced) == "two"


def test_one_of_two_loads_at_the_same_time_gets_the_name(imports: Imports) -> None:
    def load(path: str) -> str:
        try:
            return imports.load("mail", path).key
        except PreambleError as error:
            return reason_name(error)

    with ThreadPoolExecutor(2) as threads:
        outcomes = sorted(threads.map(load, ("one", "two")))
    assert outcomes == ["INVALID_FIELD", "mail@1"] and imports.keys() == ["mail@1"]


def test_replacing_keeps_versions_of_other_origin_and_overrides_a_promotion(
    imports: Imports,
) -> None:
    folder = imports.adapters / "acme"
    folder.mkdir()
    uploaded = build_adapter(Card("mail"), torch.ones(2, CONFIG.hidden_size))
    save_adapter(uploaded, folder / "mail@1.safetensors")
    imports.store.load("mail", "acme")
    imports.store.promote("mail@1", "acme")
    imports.load("mail", "one", replaces=True)
    assert imports.store.get("mail", "acme").key == "mail@2"
    assert imports.keys() == ["mail@1", "mail@2"]
    assert imports.store.rollback("mail", "acme").key == "mail@1"


def test_unloading_forgets_all_versions_of_the_tenant(imports: Imports) -> None:
    imports.load("mail", "one")
    imports.load("mail", "two", tenant="")
    imports.importer.unload("mail", "acme", AUTHOR)
    assert imports.keys("") == ["mail@1"], "the shared adapter stays"
    assert imports.store.get("mail", "acme").tenant == ""
    with pytest.raises(RefusedError) as caught:
        imports.importer.unload("mail", "acme", AUTHOR)
    assert caught.value.reason == "PERMISSION_DENIED"
    with pytest.raises(UnknownAdapterError):
        imports.importer.unload("nobody", "acme", AUTHOR)
    with pytest.raises(PreambleError, match="has already been loaded"):
        imports.load("mail", "one")
    own = imports.load("mail", "one", replaces=True)
    assert own.key == "mail@2", "a version number is never used again"
    assert imports.store.get("mail", "acme").tenant == "acme"


def test_only_paths_below_the_import_directory_are_read(imports: Imports, tmp_path: Path) -> None:
    write_peft_lora(tmp_path / "secret", CONFIG)
    (imports.folder / "link").symlink_to(tmp_path / "secret")
    (imports.folder / "loop").symlink_to(imports.folder / "loop")
    leak = imports.folder / "leak"
    leak.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (leak / name).symlink_to(tmp_path / "secret" / name)
    weights = imports.folder / "checkpoint" / "weights"
    weights.mkdir(parents=True)
    (weights / "__0_0.distcp").symlink_to(tmp_path / "secret" / "adapter_model.safetensors")
    outside = (
        "..",
        "../secret",
        "one/../../secret",
        str(tmp_path / "secret"),
        "/etc/passwd",
        "/",  # Its files are not listed, which would take minutes.
        "link",
        "leak",
        "checkpoint",
    )
    for path in outside:
        with pytest.raises(PreambleError, match="outside the directory") as caught:
            imports.load("x", path)
        assert reason_name(caught.value) == "INVALID_FIELD", path
    for path in ("none", "one/none", "one\0", "a" * 5000, "loop", "~/one"):
        with pytest.raises(UnknownAdapterError, match="Loading lora x failed: No adapter found"):
            imports.load("x", path)
    for name in ("x/y", "../x", "", "x@2", "x" * 101):
        with pytest.raises(PreambleError) as caught:
            imports.load(name, "one")
        assert reason_name(caught.value) == "INVALID_FIELD", name
    # A link inside the directory is allowed: caches of downloads consist of links.
    (imports.folder / "alias").symlink_to(imports.folder / "one")
    assert imports.load("x", "alias").key == "x@1"
    log = AdapterChangeLog.find(imports.adapters)
    assert log is not None
    assert sum(record["status"] == "refused" for record in log.read()) == 20


def test_without_an_import_directory_no_path_is_read(tmp_path: Path, base: Checkpoint) -> None:
    imports = Imports(tmp_path, base, has_folder=False)
    with pytest.raises(RefusedError, match="--adapter-imports") as caught:
        imports.load("x", "one")
    assert caught.value.reason == "NOT_POSSIBLE_NOW"
    imports.importer.import_missing(["one"], "acme")
    assert imports.keys() == []


def test_an_unusable_adapter_is_refused_without_the_folder(imports: Imports) -> None:
    write_peft_lora(imports.folder / "deep", CONFIG, layers=3)
    write_peft_lora(imports.folder / "nine", CONFIG, rank=9)
    (imports.folder / "empty").mkdir()
    for path, words in (
        ("deep", "model.layers.2"),
        ("nine", "has rank 9"),
        ("empty", "has no adapter"),
    ):
        with pytest.raises(RefusedError, match=words) as caught:
            imports.load("x", path)
        assert caught.value.reason == "ADAPTER_UNUSABLE"
        assert str(imports.folder) not in str(caught.value)
        assert str(imports.base.path) not in str(caught.value)
    assert imports.keys() == []
    files = [path.name for path in (imports.adapters / "acme").iterdir()]
    assert files == [], "no partial file is left"


def test_a_request_imports_the_folder_of_an_unknown_name(imports: Imports) -> None:
    imports.importer.import_missing(["", "two", "nobody", "two@1", "../one"], "acme")
    assert [(adapter.key, adapter.tenant) for adapter in imports.store.adapters.all_adapters()] == [
        ("two@1", "")
    ]
    imports.importer.import_missing(["two"], "acme")
    assert imports.keys() == ["two@1"]


def test_a_folder_that_cannot_be_imported_is_read_again_only_after_a_change(
    imports: Imports, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = imports.folder / "bad" / "adapter_config.json"
    write_peft_lora(imports.folder / "bad", CONFIG, rank=9)
    conversions = []
    convert = imports.importer._convert

    def counting(name: str, source: Path) -> Adapter:
        conversions.append(name)
        return convert(name, source)

    monkeypatch.setattr(imports.importer, "_convert", counting)
    for _ in range(2):
        with pytest.raises(RefusedError, match="has rank 9") as caught:
            imports.importer.import_missing(["bad"], "")
        assert (caught.value.reason, caught.value.field) == ("ADAPTER_UNUSABLE", "adapter")
    assert conversions == ["bad"]
    write_peft_lora(imports.folder / "bad", CONFIG, rank=3)
    os.utime(config, (1, 1))
    imports.importer.import_missing(["bad"], "")
    assert imports.keys("") == ["bad@1"]


def test_modules_are_imported_once_and_again_if_they_change(
    imports: Imports, tmp_path: Path, base: Checkpoint
) -> None:
    modules = [LoraModule("start", str(imports.folder / "one"))]
    imports.importer.load_modules(modules)
    restarted = Imports(tmp_path, base)
    restarted.importer.load_modules(modules)
    assert restarted.keys("") == ["start@1"]
    assert restarted.importer.source_of(restarted.store.get("start", "")) == modules[0].path
    write_peft_lora(imports.folder / "one", CONFIG, seed=7)
    restarted.importer.load_modules(modules)
    assert restarted.store.get("start", "").version == 2
    with pytest.raises(ConfigError, match=r"lora_modules: x=/none: .*does not exist"):
        imports.importer.load_modules([LoraModule("x", "/none")])


@pytest.mark.parametrize(
    ("text", "module"),
    [
        ("a=/x/y", LoraModule("a", "/x/y")),
        ("a=b=c", LoraModule("a", "b=c")),
        ('{"name": "a", "path": "b"}', LoraModule("a", "b")),
        (
            '{"name": "a", "path": "b", "base_model_name": "c"}',
            LoraModule("a", "b", "c"),
        ),
    ],
)
def test_modules_are_parsed_as_in_vllm(text: str, module: LoraModule) -> None:
    assert LoraModule.parse(text) == module


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "a=",
        "=b",
        "a/b=c",
        "a@2=c",
        "{",
        '{"name": "a"}',
        '{"name": "a", "path": 3}',
        "[]",
        '{"name": "a", "path": "b", "more": "c"}',
    ],
)
def test_invalid_modules_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="lora_modules"):
        LoraModule.parse(text)
