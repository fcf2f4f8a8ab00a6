"""Release command: writes a new version into pyproject.toml, CHANGELOG.md and the manifests.

    python -m tests.support.release VERSION

It compares the surface record with that of the release before. It makes no commit and no tag, and
prints the next steps. docs/releases.md has the policy.
"""

import argparse
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.support.installations import ROOT
from tests.support.surface import GOLDEN

VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)(\.dev0)?")
UNRELEASED = "## [Unreleased]\n"
MANIFESTS = "deploy/kubernetes/*.yaml"
LINES_SHOWN_MAX = 100


def current_version(root: Path = ROOT) -> str:
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    return version


def base_version(version: str) -> str:
    """Return the release that a version is or becomes: without `.dev0`."""
    return version.removesuffix(".dev0")


def image_tags(root: Path = ROOT) -> dict[str, set[str]]:
    """Return the tags of Preamble's images in each manifest that has some, by the file's name."""
    tags_by_file = {
        path.name: set(re.findall(r"image: preamble[\w-]*:(\S+)", path.read_text()))
        for path in sorted(root.glob(MANIFESTS))
    }
    return {name: tags for name, tags in tags_by_file.items() if tags}


def set_version(root: Path, version: str, day: str) -> None:
    """Write `version` into the files of a checkout; `day` is the date in the changelog."""
    parts = VERSION.fullmatch(version)
    if parts is None:
        raise ValueError(f"{version} is no version; use 0.2.0, or 0.3.0.dev0 after a release")
    if _order(version) <= _order(current_version(root)):
        raise ValueError(f"{version} is not above the current version, {current_version(root)}")
    if parts[4] is None:
        _cut_changelog(root / "CHANGELOG.md", version, day)
    _replace(root / "pyproject.toml", r'(?m)^version = "[^"]*"', f'version = "{version}"')
    for path in root.glob(MANIFESTS):
        if path.name in image_tags(root):
            tag = rf"\g<1>{base_version(version)}"
            _replace(path, r"(image: preamble[\w-]*:)\S+", tag, count=0)


def _order(version: str) -> tuple[int, ...]:
    parts = VERSION.fullmatch(version)
    assert parts is not None, version
    return (*map(int, parts.groups()[:3]), parts[4] is None)


def _cut_changelog(path: Path, version: str, day: str) -> None:
    text = path.read_text()
    start = text.index(UNRELEASED) + len(UNRELEASED)
    end = text.find("\n## ", start)
    section = text[start : end if end >= 0 else len(text)]
    if not section.strip():
        raise ValueError("the section Unreleased of CHANGELOG.md is empty")
    path.write_text(f"{text[:start]}\n## [{version}] - {day}\n{text[start:]}")


def _replace(path: Path, pattern: str, replacement: str, *, count: int = 1) -> None:
    """Replace the first `count` matches of a pattern; 0: all of them."""
    text, replaced = re.subn(pattern, replacement, path.read_text(), count=count)
    assert replaced, f"{path} has no {pattern}"
    path.write_text(text)


def surface_entries(record: Any, path: str = "") -> Iterator[str]:
    """Yield a line for each entry of a surface record: its path and its value."""
    if isinstance(record, dict) and record:
        for key, entry in record.items():
            yield from surface_entries(entry, f"{path}/{key}")
    elif isinstance(record, list):
        yield from (f"{path}: {json.dumps(entry)}" for entry in record)
    else:
        yield f"{path}: {json.dumps(record)}"


def check_surface(version: str, earlier: Any, current: Any) -> list[str]:
    """Return what the release removes from the surface record, for review.

    Raise ValueError if a patch release changes the record.
    """
    old, new = set(surface_entries(earlier)), set(surface_entries(current))
    if not version.endswith(".0") and old != new:
        changes = "\n".join(sorted(old ^ new)[:LINES_SHOWN_MAX])
        raise ValueError(f"{version} is a patch release, and changes the surface:\n{changes}")
    return sorted(old - new)


def released_surface(root: Path) -> tuple[str, Any] | None:
    """Return the tag of the release before and its surface record; None if there is no tag."""
    tags = _git(root, "tag", "--list", "v*", "--sort=-version:refname", "--merged").split()
    if not tags:
        return None
    record = _git(root, "show", f"{tags[0]}:{GOLDEN.relative_to(ROOT).as_posix()}")
    return tags[0], json.loads(record)


def _git(root: Path, *words: str) -> str:
    command = ["git", *words]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.release", description=__doc__)
    parser.add_argument("version", metavar="VERSION", help="0.2.0, or 0.3.0.dev0 after a release")
    version = parser.parse_args(argv).version
    is_release = not version.endswith(".dev0")
    try:
        if is_release and (released := released_surface(ROOT)) is not None:
            tag, record = released
            removed = check_surface(version, record, json.loads(GOLDEN.read_text()))
            print(f"{len(removed)} entries of the surface of {tag} were removed or changed:")
            print("\n".join(removed[:LINES_SHOWN_MAX]))
        set_version(ROOT, version, datetime.now(UTC).date().isoformat())
    except ValueError as error:
        print(f"make release: {error}", file=sys.stderr)
        return 1
    subject = f"Release {version}" if is_release else f"Begin {base_version(version)}"
    print(f"now review git diff, and run: git commit -am '{subject}'")
    if is_release:
        print(f"then: git tag -a v{version} -m '{subject}' && make wheel sbom")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
