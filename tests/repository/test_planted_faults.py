"""Planted faults: the checks of the GPU path detect them, and the checker detects bad entries."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.planted_faults import (
    FAULTS,
    ROOT,
    FaultChecker,
    FaultCheckError,
    PlantedFault,
    copied_source,
)

needs_pytest_runs = pytest.mark.soak
TEST = "test_sum.py::test_sum"
# A fault of the files that the fixture `small_checker` writes.
WRONG_SUM = PlantedFault(
    title="a wrong sum",
    file="sums.py",
    text="a + b",
    replacement="a - b",
    tests=(TEST,),
    message="add(1, 2) == 3",
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_the_entries_agree_with_the_source(fault: PlantedFault) -> None:
    assert fault.plant((ROOT / fault.file).read_text("utf-8"))
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / file).read_text("utf-8")


def test_a_text_that_the_file_lacks_or_repeats_is_an_error() -> None:
    for source, count in (("a * b", 0), ("a + b + (a + b)", 2)):
        with pytest.raises(FaultCheckError, match=rf"'a \+ b' {count} times.*adapt the table"):
            WRONG_SUM.plant(source)


@pytest.fixture(scope="module")
def checker() -> Iterator[FaultChecker]:
    if find_spec("triton") is None:
        pytest.skip("no Triton: make tools")
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout, so the tracked files are unknown")
    with copied_source() as folder:
        yield FaultChecker(folder)


@needs_pytest_runs
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.title)
def test_the_fault_is_detected(fault: PlantedFault, checker: FaultChecker) -> None:
    checker.check(fault)


@pytest.fixture
def small_checker(tmp_path: Path) -> FaultChecker:
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "test_sum.py").write_text(
        "from sums import add\n\ndef test_sum():\n    assert add(1, 2) == 3\n"
    )
    return FaultChecker(tmp_path)


@needs_pytest_runs
def test_a_detected_fault_leaves_the_source_unchanged(small_checker: FaultChecker) -> None:
    small_checker.check(WRONG_SUM)
    assert (small_checker.folder / "sums.py").read_text() == "def add(a, b):\n    return a + b\n"
    # The source of the first check is the source of the second one.
    small_checker.check(replace(WRONG_SUM, replacement="a * b"))


@needs_pytest_runs
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"replacement": "b + a"}, "does not fail; its outcome is passed"),
        ({"replacement": "a +"}, "no result of this test\n(.*\n)*.*SyntaxError"),
        ({"replacement": "int('x')"}, "fails with ValueError, but not with AssertionError"),
        ({"message": "add(2, 2)"}, "fails with AssertionError, but not with"),
        ({"tests": ("test_sum.py::test_none",)}, "no result of this test"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_that_is_not_detected_as_stated_is_an_error(
    changes: dict[str, str], reason: str, small_checker: FaultChecker
) -> None:
    with pytest.raises(FaultCheckError, match=reason):
        small_checker.check(replace(WRONG_SUM, **changes))  # type: ignore[arg-type]


@needs_pytest_runs
@pytest.mark.parametrize(("result", "outcome"), [("assert False", "failed"), ("skip", "skipped")])
def test_a_test_that_does_not_pass_without_the_fault_is_an_error(
    result: str, outcome: str, small_checker: FaultChecker
) -> None:
    statement = "import pytest; pytest.skip('no device')" if result == "skip" else result
    path = small_checker.folder / "test_sum.py"
    path.write_text(path.read_text() + f"    {statement}\n")
    with pytest.raises(FaultCheckError, match=f"without the fault, .* has the outcome '{outcome}'"):
        small_checker.check(WRONG_SUM)
