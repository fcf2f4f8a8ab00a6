"""Planted faults: the checks of the GPU path detect them, and the checker detects bad entries."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import planted_faults
from tests.support.planted_faults import (
    FAULTS,
    ROOT,
    FaultChecker,
    FaultCheckError,
    PlantedFault,
    UndetectedFaultError,
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


@pytest.mark.parametrize(
    ("errors", "line", "counts"),
    [
        ([], "detected", "2 of 2 faults are detected, 0 are not detected, 0 are not checked"),
        (
            [UndetectedFaultError("passes")],
            "NOT DETECTED  passes",
            "1 of 2 faults are detected, 1 are not detected, 0 are not checked",
        ),
        (
            [FaultCheckError("skipped")],
            "NOT CHECKED  skipped",
            "1 of 2 faults are detected, 0 are not detected, 1 are not checked",
        ),
    ],
)
def test_the_report_counts_unchecked_faults_apart(
    errors: list[FaultCheckError],
    line: str,
    counts: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    def check(_: FaultChecker, fault: PlantedFault) -> None:
        if errors and fault.title == "another sum":
            raise errors[0]

    monkeypatch.setattr(
        planted_faults, "FAULTS", (WRONG_SUM, replace(WRONG_SUM, title="another sum"))
    )
    monkeypatch.setattr(planted_faults, "copied_source", lambda: nullcontext(tmp_path))
    monkeypatch.setattr(FaultChecker, "check", check)
    assert planted_faults.main([]) == (1 if errors else 0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith(line) and lines[-1] == counts


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
    ("changes", "reason", "is_checked"),
    [
        ({"replacement": "b + a"}, "does not fail; its outcome is passed", True),
        ({"replacement": "a +"}, "no result of this test\n(.*\n)*.*SyntaxError", False),
        ({"replacement": "int('x')"}, "fails with ValueError, but not with AssertionError", True),
        ({"message": "add(2, 2)"}, "fails with AssertionError, but not with", True),
        ({"tests": ("test_sum.py::test_none",)}, "no result of this test", False),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_fault_that_is_not_detected_as_stated_is_an_error(
    changes: dict[str, str], reason: str, is_checked: bool, small_checker: FaultChecker
) -> None:
    with pytest.raises(FaultCheckError, match=reason) as raised:
        small_checker.check(replace(WRONG_SUM, **changes))  # type: ignore[arg-type]
    assert isinstance(raised.value, UndetectedFaultError) == is_checked


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
