"""GPU benchmark with tiny sizes on the CPU: every row has a figure or a reason."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from bench.harness.roofline import MeasuredLimit
from bench.harness.targets import TARGETS, Row, Settings
from bench.suites import gpu
from bench.suites.gpu import GpuSizes, run_suite
from gpt.costs.inference import kv_bytes_per_token, parameter_count
from serving.config import ServerConfig
from serving.memory_budget import workspace_bytes
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
        *(
            f"{limit} beside {phase}"
            for phase in ("fp8", "fp8 kv")
            for limit in ("copy bandwidth", "float32 products")
        ),
    ]
    assert sum(isinstance(output, Settings) for output in outputs) == 1
    for name in ("gpu/decode", "gpu/prefill"):
        assert math.isfinite(rows[name].value) and len(rows[name].samples) == 2
        assert all(len(samples) == 2 for samples in rows[name].samples.values())
    assert "transformers" in rows["gpu/batch"].not_run_reason
    for name in ("gpu/fp8-prefill", "gpu/fp8-decode"):
        assert "ConfigError" in rows[name].not_run_reason and "cpu" in rows[name].not_run_reason


def test_only_one_engine_is_open_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    open_engines: list[dict[str, object]] = []

    @contextmanager
    def open_engine(sizes: GpuSizes, config: ServerConfig) -> Iterator[object]:
        assert not open_engines
        open_engines.append({})
        yield SimpleNamespace()
        open_engines.clear()

    monkeypatch.setattr(gpu, "open_random_engine", open_engine)
    monkeypatch.setattr(gpu, "_time_generation", lambda *arguments: arguments[-1] * 1e-3)
    rows = {output.target.name: output for output in run_suite(1, SMALL) if isinstance(output, Row)}
    measured = {name for name, row in rows.items() if not row.not_run_reason}
    assert measured == set(gpu.ROW_TIMERS) - {"gpu/batch"}


def test_each_engine_fits_into_80_gb_beside_the_limits() -> None:
    """One engine: weights, KV pool and workspace, with the buffers of the limits."""
    sizes = GpuSizes()
    config, network = sizes.server_config, sizes.network
    assert config.cache_config.kv_tokens_max is not None
    kv_bytes = kv_bytes_per_token(network, network.num_layers)
    engine_bytes = 2 * parameter_count(network) + config.cache_config.kv_tokens_max * kv_bytes
    engine_bytes += workspace_bytes(
        network,
        2,
        step_tokens_max=config.scheduler_config.step_tokens_max,
        logits_rows=config.scheduler_config.running_requests_max,
    )
    limit_bytes = 2 * sizes.copy_bytes + 2 * 2 * sizes.matrix_side**2
    # Drawing a weight holds it in fp32; the embedding is the largest one.
    drawn_bytes = 4 * network.vocab_size * network.hidden_size
    assert 30e9 < engine_bytes + limit_bytes + drawn_bytes < 60e9


def test_selected_rows_run_only_the_engines_that_they_need() -> None:
    outputs = list(run_suite(1, SMALL, rows=("gpu/decode",)))
    assert [row.target.name for row in outputs if isinstance(row, Row)] == ["gpu/decode"]
    assert len([limit for limit in outputs if isinstance(limit, MeasuredLimit)]) == 2
