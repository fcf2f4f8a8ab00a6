"""Benchmark catalog, roofline, targets, records and history."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import catalog
from bench.catalog import Suite
from bench.harness import history, machine_limits
from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.record import RunRecord, SuiteOutput, read_runs
from bench.harness.roofline import MeasuredLimit, PassCost, Peaks, RooflineModel
from bench.harness.targets import TARGETS, Row, Settings, Target, measured_row, not_run_row
from gpt.config import GPTConfig
from gpt.errors import ConfigError

# 85 million weights in layers, 38.6 million in the LM head, 36 KiB of KV cache per token.
GPT2 = RooflineModel(GPT2_SMALL)
GROUPED = GPTConfig(
    num_layers=2,
    hidden_size=8,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=16,
    vocab_size=100,
    max_position_embeddings=64,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    qkv_bias=False,
    proj_bias=False,
    mlp_bias=False,
    untie_embeddings_and_output_weights=True,
    dtype="bfloat16",
)


def test_a_decode_step_reads_each_weight_once_and_the_kv_cache() -> None:
    cost = RooflineModel(GROUPED).cost([10, 20], [1, 1])
    # A layer: query 8 x 8, key and value 8 x 8, output 8 x 8, MLP 3 of 8 x 16, two norms of 8; then
    # the final norm and the LM head of 100 x 8. KV per token: 2 x 2 layers x 2 groups x 2 channels.
    weights = 2 * (3 * 64 + 3 * 128 + 2 * 8) + 8 + 800
    assert cost.read_bytes == 2 * weights + 30 * 2 * (2 * 2 * 2 * 2)
    # Attention over 11 and 21 keys and values with 8 query channels, in 2 layers.
    assert cost.operations == 2 * 2 * weights + 2 * 2 * 2 * 8 * (11 + 21)


def test_prefill_cost_counts_causal_attention_and_skips_unused_rows_of_the_last_layer() -> None:
    prefill = RooflineModel(GROUPED).cost([0], [4])
    decode_steps = [RooflineModel(GROUPED).cost([before], [1]) for before in range(4)]
    head = 2 * 800
    # In the last layer the first three tokens only need keys and values: no query (8 x 8), no
    # output projection (8 x 8), no MLP (3 of 8 x 16), only the first norm, and no attention
    # over 1 + 2 + 3 keys.
    last_layer = 2 * (2 * 64 + 3 * 128 + 8)
    skipped = 3 * (head + last_layer) + 2 * 2 * 8 * 6
    decode_operations = sum(step.operations for step in decode_steps)
    assert prefill.operations == pytest.approx(decode_operations - skipped, rel=0.02)


def test_one_byte_weights_halve_the_bytes_read() -> None:
    bf16 = RooflineModel(GROUPED).cost([0], [1])
    int8 = RooflineModel(GROUPED, 1.0).cost([0], [1])
    assert bf16.read_bytes == 2 * int8.read_bytes
    assert bf16.operations == int8.operations


def test_small_batches_read_the_int8_copy_of_the_lm_head() -> None:
    plain = RooflineModel(GROUPED)
    with_int8_head = RooflineModel(GROUPED, int8_head_rows_max=2)
    two_rows = ([0, 0], [1, 1])
    saved_bytes = plain.cost(*two_rows).read_bytes - with_int8_head.cost(*two_rows).read_bytes
    assert saved_bytes == 800
    assert plain.cost([0] * 3, [1] * 3) == with_int8_head.cost([0] * 3, [1] * 3)


def test_the_roofline_of_gpt2_small_equals_its_published_arithmetic() -> None:
    peaks = Peaks(30e9, 350e9)
    assert GPT2.cost([0], [1]).read_bytes == pytest.approx(247e6, rel=0.01)
    assert GPT2.decode_s(1, 0, 1, peaks) == pytest.approx(8.2e-3, rel=0.02)
    # A batch of 32 is compute-bound.
    assert GPT2.decode_s(32, 0, 1, peaks) == pytest.approx(32 * 0.247e9 / 350e9, rel=0.02)
    assert 960 / GPT2.prefill_s(1, 960, peaks) == pytest.approx(350e9 / 0.170e9, rel=0.15)


def test_roofline_time_is_the_larger_of_memory_and_compute_time() -> None:
    peaks = Peaks(10.0, 100.0)
    assert peaks.seconds(PassCost(20.0, 100.0)) == 2.0
    assert peaks.seconds(PassCost(20.0, 1000.0)) == 10.0


def test_a_machine_limit_is_the_median_of_the_best_method() -> None:
    limit = MeasuredLimit("read", "B", {"one": [1e9, 9e9, 2e9], "other": [3e9, 3e9, 3e9]})
    assert (limit.best_method, limit.value) == ("other", 3e9)
    assert str(limit) == "read: 3.0 GB/s (other; 3.0 to 3.0; one 2.0)"


def test_machine_limits_are_measured_with_every_supported_method() -> None:
    sizes = machine_limits.MicrobenchmarkSizes(
        read_bytes=1 << 20, channels=512, side=64, rows=16, cached_side=64
    )
    limits = machine_limits.measure_limits(2, sizes)
    assert {"memchr", "torch's sum"} <= set(limits.read_bandwidth.rates_by_method)
    assert any(method.startswith("torch") for method in limits.bf16.rates_by_method)
    assert limits.int8.rates_by_method
    assert all(
        len(samples) == 2 for limit in limits.as_tuple for samples in limit.rates_by_method.values()
    )
    assert limits.peaks("int8") == Peaks(limits.read_bandwidth.value, limits.int8.value)


@pytest.mark.parametrize(
    ("value", "share", "verdict"),
    [
        (1.5, 0.1, "met"),
        (1.49, None, "MISSED"),
        (1.49, 0.84, "MISSED"),
        (1.49, 0.85, "met by the bound"),
        (float("nan"), None, "MISSED"),
    ],
)
def test_a_ratio_near_the_roofline_bound_counts_as_met(
    value: float, share: float | None, verdict: str
) -> None:
    assert measured_row("peers/gpt2/8/vllm", value, bound_share=share).verdict == verdict


def test_maximum_targets_are_met_at_or_below_the_threshold() -> None:
    assert measured_row("front/share", 5.0).verdict == "met"
    assert measured_row("front/share", 5.1).verdict == "MISSED"
    assert measured_row("front/lost", 0).verdict == "met"


def test_a_row_prints_figure_bound_target_and_verdict() -> None:
    row = measured_row("peers/gpt2/32/vllm", 1.31, "1.31 x", bound_share=0.91)
    assert str(row) == (
        "GPT-2 small, 32 x (128 + 128), vs vLLM: 1.31 x, 91 % of the bound; "
        "target >= 1.5 x: met by the bound"
    )
    assert str(not_run_row("gpu/prefill", "no device")).endswith("peak: not run: no device")


def stub_suite(outputs: list[SuiteOutput], error: Exception | None = None) -> Suite:
    def run(flags: argparse.Namespace) -> Iterator[SuiteOutput]:
        yield from outputs
        if error is not None:
            raise error

    return Suite(run)


def run_stub_suites(
    monkeypatch: pytest.MonkeyPatch, folder: Path, suites: dict[str, Suite]
) -> tuple[int, RunRecord, list[str]]:
    monkeypatch.setattr(catalog, "SUITES", suites)
    record = RunRecord.create(["--rounds", "1"], folder)
    lines: list[str] = []
    flags = argparse.Namespace(parts=[], rounds=1)
    failures = catalog.run_suites(list(suites), flags, record, lines.append)
    return failures, record, lines


def test_a_suite_that_fails_loses_only_its_own_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    training_row = measured_row("planner/training", 3.0)
    failures, record, lines = run_stub_suites(
        monkeypatch,
        tmp_path,
        {
            "planner": stub_suite([training_row], ValueError("a table is gone\nsecond line")),
            "start": stub_suite(
                [measured_row("start/refusal", 2.0), measured_row("start/ready", 3.0)]
            ),
        },
    )
    assert failures == 1
    verdicts = {name: row.verdict for name, row in record.rows.items()}
    assert verdicts == {
        "planner/training": "met",
        "planner/inference": "not run",
        "planner/activations": "not run",
        "start/refusal": "MISSED",
        "start/ready": "met",
    }
    assert (
        record.rows["planner/inference"].not_run_reason
        == "suite planner failed: ValueError: a table is gone"
    )
    assert any("Traceback" in line for line in lines)


def test_the_table_lists_every_default_target() -> None:
    rows = {"planner/training": measured_row("planner/training", 3.0)}
    lines = list(catalog.format_table(catalog.default_suites("cpu"), rows, "cpu"))
    targets = [target for target in TARGETS.values() if not target.on_request]
    assert len(lines) == len(targets) + 1
    assert lines[-1] == f"{len(targets) - 1} not run, 1 met"
    assert sum("make bench-gpu" in line for line in lines) == 5
    assert all(target.title in "\n".join(lines) for target in targets)


def test_every_target_has_a_suite_and_default_parts_exist() -> None:
    assert {target.suite for target in TARGETS.values()} <= set(catalog.SUITES)
    assert all(set(suite.default_parts) <= set(suite.parts) for suite in catalog.SUITES.values())


def test_the_catalog_lists_the_parts_of_each_suite() -> None:
    from bench.peers import compare, linear_tuning, prompt_tuning
    from bench.suites import adapters, frontend, lora, plan_accuracy, proxy

    for name, module in (
        ("peers", compare),
        ("front", frontend),
        ("adapters", adapters),
        ("lora", lora),
        ("tuning", prompt_tuning),
        ("linear-tuning", linear_tuning),
        ("planning", plan_accuracy),
        ("proxy", proxy),
    ):
        assert set(catalog.SUITES[name].parts) == set(module.PARTS), name


def test_the_record_is_written_after_each_row(tmp_path: Path) -> None:
    record = RunRecord.create(["--only", "peers"], tmp_path)
    record.add("a line of text")
    assert not list(tmp_path.iterdir())
    record.add(Settings("GPT-2", {"ours": "bf16", "vllm": "absent"}))
    record.add(MeasuredLimit("read", "B", {"a method": [1e9, 3e9, 2e9]}))
    row = measured_row(
        "peers/gpt2/8/vllm",
        1.7,
        bound_share=0.5,
        samples={"ours": [5.0, 7.0, 6.0], "vllm": [3.0, float("nan")]},
    )
    record.add(row)
    (run,) = read_runs(tmp_path)
    assert run["asked"] == ["--only", "peers"] and run["machine"]["cores"].isdigit()
    assert run["settings"] == [{"title": "GPT-2", "sides": {"ours": "bf16", "vllm": "absent"}}]
    assert run["limits"][0]["value"] == 2e9
    (recorded_row,) = run["rows"]
    assert recorded_row["medians"] == {"ours": 6.0, "vllm": 3.0}
    assert recorded_row["samples"] == {"ours": [5.0, 7.0, 6.0], "vllm": [3.0]}
    assert (recorded_row["value"], recorded_row["share_of_bound"], recorded_row["verdict"]) == (
        1.7,
        0.5,
        "met",
    )
    record.add(not_run_row("peers/gpt2/32/vllm", "it failed"))
    (run,) = read_runs(tmp_path)
    assert run["rows"][1]["missing"] == "it failed"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def past_run(begun: str, value: float | None, verdict: str, cores: str = "2") -> dict[str, Any]:
    row = {"name": "a/row", "what": "a row", "unit": "x", "target": 1.5, "verdict": verdict}
    return {
        "version": 1,
        "begun": begun,
        "commit": "abc1234",
        "machine": {"processor": "P", "cores": cores},
        "limits": [{"name": "read", "unit": "B/s", "value": 3e10}],
        "rows": [row | ({} if value is None else {"value": value})],
    }


PAST_RUNS = [
    past_run("2026-01-02T00:00:00", 1.2, "MISSED"),
    past_run("2026-01-03T00:00:00", None, "not run"),
    past_run("2026-01-04T00:00:00", 1.4, "met by the bound"),
    past_run("2026-01-05T00:00:00", 9.0, "met", cores="16"),
]


def test_history_has_a_panel_per_row_and_a_line_per_machine() -> None:
    panels = history.build_panels(PAST_RUNS)
    assert set(panels) == {"limit/read", "a/row"}
    assert panels["a/row"].points == {
        "P, 2 cores": [(0, 1.2, False), (2, 1.4, True)],
        "P, 16 cores": [(3, 9.0, False)],
    }
    assert panels["a/row"].threshold == 1.5
    assert panels["limit/read"].unit == "GB/s"


def test_history_is_plotted_from_the_record_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="contains no benchmark run"):
        history.plot_history(tmp_path)
    for run in reversed(PAST_RUNS):
        (tmp_path / f"{run['begun'][:10]}.json").write_text(json.dumps(run))
    plot = history.plot_history(tmp_path)
    assert plot.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "x.json").write_text('{"version": 2}')
    with pytest.raises(ConfigError, match="has format version 2"):
        history.plot_history(tmp_path)
    (tmp_path / "x.json").write_text("half a")
    with pytest.raises(ConfigError, match="is not a benchmark record"):
        read_runs(tmp_path)


def test_a_target_formats_its_criterion() -> None:
    assert Target("a/b", "what", 20_000, "tokens/s").criterion == ">= 20,000 tokens/s"
    assert Target("a/b", "what", 1e-4, "nats", is_maximum=True).criterion == "<= 0.0001 nats"
    assert Row(TARGETS["start/ready"], 1.234).verdict == "met"


@pytest.mark.slow
def test_plan_validation_meets_its_targets() -> None:
    from bench.suites import plan_validation

    outputs = plan_validation.run_suite()
    rows = [output for output in outputs if isinstance(output, Row)]
    assert len(rows) == 3 and all(row.verdict == "met" for row in rows), rows


@pytest.mark.slow
def test_the_startup_suite_measures_refusals_and_readiness() -> None:
    from bench.suites import startup

    outputs = list(startup.run_suite(startup.StartupSizes(1), GROUPED.with_fields(dtype="float32")))
    rows = {output.target.name: output for output in outputs if isinstance(output, Row)}
    assert set(rows) == {"start/refusal", "start/ready"}
    assert len(rows["start/refusal"].samples) == 5
    assert rows["start/ready"].value > 0
