"""Planted faults: the checks in this table, of the GPU path without a GPU, detect their faults.

A check that cannot fail proves nothing. `FAULTS` is a table of small changes of the source, each
with the tests that must then fail. The program copies the tracked files to a temporary folder, runs
the tests there without the change and with it, and demands that they pass without it and fail with
it, each with the stated error. `python -m tests.support.planted_faults -k TEXT` checks the faults
whose titles contain a text; `make soak` checks all of them.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from gpt.child_processes import ChildProcess, read_log_tail

ROOT = Path(__file__).resolve().parents[2]
# Files that are built from tracked files, and that the tests need.
BUILT_FILES = ("protos/preamble/v1/*_pb2*", "protos/foreign/*.binpb", "gpt/cpu/libkernels.so")
OTHER_TRITON_VERSIONS = Path("build/triton")
TESTS_S_MAX = 900.0
LOG_TAIL_BYTES = 2000

KERNELS = "gpt/attention/triton_kernels.py"
LAUNCHES = "gpt/attention/triton_paged.py"
GRAPHS = "serving/worker/cuda_graphs.py"
CONTAINERFILE = "deploy/Containerfile"
GOLDEN_KERNELS = (
    "tests/gpt/attention/test_triton_paged.py::"
    "test_the_kernels_of_a_step_compile_within_the_golden_resources"
    "[3.6.0-90 8 1 128 bfloat16 bfloat16]"
)
# In bfloat16, with heads of 256 channels, on GPUs with less shared memory.
KERNEL_LIMITS = (
    "tests/gpt/attention/test_triton_matrix.py::"
    "test_the_kernels_compile_within_the_limits_of_a_gpu[80 2 8 256 bfloat16 bfloat16]"
)
KERNEL_KEYS = (
    "tests/gpt/attention/test_triton_keys.py::"
    "test_steps_after_the_warm_up_compile_no_kernel[dtype0-kv_dtype0-heads0-False-40]"
)
CAPTURE = (
    "tests/serving/worker/test_captured_launches.py::"
    "test_a_decode_pass_can_be_captured[classic-bfloat16-False]"
)
INTERPRETED_STEPS = (
    "tests/gpt/attention/test_triton_paged.py::"
    "test_random_steps_in_the_interpreter_equal_the_reference"
)
CAPTURE_FAILURE = (
    "tests/serving/worker/test_graph_capture.py::"
    "test_a_failed_capture_restores_the_stream_and_keeps_errors_of_the_device"
)


class FaultCheckError(Exception):
    """A fault that is not detected, or that could not be checked.

    It could not be checked if it cannot be planted, if a test is skipped or fails without it, or if
    a run has no result.
    """


class UndetectedFaultError(FaultCheckError):
    """The tests ran with the fault, and did not fail with the stated error."""


@dataclass(frozen=True)
class PlantedFault:
    """A change of one file that breaks a property, and the tests that check the property."""

    title: str
    file: str
    text: str  # Occurs once in the file.
    replacement: str
    tests: tuple[str, ...]  # Node ids. Without parameters: one set of them must fail.
    message: str  # A part of the report of each test that must fail.
    error: str = "AssertionError"  # The name of the exception with which the tests end.

    def plant(self, source: str) -> str:
        """Return the text of the file with the fault."""
        if (count := source.count(self.text)) != 1:
            raise FaultCheckError(
                f"{self.title}: {self.file} contains {self.text!r} {count} times instead of once; "
                "adapt the table of faults"
            )
        return source.replace(self.text, self.replacement)


FAULTS = (
    PlantedFault(
        title="a kernel does not compile",
        file=KERNELS,
        text="tl.arange(0, SEGMENTS_MAX), tl.arange(0, WIDTH)",
        replacement="tl.arange(0, SEGMENTS_MAX + 1), tl.arange(0, WIDTH)",
        tests=(GOLDEN_KERNELS,),
        message="arange's range must be a power of 2",
    ),
    PlantedFault(
        title="a kernel needs too much shared memory",
        file=LAUNCHES,
        text='"num_stages": 3 if',
        replacement='"num_stages": 12 if',
        tests=(KERNEL_LIMITS,),
        message='resources["shared_bytes"] <=',
    ),
    PlantedFault(
        title="a kernel spills registers",
        file=LAUNCHES,
        text="if rows > 64 or q.dtype == torch.float32 else 4",
        replacement="if q.dtype == torch.float32 else 1",
        tests=(KERNEL_LIMITS,),
        message='resources["spilled_bytes"] <=',
    ),
    PlantedFault(
        title="a kernel needs more registers than before",
        file=LAUNCHES,
        text="SINGLE_ELEMENTS_MAX = 4096",
        replacement="SINGLE_ELEMENTS_MAX = 8192",
        tests=(GOLDEN_KERNELS,),
        message='resources["registers"] <=',
    ),
    PlantedFault(
        title="kernels are compiled for the alignment of a step's tensors",
        file=KERNELS,
        text='@triton.jit(do_not_specialize_on_alignment=["blocks", "offsets", "scales"])',
        replacement='@triton.jit(do_not_specialize_on_alignment=["scales"])',
        tests=(KERNEL_KEYS,),
        message="append_kv",
    ),
    PlantedFault(
        title="the warm-up omits a variant of a kernel",
        file=LAUNCHES,
        text="max(ROWS_MAX.values()) + 1)",
        replacement="max(ROWS_MAX.values()) // 4)",
        tests=(KERNEL_KEYS,),
        message="attend_tile",
    ),
    PlantedFault(
        title="a captured pass reads a value on the host",
        file=GRAPHS,
        text="len(slots), context - 1",
        replacement="len(slots), int(positions.max())",
        tests=(CAPTURE,),
        message="host read of a value",
        error="CaptureForbids",
    ),
    PlantedFault(
        title="a captured pass copies from host memory",
        file=GRAPHS,
        text="tokens = argmax_rows(logits)",
        replacement="tokens = argmax_rows(logits) + torch.tensor([0]).to(logits.device)",
        tests=(CAPTURE,),
        message="from host memory",
        error="CaptureForbids",
    ),
    PlantedFault(
        title="a captured pass has a shape that depends on values",
        file=GRAPHS,
        text="ids = fields[IDS]",
        replacement="ids = fields[IDS][fields[SLOTS] >= 0]",
        tests=(CAPTURE,),
        message="aten.nonzero",
        error="GraphCaptureError",
    ),
    PlantedFault(
        title="a layer has one launch more than before",
        file=LAUNCHES,
        text="q, out = _contiguous_rows(q), ",
        replacement="q, out = _contiguous_rows(q).clone(), ",
        tests=(CAPTURE,),
        message="LAUNCHES_MAX[family][linears]",
    ),
    PlantedFault(
        title="an eager step waits for its inputs",
        file="gpt/device_transfers.py",
        text="host_tensor.pin_memory().to(device, non_blocking=True)",
        replacement="host_tensor.to(device)",
        tests=(
            "tests/serving/worker/test_device_waits.py::"
            "test_an_eager_step_waits_once[classic-False]",
        ),
        message="from host memory",
    ),
    PlantedFault(
        title="a call of FlashInfer has an unknown argument",
        file="gpt/attention/flashinfer.py",
        text="sm_scale=head_dim**-0.5",
        replacement="softmax_scale=head_dim**-0.5",
        tests=(
            "tests/gpt/attention/test_flashinfer.py::"
            "test_flashinfer_plans_once_per_step_for_all_layers_and_wrappers_take_turns",
        ),
        message="unexpected keyword argument 'softmax_scale'",
        error="TypeError",
    ),
    PlantedFault(
        title="the stub of Transformer Engine accepts an argument that the wheel rejects",
        file="tests/support/te_stub.py",
        text="def is_mxfp8_available(return_reason: bool = False)",
        replacement="def is_mxfp8_available(with_reason: bool = False)",
        tests=(
            "tests/repository/test_wheel_signatures.py::"
            "test_the_stub_of_transformer_engine_accepts_only_what_the_wheel_accepts",
        ),
        message="is_mxfp8_available",
    ),
    PlantedFault(
        title="an operator of torch has another schema than the recorded one",
        file="tests/golden/wheel_signatures.json",
        text="(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name)",
        replacement="(Tensor symm_buffer, str reduce_op, str group_name)",
        tests=(
            "tests/repository/test_wheel_signatures.py::"
            "test_torch_has_the_recorded_symmetric_memory_operators",
        ),
        message="one_shot_all_reduce_copy",
    ),
    PlantedFault(
        title="a GPU test imports a package that images with torch lack",
        file="tests/gpu/test_sampler_kernel.py",
        text='pytest.importorskip("msgspec", reason="msgspec is not installed, and the sampler '
        'needs it")',
        replacement="import msgspec",
        tests=(
            "tests/repository/test_bare_environment.py::"
            "test_gpu_tests_are_collected_without_our_packages",
        ),
        message="No module named 'msgspec'",
    ),
    PlantedFault(
        title="the image has a C compiler without the C headers",
        file=CONTAINERFILE,
        text="|| echo gcc libc6-dev)",
        replacement="|| echo gcc)",
        tests=(
            "tests/repository/test_container.py::"
            "test_an_image_for_a_gpu_contains_a_c_compiler[cuda-True]",
        ),
        message="libc6-dev",
    ),
    PlantedFault(
        title="the cache of compiled kernels is on the read-only root",
        file=CONTAINERFILE,
        text="TRITON_CACHE_DIR=/cache/triton",
        replacement="TRITON_CACHE_DIR=/preamble/triton",
        tests=(
            "tests/repository/test_container.py::"
            "test_the_caches_are_on_a_volume_that_belongs_to_the_user",
            "tests/repository/test_container.py::"
            "test_the_pod_mounts_a_writable_volume_for_each_cache",
        ),
        message="TRITON_CACHE_DIR",
    ),
    PlantedFault(
        title="a failed launch of a kernel is not a reason to select torch",
        file="gpt/triton_runtime/availability.py",
        text="except Exception as error:",
        replacement="except ImportError as error:",
        tests=(
            "tests/gpt/triton_runtime/test_availability.py::"
            "test_auto_selects_torch_where_no_kernel_can_be_launched_and_logs_the_reason",
        ),
        message="Failed to find C compiler",
        error="RuntimeError",
    ),
    PlantedFault(
        title="a failed capture leaves its stream as the current one",
        file=GRAPHS,
        text="with torch.cuda.stream(main_stream), capture:",
        replacement="with capture:",
        tests=(CAPTURE_FAILURE,),
        message="cuda.stream == MAIN",
    ),
    PlantedFault(
        title="exhausted memory counts as work that cannot be captured",
        file=GRAPHS,
        text="if is_device_error or (is_memory_error and not allows_memory):",
        replacement="if is_device_error:",
        tests=(CAPTURE_FAILURE,),
        message="no memory",
        error="GraphCaptureError",
    ),
    PlantedFault(
        title="rank 0 continues after another rank has failed to start",
        file="serving/ranks/startup_exchange.py",
        text="        if failures:\n",
        replacement="        if result.error:\n",
        tests=(
            "tests/serving/ranks/test_startup_exchange.py::"
            "test_a_permanent_error_is_reported_before_the_error_of_a_lower_rank",
        ),
        message="StartupFailedError",
        error="Failed",  # pytest's: the expected error was not raised.
    ),
    PlantedFault(
        title="a step needs more memory than is estimated",
        file="serving/memory_budget.py",
        text="LOGITS_COPIES_MAX = 4",
        replacement="LOGITS_COPIES_MAX = 1",
        tests=(
            "tests/serving/worker/test_step_memory.py::"
            "test_the_largest_step_fits_into_the_estimated_workspace",
        ),
        message="<= estimated_bytes",
    ),
    PlantedFault(
        title="the KV pool takes the memory of the largest step",
        file="serving/worker/kv_cache_size.py",
        text="        reserved_bytes = memory.step_bytes + graph_bytes\n",
        replacement="        reserved_bytes = graph_bytes\n",
        tests=(
            "tests/serving/worker/test_memory_profile.py::"
            "test_the_pool_gets_what_the_largest_step_leaves",
        ),
        message="assert size.blocks == pool_bytes // BLOCK_BYTES",
    ),
    PlantedFault(
        title="a padding row of a step has NaN in its output",
        file=KERNELS,
        text="merged / tl.where(total == 0.0, 1.0, total)",
        replacement="merged / total",
        tests=(INTERPRETED_STEPS,),
        message="check_padded_step",
    ),
    PlantedFault(
        title="a kernel ignores the offset of an unaligned tensor",
        file=LAUNCHES,
        text="            batch.device_context_lengths,\n",
        replacement="            batch.device_context_lengths.as_strided(\n"
        "                (len(batch.device_context_lengths),), (1,), 0\n"
        "            ),\n",
        tests=(INTERPRETED_STEPS,),
        message="check_padded_step",
    ),
    PlantedFault(
        title="a kernel rounds fp16 as bf16",
        file=KERNELS,
        text="weights = weights.to(query.dtype)",
        replacement="weights = weights.to(tl.bfloat16).to(query.dtype)",
        tests=(INTERPRETED_STEPS,),
        message="of the largest value away",
    ),
)


@dataclass(frozen=True)
class CaseResult:
    """The result of a test with one set of parameters."""

    node_id: str
    outcome: str  # "passed", "failed", "skipped", or "error": it failed outside of its call.
    report: str = ""

    @property
    def error_name(self) -> str:
        """The name of the exception that ended the test, from the last line of the report."""
        last_line = self.report.strip().rpartition("\n")[2]
        return last_line.rpartition(": ")[2]


@dataclass
class FaultChecker:
    """Plants faults in a folder of source files, and runs the tests of that folder."""

    folder: Path
    _passing: set[str] = field(default_factory=set)  # Tests that pass without a fault.

    def check(self, fault: PlantedFault) -> None:
        """Raise FaultCheckError unless the fault's tests pass without it, and fail with it."""
        path = self.folder / fault.file
        source = path.read_text("utf-8")
        faulty_source = fault.plant(source)
        self._check_passing(fault)
        path.write_text(faulty_source, "utf-8")
        try:
            results = self._run(fault.tests)
        finally:
            path.write_text(source, "utf-8")
        for test in fault.tests:
            _check_detected(fault, test, [x for x in results if _selects(test, x.node_id)])

    def _check_passing(self, fault: PlantedFault) -> None:
        tests = [test for test in fault.tests if test not in self._passing]
        results = self._run(tests) if tests else []
        for result in results:
            if result.outcome != "passed":
                raise FaultCheckError(
                    f"{fault.title}: without the fault, {result.node_id} has the outcome "
                    f"{result.outcome!r} instead of 'passed'\n{result.report}"
                )
        self._passing.update(tests)

    def _run(self, tests: Collection[str]) -> list[CaseResult]:
        """Run the tests in a process of its own."""
        with tempfile.TemporaryDirectory(prefix="planted-fault-") as name:
            report, log = Path(name) / "report.xml", Path(name) / "log"
            # The last -m selects the tests of all markers.
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", ""]
            with log.open("w") as log_file:
                process = ChildProcess(
                    [*command, f"--junitxml={report}", *tests],
                    environment=self._environment(),
                    folder=self.folder,
                    stdout=log_file.fileno(),
                    stderr=subprocess.STDOUT,
                )
                try:
                    process.wait(TESTS_S_MAX)
                except subprocess.TimeoutExpired:
                    raise FaultCheckError(
                        f"{', '.join(tests)}: no end within {TESTS_S_MAX:.0f} s"
                    ) from None
                finally:
                    process.stop(0)
            results = list(_read_report(report)) if report.exists() else []
            for test in tests:
                if not any(_selects(test, result.node_id) for result in results):
                    tail = read_log_tail(log, LOG_TAIL_BYTES)
                    raise FaultCheckError(f"{test}: the run has no result of this test\n{tail}")
            return results

    def _environment(self) -> dict[str, str]:
        """Return an environment in which the tests import the modules of the folder."""
        variables = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTEST_", "PREAMBLE_", "PYTHON"))
        }
        return variables | {
            "PYTHONPATH": str(self.folder),
            # A faulty file can have the size and the time of the original one, so that its compiled
            # module would be taken for up to date.
            "PYTHONDONTWRITEBYTECODE": "1",
            # Kernels that are compiled with a fault must not remain in the user's cache.
            "TRITON_CACHE_DIR": str(self.folder / ".triton"),
        }


