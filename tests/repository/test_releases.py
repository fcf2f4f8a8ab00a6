"""Releases: the policy, the supported versions, the version's places and `make release`."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.installations import ROOT
from tests.support.release import (
    base_version,
    check_surface,
    current_version,
    image_tags,
    set_version,
)
from tests.support.surface import GOLDEN
from tests.support.vulnerabilities import describe

POLICY = (ROOT / "docs/releases.md").read_text()
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[\w+\])?>=([\d.]+)")
# The libraries of the matrix whose name there differs from that of the distribution.
DISTRIBUTIONS = {
    "Triton": "triton",
    "FlashInfer": "flashinfer-python",
    "Transformer Engine": "transformer-engine",
}


def project() -> Any:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def lower_bounds() -> dict[str, str]:
    """Return the lower bound of each requirement, by the distribution's name."""
    extras = [line for lines in project()["optional-dependencies"].values() for line in lines]
    matches = map(REQUIREMENT.match, [*project()["dependencies"], *extras])
    return {match[1].lower(): match[2] for match in matches if match}


def pins(name: str) -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / name).read_text(), re.MULTILINE)
    return {distribution.lower(): version for distribution, version in lines}


def section(title: str) -> str:
    return POLICY.split(f"# {title}\n")[1].split("\n##")[0]


def rows(title: str) -> list[list[str]]:
    """Return the cells of the table in a section of docs/releases.md, without its head."""
    lines = [line for line in section(title).splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_the_policy_names_every_section_of_the_surface_record() -> None:
    documented = {
        name for cells in rows("Covered surface") for name in re.findall(r"`(\w+)`", cells[0])
    }
    assert documented == set(json.loads(GOLDEN.read_text()))


def test_the_lowest_versions_are_the_bounds_of_the_project() -> None:
    bounds = lower_bounds()
    for name, version in pins("constraints-lowest.txt").items():
        assert re.fullmatch(rf"{re.escape(bounds[name])}(\.0)*", version), name
    required = {
        match[1].lower() for line in project()["dependencies"] if (match := REQUIREMENT.match(line))
    }
    assert required <= pins("constraints-lowest.txt").keys()


def test_the_support_matrix_has_the_bounds_and_the_pinned_versions() -> None:
    bounds, newest = lower_bounds(), pins("constraints.txt")
    table = {cells[0]: cells[1:] for cells in rows("Supported versions")}
    lowest_python, newest_python = re.findall(r"[\d.]+", project()["requires-python"])
    assert table.pop("Python")[0] == lowest_python
    assert newest_python == "3.14"
    for name, (lowest, highest, _) in table.items():
        distribution = DISTRIBUTIONS.get(name, name.split(" ")[0]).lower()
        if distribution in bounds:
            assert lowest == bounds[distribution], name
        if distribution in newest:
            assert highest == newest[distribution], name


def test_deprecated_modules_warn_and_still_have_their_names() -> None:
    from clients import AsyncClient, CallError, Client, Guide, Options

    with pytest.warns(DeprecationWarning, match="clients.generation .* removed in 0.4"):
        from clients import generation
    with pytest.warns(DeprecationWarning, match="clients.aio .* removed in 0.4"):
        from clients import aio
    assert generation.Client is Client and generation.CallError is CallError
    assert generation.Options is Options and generation.Guide is Guide
    assert aio.AsyncClient is AsyncClient


def test_deprecated_names_are_removed_in_time() -> None:
    version = tuple(map(int, base_version(current_version()).split(".")[:2]))
    for name, _, deprecated, removed in rows("Deprecation"):
        first, last = (tuple(map(int, text.split("."))) for text in (deprecated, removed))
        assert last[1] - first[1] >= 2, name
        assert version < last, f"{name} can be removed"


def test_the_manifests_have_the_version_of_the_project() -> None:
    tags = image_tags()
    assert len(tags) == 7
    assert all(file_tags == {base_version(current_version())} for file_tags in tags.values())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the files that `make release` changes."""
    for name in (
        "pyproject.toml",
        "deploy/kubernetes/preamble.yaml",
        "deploy/kubernetes/cuda.yaml",
        "deploy/kubernetes/lws.yaml",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(
        "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A flag.\n\n## [0.1.0] - 2026-11-23\n"
    )
    return tmp_path


def test_a_release_has_its_version_in_all_files(checkout: Path) -> None:
    set_version(checkout, "7.1.0", "2030-01-02")
    assert current_version(checkout) == "7.1.0"
    assert [*image_tags(checkout).values()] == [{"7.1.0"}] * 3
    text = (checkout / "CHANGELOG.md").read_text()
    assert "## [Unreleased]\n\n## [7.1.0] - 2030-01-02\n\n### Added\n\n- A flag.\n" in text

    set_version(checkout, "7.2.0.dev0", "2030-01-03")
    assert current_version(checkout) == "7.2.0.dev0"
    assert all(tags == {"7.2.0"} for tags in image_tags(checkout).values())
    assert (checkout / "CHANGELOG.md").read_text() == text


@pytest.mark.parametrize(
    ("version", "message"),
    [("7.1", "is no version"), ("0.0.1", "is not above the current version")],
)
def test_invalid_versions_are_refused(checkout: Path, version: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_version(checkout, version, "2030-01-02")
    assert current_version(checkout) == current_version()


def test_a_release_without_changes_is_refused(checkout: Path) -> None:
    set_version(checkout, "7.1.0", "2030-01-02")
    with pytest.raises(ValueError, match="section Unreleased"):
        set_version(checkout, "7.2.0", "2030-01-03")


def test_a_patch_release_must_not_change_the_surface() -> None:
    earlier = {"settings": {"port": {"default": 1}}, "routes": ["/a", "/b"]}
    current = {"settings": {"port": {"default": 2}}, "routes": ["/a", "/b", "/c"]}
    assert check_surface("0.2.1", earlier, earlier) == []
    with pytest.raises(ValueError, match="/settings/port/default: 2"):
        check_surface("0.2.1", earlier, current)
    assert check_surface("0.3.0", earlier, current) == ["/settings/port/default: 1"]


def test_vulnerabilities_are_described_with_the_version_that_fixes_them() -> None:
    vulnerability = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2"]}
    report = {
        "dependencies": [
            {"name": "a", "version": "1", "vulns": [vulnerability]},
            {"name": "b", "version": "1", "vulns": []},
            {"name": "c", "skip_reason": "not on the index"},
        ]
    }
    assert describe(report) == ["a 1: PYSEC-1, fixed in 2"]
