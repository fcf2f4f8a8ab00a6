"""Adapter imports: adapters in the formats of other programs, converted into the adapter directory.

An adapter that PEFT, NeMo or TGIS wrote, or an adapter file of ours, is read from a path, checked
against the model, and published as the next version of a name. A caller may name only paths below
the import directory; the operator's `lora_modules` may be anywhere. A request for an adapter that
does not exist imports the folder of this name in the import directory, if there is one. All methods
access files; call them in a thread.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from gpt.adapters.adapter_file import Adapter, build_adapter, open_adapter, parse_name
from gpt.adapters.change_log import ChangeAuthor
from gpt.checkpoint.logical_tensor import Checkpoint, ModelIdentity
from gpt.errors import AdapterError, ConfigError, PreambleError, RequestError
from serving.adapters.registry import AdapterRegistry, LoadedAdapter
from serving.adapters.version_updates import AdapterStore
from serving.request import RefusedError, UnknownAdapterError

ENTRIES_MAX = 10_000  # Files and folders below the path of an adapter.

log = logging.getLogger(__name__)

_MODULE_KEYS = {"name", "path", "base_model_name"}
# Name, modification time and size of each file of a folder.
_FolderState = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class LoraModule:
    """An adapter that the server loads at its start: an entry of `lora_modules`."""

    name: str
    path: str
    base_model_name: str | None = None

    @classmethod
    def parse(cls, text: str) -> "LoraModule":
        """Parse NAME=PATH, or a JSON object with name, path and, optionally, base_model_name."""
        name, separator, path = text.partition("=")
        module = cls(name, path)
        if text.lstrip().startswith("{"):
            module, separator = cls._parse_json(text), "="
        if not (separator and module.path):
            raise ConfigError(
                f"lora_modules has {text[:200]!r}; an entry is NAME=PATH, or a JSON object with "
                "name, path and, optionally, base_model_name"
            )
        try:
            version = parse_name(module.name).version
        except RequestError as error:
            raise ConfigError(f"lora_modules: {error}") from None
        if version is not None:
            raise ConfigError(f"lora_modules has {module.name!r}; give the name without a version")
        return module

    @classmethod
    def _parse_json(cls, text: str) -> "LoraModule":
        with suppress(ValueError, RecursionError):
            record = json.loads(text)
            if {"name", "path"} <= record.keys() <= _MODULE_KEYS and all(
                isinstance(value, str) for value in record.values()
            ):
                return cls(**record)
        return cls("", "")


@dataclass(frozen=True)
class _ImportedAdapter:
    key: str  # `name@version`.
    source: str  # The path, as the caller or the operator gave it.


class AdapterImporter:
    """Imports adapters into the directory of `store`.

    `base` is the checkpoint of the model. `identity` returns what is known of the model's identity
    without reading its weights. `folder`: the import directory; None: callers name no paths.
    """

    def __init__(
        self,
        store: AdapterStore,
        base: Checkpoint,
        identity: Callable[[], ModelIdentity],
        folder: Path | None,
    ) -> None:
        self._store = store
        self._base = base
        self._identity = identity
        self._folder = folder
        self._locks: dict[str, threading.Lock] = {}  # By tenant; each serializes loads and unloads.
        # The adapters that this server has imported, by tenant and name.
        self._imported: dict[tuple[str, str], _ImportedAdapter] = {}
        # Why a folder of the import directory cannot be imported, with the state of its files.
        self._failures: dict[str, tuple[_FolderState, str]] = {}

    @property
    def _registry(self) -> AdapterRegistry:
        return self._store.adapters

    def source_of(self, adapter: LoadedAdapter) -> str | None:
        """Return the path from which this server has imported an adapter, if it has."""
        imported = self._imported.get((adapter.tenant, adapter.name))
        return imported.source if imported and imported.key == adapter.key else None

    def load(
        self, name: str, path: str, tenant: str, author: ChangeAuthor, *, replaces: bool = False
    ) -> LoadedAdapter:
        """Import the adapter at `path`, below the import directory, as the current version.

        If the name is taken, `replaces` must be true. A version that this server has imported under
        the name before is then unloaded; requests that use it still finish.
        """
        with self._lock(tenant):
            try:
                if parse_name(name).version is not None:
                    raise RequestError(f"name is {name!r}; give it without a version", "name")
                if not replaces and self._registry.has(name, tenant):
                    raise RequestError(
                        f"The lora adapter '{name}' has already been loaded. If you want to load "
                        "the adapter in place, set 'load_inplace' to True.",
                        "name",
                    )
                source = self._resolve_path(name, path)
            except PreambleError as error:
                self._store.record_refusal("upload", name, author, error)
                raise
            return self._import(name, source, path, tenant, author)

    def unload(self, name: str, tenant: str, author: ChangeAuthor) -> None:
        """Unload all versions of a name, or the version `name@version`."""
        with self._lock(tenant):
            # The current version is last, so that the name never selects an older one.
            keys = sorted(
                (entry.is_current, entry.key)
                for entry in self._registry.list_all(tenant)
                if name in (entry.name, entry.key)
            )
            # The store refuses the versions of others, and reports an unknown version.
            unknown_key = name if "@" in name else f"{name}@1"
            for _, key in keys or [(False, unknown_key)]:
                self._store.unload(key, tenant, author)

    def load_modules(self, modules: Iterable[LoraModule]) -> None:
        """Import the operator's adapters as shared adapters.

        A module whose adapter is the current version already, from an earlier start, is kept.
        """
        author = ChangeAuthor.of_command("serve --lora-modules")
        for module in modules:
            try:
                self._load_module(module, author)
            except PreambleError as error:
                text = f"lora_modules: {module.name}={module.path}: {error}"
                raise ConfigError(text) from None

    def _load_module(self, module: LoraModule, author: ChangeAuthor) -> None:
        source = Path(module.path)
        adapter = self._convert(module.name, source)
        with suppress(UnknownAdapterError):
            current = self._registry.lookup(module.name)
            if current.adapter_ref.digest == adapter.digest:
                self._imported["", module.name] = _ImportedAdapter(current.key, module.path)
                return
        self._import(module.name, source, module.path, "", author)

    def import_missing(self, names: Iterable[str], tenant: str) -> None:
        """Import the folders of unknown adapters; raise if a folder cannot be imported."""
        if self._folder is None:
            return
        for name in names:
            try:
                if not name or parse_name(name).version is not None:
                    continue
            except RequestError:  # The admission refuses the name.
                continue
            if not self._registry.has(name, tenant) and (self._folder / name).is_dir():
                self._import_folder(name)

    def _import_folder(self, name: str) -> None:
        """Import a folder of the import directory as a shared adapter."""
        with self._lock(""):
            if self._registry.has(name):  # Another request has imported it meanwhile.
                return
            author = ChangeAuthor(protocol="import", method="adapter_imports")
            try:
                source = self._resolve_path(name, name)
                state = _folder_state(source)
                failed_state, reason = self._failures.get(name, (None, ""))
                if failed_state == state:  # Each request would read and convert the files again.
                    raise RefusedError("ADAPTER_UNUSABLE", reason, "adapter")
                try:
                    self._import(name, source, name, "", author)
                except RefusedError as error:
                    if error.reason == "ADAPTER_UNUSABLE":
                        self._failures[name] = state, str(error)
                    raise
            except (RefusedError, RequestError) as error:
                error.field = "adapter"
                raise

    def _import(
        self, name: str, source: Path, path_text: str, tenant: str, author: ChangeAuthor
    ) -> LoadedAdapter:
        adapter = self._publish(name, source, tenant, author)
        if not self._registry.is_current(adapter):
            adapter = self._store.promote(adapter.key, tenant, author)
        previous = self._imported.get((tenant, name))
        self._imported[tenant, name] = _ImportedAdapter(adapter.key, path_text)
        if previous is not None and previous.key != adapter.key:
            with suppress(UnknownAdapterError):  # It was unloaded meanwhile.
                self._store.unload(previous.key, tenant, author)
        log.info("event=adapter_imported adapter=%s tenant=%s", adapter.key, tenant)
        return adapter

    def _publish(self, name: str, source: Path, tenant: str, author: ChangeAuthor) -> LoadedAdapter:
        try:
            upload = self._store.start_upload(name, tenant, author)
        except PreambleError as error:
            self._store.record_refusal("upload", name, author, error)
            raise
        try:
            upload.create_file()
            upload.write_adapter(self._convert(name, source))
            adapter = upload.finish()
        except BaseException as error:
            upload.discard(error)
            raise
        upload.discard()
        return adapter

    def _convert(self, name: str, source: Path) -> Adapter:
        """Read an adapter, and give its card the name and the model's digest, if it is known."""
        try:
            adapter = open_adapter(source, base=self._base)
            card = replace(adapter.card, name=name)
            identity = self._identity()
            if card.base_digest is None and identity.digest:
                card = replace(
                    card, base_digest=identity.digest, base_fingerprint=identity.fingerprint
                )
            return build_adapter(card, adapter.table, adapter.linears)
        except AdapterError as error:
            # The caller may see the names of the files, but not their folders.
            reason = str(error).replace(f"{source.parent}{os.sep}", "")
            reason = reason.replace(str(self._base.path), self._base.path.name)
            raise RefusedError("ADAPTER_UNUSABLE", f"{name}: {reason}", "path") from None

    def _resolve_path(self, name: str, path: str) -> Path:
        """Return the path of an adapter; refuse a path outside the import directory."""
        if self._folder is None:
            raise RefusedError(
                "NOT_POSSIBLE_NOW",
                "this server reads no adapters from paths that callers give; start it with "
                "--adapter-imports DIR, or upload the adapter",
                "path",
            )
        unknown_error = UnknownAdapterError(
            f"Loading lora {name} failed: No adapter found for {path[:200]}"
        )
        unknown_error.field = "path"
        try:
            folder = self._folder.resolve()
            source = (folder / path).resolve()
            is_inside = source.is_relative_to(folder) and _has_only_links_into(folder, source)
            if is_inside and source.exists():
                return source
        except (OSError, ValueError, RuntimeError):  # For example, a null byte, or a loop of links.
            raise unknown_error from None
        if is_inside:
            raise unknown_error
        raise RequestError(
            f"path is {path[:200]!r}, outside the directory from which this server reads adapters "
            "(adapter_imports); copy the adapter into it, or upload it",
            "path",
        )

    def _lock(self, tenant: str) -> threading.Lock:
        return self._locks.setdefault(tenant, threading.Lock())


def _has_only_links_into(folder: Path, source: Path) -> bool:
    """Tell whether all paths below an adapter's path lead into `folder`; links may not."""
    paths = list(islice(source.rglob("*"), ENTRIES_MAX + 1)) if source.is_dir() else []
    if len(paths) > ENTRIES_MAX:
        raise RequestError(
            f"path has more than {ENTRIES_MAX} files and folders below it; give the folder of one "
            "adapter",
            "path",
        )
    return all(path.resolve().is_relative_to(folder) for path in paths)


def _folder_state(folder: Path) -> _FolderState:
    with os.scandir(folder) as entries:
        stats = [(entry.name, entry.stat()) for entry in entries]
    return tuple(sorted((name, status.st_mtime_ns, status.st_size) for name, status in stats))
