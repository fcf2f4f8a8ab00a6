"""What holds for every test: stubs are there, slow suites are counted, caches stay out of home.

A run that asks for one marker (`-m gpu`, `-m slow`, `-m soak`) reads only the files that carry it,
so a machine with a GPU needs nothing that the other tests import. Fixtures live with their tests.
"""

import gc
import os
import random
import sys
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

with suppress(ImportError):  # The tests of a GPU need none of it.
    from hypothesis import HealthCheck, settings

    # How long an example takes is the machine's affair.
    settings.register_profile("ours", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("ours")

ROOT = Path(__file__).resolve().parent.parent
SUITES = ("slow", "gpu", "soak")

# Before torch is loaded, here and in what tests start: tiny models gain nothing from a second
# thread, and threads that spin take the processor from the ranks beside them.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Stubs are generated, so a checkout can lack them, or hold those of an older proto."""
    gc.disable()  # Until all is imported: it makes half a million objects, and hardly garbage.
    if config.option.markexpr == "gpu":
        return
    for proto in sorted((ROOT / "protos" / "preamble" / "v1").glob("*.proto")):
        stub = proto.with_name(f"{proto.stem}_pb2.py")
        if not stub.exists():
            raise pytest.UsageError(f"{proto.name} is not compiled; run `make protos`")
        if stub.stat().st_mtime < proto.stat().st_mtime:
            raise pytest.UsageError(f"{stub.name} is older than its proto; run `make protos`")


@pytest.fixture(autouse=True)
def _drawn_alike(request: pytest.FixtureRequest) -> None:
    """What a test draws is its own, whoever ran before it in the same process."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    suite = config.option.markexpr
    if suite in SUITES and collection_path.name.startswith("test_"):
        return f"mark.{suite}" not in collection_path.read_text() or None
    return None


def pytest_collection_finish() -> None:
    """What was imported stays, so the collector need not look through it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """A suite that has no tests yet is a suite that passes."""
    suite = session.config.option.markexpr
    if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and suite in SUITES:
        session.exitstatus = pytest.ExitCode.OK


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """The slow suites' minutes, file by file: each has a share that it must keep to."""
    if config.option.markexpr not in SUITES:
        return
    seconds: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.split("::")[0]] += report.duration
    for file, spent in sorted(seconds.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{spent / 60:5.1f} min  {file}")


@pytest.fixture(autouse=True, scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Digests are cached under XDG_CACHE_HOME. A test must find none, and leave none behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield
