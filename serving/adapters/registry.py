"""The adapters that a server answers with, and who may ask for which.

What lies in the directory itself is everybody's; what lies in a folder of it is the tenant's of
that name, who sees it in place of what everybody has under the same name. Nobody learns what others
have: what is another's is as unknown as what is nowhere. A directory is
`serving.adapters.directory`'s business.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from gpt.adapters.adapter_file import Adapter, Name, parse_name
from gpt.adapters.card import NAME
from gpt.errors import ConfigError
from serving.adapters.directory import Resident, Shelf
from serving.request import UnknownAdapterError

__all__ = ["Adapters", "Resident"]

log = logging.getLogger(__name__)


class Adapters:
    """Those of `directory` that pass `check`, which raises what is wrong with one.

    There are none before the first `scan`. At most `adapters_max`, of all tenants together.
    """

    def __init__(
        self,
        directory: Path | None,
        check: Callable[[Adapter], None],
        *,
        adapters_max: int,
        ripe: Callable[[Resident], bool] = lambda resident: True,
    ) -> None:
        """`ripe`: whether an adapter may be current where another one can be."""
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"adapters: {directory} is not a directory; make it, or name another")
        self.directory, self.check, self.adapters_max = directory, check, adapters_max
        self._ripe, self._scanning = ripe, threading.Lock()
        self._gone_failures = 0  # Of directories that are there no more.
        # By tenant. Replaced whole, never changed, so that readers need no lock.
        self._shelves: dict[str, Shelf] = {} if directory is None else {"": self._shelf(directory)}

    def __len__(self) -> int:
        return sum(len(shelf) for shelf in self._shelves.values())

    @property
    def failures(self) -> int:
        """Files that were refused, each time they changed."""
        return self._gone_failures + sum(shelf.failures for shelf in self._shelves.values())

    def resolve(self, name: str, tenant: str = "") -> Resident:
        """The adapter called `name` or `name@version`; an unknown one may be new on disk."""
        bare, _ = parse_name(name)  # What cannot be a name costs no look at the disk.
        found = self._find(bare, name, tenant)
        if found is None:
            try:
                if any(shelf.stale() for shelf in self._of(tenant)):
                    self.scan(tenant)
            except OSError:  # A network file system may be away for a while.
                log.exception("event=adapters_not_scanned")
            found = self._find(bare, name, tenant)
        if found is None:
            way = "ask for one that ListAdapters names"
            if self.directory is None:
                way = "no directory of adapters was given (--adapters DIR)"
            raise UnknownAdapterError(f"there is no adapter {name!r} here; {way}")
        return found

    def list(self, tenant: str = "") -> list[tuple[Resident, bool]]:
        """All that a tenant sees by name and version, each with whether its name alone means it."""
        if not self._shelves:
            return []
        own, *others = self._of(tenant)
        seen = [entry for shelf in others for entry in shelf.entries if not own.has(entry[0].name)]
        if not seen:
            return [*own.entries]
        return sorted([*own.entries, *seen], key=lambda entry: (entry[0].name, entry[0].version))

    def all(self) -> Sequence[Resident]:
        """Those of all tenants."""
        shelves = self._shelves.values()
        return [resident for shelf in shelves for resident, _ in shelf.entries]

    def is_current(self, resident: Resident) -> bool:
        shelf = self._shelves.get(resident.tenant)
        return shelf is not None and shelf.is_current(resident)

    def refusal(self, name: Name, tenant: str) -> str | None:
        """Why a file of that name in the tenant's own directory cannot be used."""
        shelf = self._shelves.get(tenant)
        return None if shelf is None else shelf.refusal(name)

    def scan(self, tenant: str | None = None) -> None:
        """Look at the directory, or at what one tenant sees of it."""
        with self._scanning:
            if self.directory is None:
                return
            shared = self._shelves[""]
            self._scan(shared)
            self._shelve(shared)
            for name, shelf in list(self._shelves.items()):
                if name and tenant in (None, name):
                    try:
                        self._scan(shelf)
                    except OSError as error:  # It must not take the others' along.
                        log.warning("event=adapters_not_scanned tenant=%s error=%s", name, error)

    def weigh(self) -> None:
        """Choose again what is current, as other adapters are ripe now."""
        with self._scanning:
            for shelf in self._shelves.values():
                shelf.weigh()

    def _shelf(self, directory: Path, tenant: str = "") -> Shelf:
        return Shelf(directory, self.check, tenant, self._ripe)

    def _scan(self, shelf: Shelf) -> None:
        shelf.scan(self.adapters_max - (len(self) - len(shelf)))

    def _shelve(self, shared: Shelf) -> None:
        """A shelf for each folder that can be a tenant's."""
        tenants = [name for name in shared.folders if NAME.fullmatch(name)]
        shelves, before = {"": shared}, self._shelves
        for name in tenants:
            shelves[name] = before.get(name) or self._shelf(shared.directory / name, name)
        lost = [shelf for name, shelf in before.items() if name not in shelves]
        self._gone_failures += sum(shelf.failures for shelf in lost)
        self._shelves = shelves

    def _of(self, tenant: str) -> Sequence[Shelf]:
        """Where a tenant's names are looked up, one after the other."""
        shelves = self._shelves
        return [shelves[one] for one in dict.fromkeys((tenant, "")) if one in shelves]

    def _find(self, bare: str, name: str, tenant: str) -> Resident | None:
        """A tenant's own versions hide all of everybody's: a name means one thing."""
        shelf = next((shelf for shelf in self._of(tenant) if shelf.has(bare)), None)
        return None if shelf is None else shelf.find(name)
