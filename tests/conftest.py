"""Configuration of all tests: check of the stubs, seeds of random draws, times of slow suites.

A run that selects one marker (`-m gpu`, `-m slow`, `-m clients`, `-m soak`) reads only the files
with that marker, so a machine with a GPU needs no packages that only other tests import. Fixtures
are in the files of their tests.

The fast suite draws the same numbers in every run. `-m slow` and `-m soak` draw from a new seed,
which the header of the run prints; PREAMBLE_TEST_SEED or --hypothesis-seed sets the seed of any
run. `-m slow` also runs the property tests of the fast suite, with random examples.
"""

import gc
import os
import random
import secrets
import sys
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from tests.support.ranks import preload_slow_modules

# Profiles of hypothesis.
FIXED_EXAMPLES = "fixed"
RANDOM_EXAMPLES = "random"

with suppress(ImportError):  # GPU tests run without hypothesis.
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers

    # No deadline, because the time of an example depends on the machine. No database of failed
    # examples, because it would make a run depend on earlier runs.
    profile = settings(deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile(FIXED_EXAMPLES, profile, derandomize=True)
    settings.register_profile(RANDOM_EXAMPLES, profile, derandomize=False)
    settings.load_profile(FIXED_EXAMPLES)
    # Hypothesis draws some values from the literals of the loaded modules. The loaded modules
    # depend on the earlier tests, so a fixed seed alone does not fix the examples.
    setattr(providers, "is_local_module_file", lambda path: False)  # noqa: B010

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("slow", "clients", "gpu", "soak")
SEED_VARIABLE = "PREAMBLE_TEST_SEED"

# Set before torch is loaded in this process and in the processes that tests start. Tiny models gain
# nothing from a second thread, and OpenMP threads that spin while they wait slow down other ranks.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.hookimpl(tryfirst=True)  # Hypothesis reads its option in its own pytest_configure.
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed, and refuse missing or outdated stubs, because stubs are generated."""
    # Imports create half a million objects and little garbage, so collections only cost time. The
    # collector is enabled again after the collection of tests.
    gc.disable()
    _choose_seed(config)
    if config.option.markexpr == "gpu":
        return
    if config.option.markexpr == "slow":
        preload_slow_modules()
    for proto in sorted((ROOT / "protos" / "preamble" / "v1").glob("*.proto")):
        stub = proto.with_name(f"{proto.stem}_pb2.py")
        if not stub.exists():
            raise pytest.UsageError(f"{proto.name} is not compiled; run `make protos`")
        if stub.stat().st_mtime < proto.stat().st_mtime:
            raise pytest.UsageError(f"{stub.name} is older than its proto; run `make protos`")


def _choose_seed(config: pytest.Config) -> None:
    """Set the seed as the option of hypothesis, which pytest-xdist passes to its workers."""
    seed = _seed(config) or os.environ.get(SEED_VARIABLE)
    if seed is None and config.option.markexpr in ("slow", "soak"):
        seed = str(secrets.randbelow(2**32))
    config.option.hypothesis_seed = seed
    if seed is not None and "hypothesis" in sys.modules:
        settings.load_profile(RANDOM_EXAMPLES)


def _seed(config: pytest.Config) -> str | None:
    """The seed of the run. None: each test draws the same numbers in every run."""
    seed: str | None = getattr(config.option, "hypothesis_seed", None)
    return seed


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = _seed(config)
    return (
        None if seed is None else f"random examples; to repeat this run, set {SEED_VARIABLE}={seed}"
    )


def seed_generators(config: pytest.Config, name: str) -> None:
    """Seed the shared generators from the seed of the run and a name."""
    seed = zlib.crc32(f"{_seed(config) or ''}{name}".encode())
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


@pytest.fixture(autouse=True)
def _seeded_generators(request: pytest.FixtureRequest) -> None:
    """Make the draws of a test independent of the tests before it in the same process."""
    seed_generators(request.config, request.node.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[object], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Make the draws of a shared fixture and of the test that first requests it independent."""
    if fixturedef.scope == "function":
        return (yield)
    restores = [partial(random.setstate, random.getstate())]
    if "numpy" in sys.modules:
        generator = sys.modules["numpy"].random
        restores += [partial(generator.set_state, generator.get_state())]
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        restores += [partial(torch.set_rng_state, torch.get_rng_state())]
    parameter = getattr(request, "param_index", 0)
    seed_generators(request.config, f"{fixturedef.baseid}::{fixturedef.argname}[{parameter}]")
    try:
        return (yield)
    finally:
        for restore in restores:
            restore()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    suite = config.option.markexpr
    if suite in SUITES and collection_path.name.startswith("test_"):
        marks = [f"mark.{suite}", *(["hypothesis"] if suite == "slow" else [])]
        return not any(mark in collection_path.read_text() for mark in marks) or None
    return None


@pytest.hookimpl(tryfirst=True)  # Before pytest selects tests by their markers.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark every property test as slow in a run of `-m slow`, which draws random examples."""
    for item in items if config.option.markexpr == "slow" else []:
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if is_property or item.get_closest_marker("hypothesis"):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """Freeze the imported objects, which live until the end, so that no collection scans them."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A suite without tests passes."""
    suite = session.config.option.markexpr
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and suite in SUITES:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the minutes of each file of a slow suite."""
    if config.option.markexpr not in SUITES:
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    for file in sorted(seconds, key=lambda file: -seconds[file]):
        terminalreporter.write_line(f"{seconds[file] / 60:5.1f} min  {file}")


@pytest.fixture(autouse=True, scope="module")
def _collected_garbage() -> Iterator[None]:
    """Collect garbage after each file, so that its ResourceWarnings occur in that file.

    An unclosed resource in a reference cycle warns when the cycle is collected, and warnings are
    errors. What a file leaves in caches, such as the syntax trees of the repository's modules, is
    frozen: collections after the later files would scan millions of objects, in a second each.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give each file its own XDG_CACHE_HOME, where digests and plans are cached.

    Cached files of the user or of another test file would change the results.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
