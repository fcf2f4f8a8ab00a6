"""GPU benchmark with tiny sizes on the CPU: every row has a figure or a reason."""

import math

from bench.harness.roofline import MeasuredLimit
from bench.harness.targets import TARGETS, Row, Settings
from bench.suites.gpu import GpuSizes, run_suite
from tests.support.models import CLASSIC

SMALL = GpuSizes(
    network=CLASSIC.with_fields(dtype="float32"),
    device="cpu",
    copy_bytes=1 << 16,
    matrix_side=32,
    single_prompt_tokens=4,
    new_tokens=4,
    requests=3,
    prompt_tokens=8,
    prefill_tokens=24,
    decode_requests=2,
    decode_prompt_tokens=6,
)


def test_every_row_has_a_figure_or_a_reason() -> None:
    outputs = list(run_suite(2, SMALL))
    rows = {output.target.name: output for output in outputs if isinstance(output, Row)}
    assert sorted(rows) == sorted(name for name in TARGETS if name.startswith("gpu/"))
    assert [output.name for output in outputs if isinstance(output, MeasuredLimit)] == [
        "copy bandwidth",
        "float32 products",
    ]
    assert sum(isinstance(output, Settings) for output in outputs) == 1
    for name in ("gpu/decode", "gpu/prefill"):
        assert math.isfinite(rows[name].value) and len(rows[name].samples) == 2
        assert all(len(samples) == 2 for samples in rows[name].samples.values())
    assert "transformers" in rows["gpu/batch"].not_run_reason
    for name in ("gpu/fp8-prefill", "gpu/fp8-decode"):
        assert "ConfigError" in rows[name].not_run_reason and "cpu" in rows[name].not_run_reason