def _check_detected(fault: PlantedFault, test: str, results: Sequence[CaseResult]) -> None:
    failed = [result for result in results if result.outcome == "failed"]
    if not failed:
        outcomes = ", ".join(sorted({result.outcome for result in results}))
        reports = "\n".join(result.report for result in results if result.report)
        raise UndetectedFaultError(
            f"{fault.title}: {test} does not fail; its outcome is {outcomes}\n{reports}"
        )
    if not any(x.error_name == fault.error and fault.message in x.report for x in failed):
        raise UndetectedFaultError(
            f"{fault.title}: {test} fails with {failed[0].error_name}, but not with "
            f"{fault.error} and {fault.message!r}\n{failed[0].report}"
        )


def _selects(test: str, node_id: str) -> bool:
    """Whether the node id of a test selects the case `node_id`."""
    return node_id == test or node_id.startswith(f"{test}[")


def _read_report(path: Path) -> Iterator[CaseResult]:
    """Yield the results in pytest's JUnit report."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        node_id = f"{file}::{case.get('name')}"
        outcomes = [(name, case.find(name)) for name in ("error", "failure", "skipped")]
        for name, element in outcomes:
            if element is not None:
                report = element.text or element.get("message") or ""
                outcome = "failed" if name == "failure" else name
                yield CaseResult(node_id, outcome, report)
                break
        else:
            yield CaseResult(node_id, "passed")


@contextmanager
def copied_source(root: Path = ROOT) -> Iterator[Path]:
    """Copy the tracked files, and what is built from them, to a temporary folder."""
    listing = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True, text=True
    ).stdout
    files = [root / name for name in listing.split("\0") if name]
    files += [path for pattern in BUILT_FILES for path in root.glob(pattern)]
    with tempfile.TemporaryDirectory(prefix="planted-faults-") as name:
        folder = Path(name)
        for source in files:
            if source.is_file():  # A tracked file may be deleted in the work tree.
                target = folder / source.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
        if (versions := root / OTHER_TRITON_VERSIONS).is_dir():
            (folder / OTHER_TRITON_VERSIONS).parent.mkdir(exist_ok=True)
            (folder / OTHER_TRITON_VERSIONS).symlink_to(versions.resolve())
        yield folder


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.planted_faults")
    parser.add_argument(
        "-k", default="", metavar="TEXT", help="check faults with TEXT in the title"
    )
    flags = parser.parse_args(argv)
    faults = [fault for fault in FAULTS if flags.k in fault.title]
    if not faults:
        parser.error(f"-k {flags.k}: no fault has this text in its title")
    undetected = unchecked = 0
    with copied_source() as folder:
        checker = FaultChecker(folder)
        for fault in faults:
            start = time.monotonic()
            try:
                checker.check(fault)
            except UndetectedFaultError as error:
                undetected += 1
                print(f"NOT DETECTED  {error}", flush=True)
            except FaultCheckError as error:
                unchecked += 1
                print(f"NOT CHECKED  {error}", flush=True)
            else:
                print(f"detected  {time.monotonic() - start:5.1f} s  {fault.title}", flush=True)
    detected = len(faults) - undetected - unchecked
    print(
        f"{detected} of {len(faults)} faults are detected, {undetected} are not detected, "
        f"{unchecked} are not checked"
    )
    return 0 if detected == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
