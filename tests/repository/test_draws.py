"""Random draws of tests have seeds: every run of the fast suite draws the same numbers."""

import ast
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import seed_generators

TESTS = Path(__file__).resolve().parent.parent
# Generators that cannot be seeded.
UNSEEDABLE = re.compile(r"(os\.urandom|uuid\.uuid[14]|secrets\.\w+|random\.SystemRandom)$")
# Shared generators, which are seeded only when a test begins.
SHARED_GENERATOR = re.compile(
    r"(random\.(?!Random|getstate)\w+|(np|numpy)\.random\.(?!default_rng|Generator)\w+"
    r"|torch\.(rand|randn|randint|randperm|normal|bernoulli|multinomial)(_like)?)$"
)
# Calls that create a generator; without a seed as an argument they use the machine's entropy.
NEW_GENERATOR = re.compile(r"(random\.Random|(np|numpy)\.random\.default_rng)$")
# The keys are (file, call), the values are reasons.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("conftest.py", "secrets.randbelow"): "the seed of a random search, which the run prints",
}


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def calls_at_import(tree: ast.Module) -> Iterator[ast.Call]:
    """Yield the calls that run when a module is imported: outside functions, or in decorators."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            pending += [*node.decorator_list, *node.args.defaults]
        elif not isinstance(node, ast.Lambda):
            pending += ast.iter_child_nodes(node)


def unseeded_draws(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, call) for each draw that differs between two runs of the same tests."""
    for call in calls(tree):
        name = ast.unparse(call.func)
        if UNSEEDABLE.match(name) or (NEW_GENERATOR.match(name) and not call.args):
            yield call.lineno, name
    for call in calls_at_import(tree):
        name = ast.unparse(call.func)
        has_generator = any(keyword.arg == "generator" for keyword in call.keywords)
        if SHARED_GENERATOR.match(name) and not has_generator:
            yield call.lineno, name


def test_every_draw_has_a_seed() -> None:
    breaches = {
        f"{file.relative_to(TESTS)}:{line}: {name}"
        for file in TESTS.rglob("*.py")
        for line, name in unseeded_draws(ast.parse(file.read_text()))
        if (file.name, name) not in EXCEPTIONS
    }
    assert not breaches


def test_the_rule_detects_draws_without_a_seed() -> None:
    source = """
X = torch.randn(3)
Y = torch.randn(3, generator=torch.Generator().manual_seed(1))
@pytest.mark.parametrize("x", [random.random()])
def test(x):
    torch.randn(3), os.urandom(3), random.Random(), random.Random(3)
"""
    assert sorted(unseeded_draws(ast.parse(source))) == [
        (2, "torch.randn"),
        (4, "random.random"),
        (6, "os.urandom"),
        (6, "random.Random"),
    ]


def draw_from_shared_generators() -> tuple[float, float, float]:
    return random.random(), float(torch.rand(())), float(numpy.random.rand())


@pytest.fixture
def seed_again(request: pytest.FixtureRequest) -> Callable[[], None]:
    """Return a function that seeds the generators as before each test."""
    return lambda: seed_generators(request.config, request.node.nodeid)


@pytest.fixture(scope="module")
def shared_draw() -> tuple[float, float, float]:
    return draw_from_shared_generators()


def test_draws_of_a_test_are_independent_of_shared_fixtures(
    request: pytest.FixtureRequest,
) -> None:
    first = draw_from_shared_generators()
    fixture_draw = request.getfixturevalue("shared_draw")
    second = draw_from_shared_generators()
    assert len({first, fixture_draw, second}) == 3
    request.getfixturevalue("seed_again")()
    draws_without_fixture = (draw_from_shared_generators(), draw_from_shared_generators())
    assert draws_without_fixture == (first, second)


def test_examples_are_independent_of_the_loaded_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples: list[int] = []

    @settings(max_examples=300)
    @given(st.integers())
    def record_example(number: int) -> None:
        examples.append(number)

    record_example()
    before = examples.copy()
    examples.clear()
    module = ModuleType("full_of_literals")
    module.__file__ = str(tmp_path / "full_of_literals.py")
    Path(module.__file__).write_text("X = [" + ", ".join(map(str, range(7000, 7500))) + "]\n")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    record_example()
    assert examples == before


RANDOM_TESTS = """
import random
import pytest
from hypothesis import given, strategies as st

@given(st.integers(0, 10**9))
def test_numbers(number):
    print("example", number)

@pytest.mark.slow
def test_number():
    print("number", random.random())
"""


def test_the_printed_seed_repeats_a_random_run(tmp_path: Path) -> None:
    for file in (TESTS / "conftest.py", TESTS.parent / "pyproject.toml"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / "tests" / "support").mkdir(parents=True)  # What conftest.py imports.
    shutil.copy(TESTS / "support" / "ranks.py", tmp_path / "tests" / "support")
    (tmp_path / "test_random.py").write_text(RANDOM_TESTS)

    def run(**variables: str) -> tuple[list[str], list[str]]:
        """Run the tests; return the printed seeds and the printed draws."""
        environment = {
            name: text for name, text in os.environ.items() if name != "PREAMBLE_TEST_SEED"
        }
        output = subprocess.run(
            [sys.executable, "-m", "pytest", "-m", "slow", "-rP", "."],
            cwd=tmp_path,
            env=environment | variables,
            check=True,
            capture_output=True,
            text=True,
            timeout=300,
        ).stdout
        draws = re.findall(r"^(?:example|number) .+", output, re.MULTILINE)
        return re.findall(r"PREAMBLE_TEST_SEED=(\d+)", output), draws

    (seed,), draws = run()
    assert len(draws) > 50 and "number" in draws[-1]
    assert run(PREAMBLE_TEST_SEED=seed) == ([seed], draws)
