"""ARCHITECTURE.md describes every package and module, and its glossary names existing modules."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.glossary import glossary

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
FOLDERS = ("gpt", "serving", "ptuning", "planning", "checkpoints_tools", "clients", "bench")
PACKAGES = sorted(
    path.parent.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("__init__.py")
)


def section(package: str) -> str:
    """Return the text between the heading of a package and the next heading."""
    title = f"{package}/" if "/" not in package else package
    match = re.search(rf"^#### `{re.escape(title)}`\n(.*?)(?=^#)", TEXT, re.DOTALL | re.MULTILINE)
    assert match, f"no section '#### `{title}`' describes the package {package}"
    return match[1]


@pytest.mark.parametrize("package", PACKAGES)
def test_the_section_of_a_package_names_its_modules(package: str) -> None:
    text = section(package)
    modules = {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__", "__main__"}
    missing = sorted(stem for stem in modules if f"`{stem}`" not in text)
    assert not missing, f"{package}: its section does not name {', '.join(missing)}"


def test_every_path_in_the_text_exists() -> None:
    paths = re.findall(rf"`((?:{'|'.join(FOLDERS)}|tests|docs|protos)/[\w./]+\.\w+)`", TEXT)
    assert len(paths) > 100
    missing = sorted({path for path in paths if not (ROOT / path).exists()})
    assert not missing, f"ARCHITECTURE.md names files that do not exist: {', '.join(missing)}"


def test_each_glossary_term_is_in_the_docstring_of_its_module() -> None:
    terms = glossary()
    assert len(terms) >= 60
    missing = []
    for term, module in terms:
        docstring = ast.get_docstring(ast.parse((ROOT / module).read_text("utf-8"))) or ""
        text = re.sub(r"\s+", " ", docstring).lower()
        if term.lower() not in text:
            missing.append(f"{module}: {term}")
    assert not missing, "\n".join(missing)
