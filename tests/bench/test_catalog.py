"""The table of promises: bounds are what one can reckon by hand, verdicts follow, runs are kept."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import catalog
from bench.catalog import Part
from bench.harness import history, machine_limits
from bench.harness.offline_engine import GPT2_SMALL
from bench.harness.record import Item, Record, runs
from bench.harness.roofline import Cost, Limit, Model, Peaks
from bench.harness.targets import PROMISES, Promise, Row, Settings, judged, not_run
from gpt.config import GPTConfig
from gpt.errors import ConfigError

# 85 million weights in layers, 38.6 million in the head, 36 KiB of keys and values for a token.
GPT2 = Model(GPT2_SMALL)
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


def test_a_pass_reads_each_weight_once_and_the_keys_and_values_before_it() -> None:
    cost = Model(GROUPED).cost([10, 20], [1, 1])
    # A layer: queries 8 x 8, keys and values 8 x 8, out 8 x 8, three of 8 x 16, two norms of 8;
    # then the last norm, and the head of 100 x 8. Of a token 2 x 2 layers x 2 groups x 2 channels.
    weights = 2 * (3 * 64 + 3 * 128 + 2 * 8) + 8 + 800
    assert cost.read_bytes == 2 * weights + 30 * 2 * (2 * 2 * 2 * 2)
    # Each key of 8 channels in 2 layers is multiplied, and each value: 11 and 21 of them.
    assert cost.operations == 2 * 2 * weights + 2 * 2 * 2 * 8 * (11 + 21)


def test_a_prompt_attends_to_what_is_before_each_of_its_tokens() -> None:
    alone = Model(GROUPED).cost([0], [4])
    steps = [Model(GROUPED).cost([before], [1]) for before in range(4)]
    head = 2 * 800
    # Of the last layer the first three tokens need keys and values only: no queries 8 x 8, no out
    # 8 x 8, none of three of 8 x 16, no norm but the first; nor do they attend, to 1 + 2 + 3.
    last = 2 * (2 * 64 + 3 * 128 + 8)
    spared = 3 * (head + last) + 2 * 2 * 8 * 6
    assert alone.operations == pytest.approx(
        sum(one.operations for one in steps) - spared, rel=0.02
    )


def test_weights_of_a_byte_halve_what_is_read_of_them() -> None:
    wide, narrow = Model(GROUPED).cost([0], [1]), Model(GROUPED, 1.0).cost([0], [1])
    assert wide.read_bytes == 2 * narrow.read_bytes
    assert wide.operations == narrow.operations


def test_a_few_rows_are_scored_by_a_byte_of_each_weight_of_the_head() -> None:
    few = Model(GROUPED, few_rows=2)
    assert (
        Model(GROUPED).cost([0, 0], [1, 1]).read_bytes - few.cost([0, 0], [1, 1]).read_bytes == 800
    )
    assert Model(GROUPED).cost([0] * 3, [1] * 3) == few.cost([0] * 3, [1] * 3)


def test_the_bound_of_gpt2_small_is_the_published_arithmetic() -> None:
    peaks = Peaks(30e9, 350e9)
    assert GPT2.cost([0], [1]).read_bytes == pytest.approx(247e6, rel=0.01)
    assert GPT2.decode_s(1, 0, 1, peaks) == pytest.approx(8.2e-3, rel=0.02)
    # 32 rows are multiplied for longer than they are read.
    assert GPT2.decode_s(32, 0, 1, peaks) == pytest.approx(32 * 0.247e9 / 350e9, rel=0.02)
    assert 960 / GPT2.prefill_s(1, 960, peaks) == pytest.approx(350e9 / 0.170e9, rel=0.15)


def test_a_pass_takes_the_longer_of_reading_and_multiplying() -> None:
    peaks = Peaks(10.0, 100.0)
    assert peaks.seconds(Cost(20.0, 100.0)) == 2.0
    assert peaks.seconds(Cost(20.0, 1000.0)) == 10.0


def test_a_limit_is_what_the_best_way_does_in_its_median_round() -> None:
    limit = Limit("read", "B", {"one": [1e9, 9e9, 2e9], "other": [3e9, 3e9, 3e9]})
    assert (limit.best, limit.value) == ("other", 3e9)
    assert str(limit) == "read: 3.0 GB/s (other; 3.0 to 3.0; one 2.0)"


def test_limits_are_measured_in_every_way_that_this_machine_has() -> None:
    sizes = machine_limits.Sizes(read_bytes=1 << 20, channels=512, side=64, rows=16, near=64)
    found = machine_limits.measure(2, sizes)
    assert {"memchr", "torch's sum"} <= set(found.read.ways)
    assert any(way.startswith("torch") for way in found.bf16.ways)
    assert found.int8.ways
    assert all(len(samples) == 2 for limit in found.all for samples in limit.ways.values())
    assert found.peaks("int8") == Peaks(found.read.value, found.int8.value)


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
def test_a_ratio_counts_as_met_at_the_machines_bound(
    value: float, share: float | None, verdict: str
) -> None:
    assert judged("peers/gpt2/8/vllm", value, share=share).verdict == verdict


def test_what_may_be_at_most_so_much_is_judged_that_way() -> None:
    assert judged("front/share", 5.0).verdict == "met"
    assert judged("front/share", 5.1).verdict == "MISSED"
    assert judged("front/lost", 0).verdict == "met"


def test_a_row_says_figure_bound_target_and_verdict() -> None:
    row = judged("peers/gpt2/32/vllm", 1.31, "1.31 x", share=0.91)
    assert str(row) == (
        "GPT-2 small, 32 of 128 + 128, beside vLLM: 1.31 x, 91 % of the bound; "
        "target >= 1.5 x: met by the bound"
    )
    assert str(not_run("gpu/prefill", "no device")).endswith("peak: not run: no device")


def part_of(items: list[Item], error: Exception | None = None) -> Part:
    def lines(flags: argparse.Namespace) -> Iterator[Item]:
        yield from items
        if error is not None:
            raise error

    return Part(lines)


def run_parts(
    monkeypatch: pytest.MonkeyPatch, folder: Path, some: dict[str, Part]
) -> tuple[int, Record, list[str]]:
    monkeypatch.setattr(catalog, "PARTS", some)
    record, said = Record.begun(["--rounds", "1"], folder), list[str]()
    flags = argparse.Namespace(parts=[], rounds=1)
    bad = catalog.run(list(some), flags, record, said.append)
    return bad, record, said


def test_a_part_that_ends_badly_costs_only_its_own_rows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    first = judged("planner/training", 3.0)
    bad, record, said = run_parts(
        monkeypatch,
        tmp_path,
        {
            "planner": part_of([first], ValueError("a table is gone\nsecond line")),
            "start": part_of([judged("start/refusal", 2.0), judged("start/ready", 3.0)]),
        },
    )
    assert bad == 1
    verdicts = {name: row.verdict for name, row in record.rows.items()}
    assert verdicts == {
        "planner/training": "met",
        "planner/inference": "not run",
        "planner/activations": "not run",
        "start/refusal": "MISSED",
        "start/ready": "met",
    }
    assert record.rows["planner/inference"].missing == "planner ended: ValueError: a table is gone"
    assert any("Traceback" in line for line in said)


def test_the_table_has_every_promise_whatever_became_of_it() -> None:
    rows = {"planner/training": judged("planner/training", 3.0)}
    told = list(catalog.table(catalog.usual("cpu"), rows, "cpu"))
    wanted = [one for one in PROMISES.values() if not one.extra]
    assert len(told) == len(wanted) + 1
    assert told[-1] == f"{len(wanted) - 1} not run, 1 met"
    assert sum("make bench-gpu" in line for line in told) == 5
    assert all(one.what in "\n".join(told) for one in wanted)


def test_every_promise_belongs_to_a_part_and_every_usual_piece_is_one() -> None:
    assert {one.part for one in PROMISES.values()} <= set(catalog.PARTS)
    assert all(set(part.usual) <= set(part.pieces) for part in catalog.PARTS.values())


def test_pieces_that_can_be_asked_for_are_those_that_the_parts_have() -> None:
    from bench.peers import compare, prompt_tuning
    from bench.suites import adapters, frontend, plan_accuracy

    for name, module in (
        ("peers", compare),
        ("front", frontend),
        ("adapters", adapters),
        ("tuning", prompt_tuning),
        ("planning", plan_accuracy),
    ):
        assert set(catalog.PARTS[name].pieces) == set(module.PARTS), name


def test_a_run_is_on_the_disk_after_each_row(tmp_path: Path) -> None:
    record = Record.begun(["--only", "peers"], tmp_path)
    record.note("talk")
    assert not list(tmp_path.iterdir())
    record.note(Settings("GPT-2", {"ours": "bf16", "vllm": "left out"}))
    record.note(Limit("read", "B", {"a way": [1e9, 3e9, 2e9]}))
    row = judged(
        "peers/gpt2/8/vllm",
        1.7,
        share=0.5,
        samples={"ours": [5.0, 7.0, 6.0], "vllm": [3.0, float("nan")]},
    )
    record.note(row)
    (run,) = runs(tmp_path)
    assert run["asked"] == ["--only", "peers"] and run["machine"]["cores"].isdigit()
    assert run["settings"] == [{"title": "GPT-2", "sides": {"ours": "bf16", "vllm": "left out"}}]
    assert run["limits"][0]["value"] == 2e9
    (kept,) = run["rows"]
    assert kept["medians"] == {"ours": 6.0, "vllm": 3.0}
    assert kept["samples"] == {"ours": [5.0, 7.0, 6.0], "vllm": [3.0]}
    assert (kept["value"], kept["share_of_bound"], kept["verdict"]) == (1.7, 0.5, "met")
    record.note(not_run("peers/gpt2/32/vllm", "it failed"))
    (run,) = runs(tmp_path)
    assert run["rows"][1]["missing"] == "it failed"
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]


def past(begun: str, value: float | None, verdict: str, cores: str = "2") -> dict[str, Any]:
    row = {"name": "a/row", "what": "a row", "unit": "x", "target": 1.5, "verdict": verdict}
    return {
        "version": 1,
        "begun": begun,
        "commit": "abc1234",
        "machine": {"processor": "P", "cores": cores},
        "limits": [{"name": "read", "unit": "B/s", "value": 3e10}],
        "rows": [row | ({} if value is None else {"value": value})],
    }


PAST = [
    past("2026-01-02T00:00:00", 1.2, "MISSED"),
    past("2026-01-03T00:00:00", None, "not run"),
    past("2026-01-04T00:00:00", 1.4, "met by the bound"),
    past("2026-01-05T00:00:00", 9.0, "met", cores="16"),
]


def test_a_graph_has_a_panel_for_each_row_and_a_line_for_each_machine() -> None:
    found = history.panels(PAST)
    assert set(found) == {"limit/read", "a/row"}
    assert found["a/row"].points == {
        "P, 2 cores": [(0, 1.2, False), (2, 1.4, True)],
        "P, 16 cores": [(3, 9.0, False)],
    }
    assert found["a/row"].target == 1.5
    assert found["limit/read"].unit == "GB/s"


def test_the_graph_is_drawn_from_what_stands_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run stands in"):
        history.draw(tmp_path)
    for run in reversed(PAST):
        (tmp_path / f"{run['begun'][:10]}.json").write_text(json.dumps(run))
    picture = history.draw(tmp_path)
    assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "x.json").write_text('{"version": 2}')
    with pytest.raises(ConfigError, match="has version 2"):
        history.draw(tmp_path)
    (tmp_path / "x.json").write_text("half a")
    with pytest.raises(ConfigError, match="is not a run of the bench"):
        runs(tmp_path)


def test_a_promise_says_what_is_wanted() -> None:
    assert Promise("a/b", "what", 20_000, "tokens/s").wanted == ">= 20,000 tokens/s"
    assert Promise("a/b", "what", 1e-4, "nats", at_most=True).wanted == "<= 0.0001 nats"
    assert Row(PROMISES["start/ready"], 1.234).verdict == "met"


@pytest.mark.slow
def test_the_planner_keeps_what_it_promises() -> None:
    from bench.suites import plan_validation

    rows = [item for item in plan_validation.lines() if isinstance(item, Row)]
    assert len(rows) == 3 and all(row.verdict == "met" for row in rows), rows


@pytest.mark.slow
def test_starts_and_refusals_are_measured_from_outside() -> None:
    from bench.suites import startup

    told = list(startup.lines(startup.Sizes(1), GROUPED.with_fields(dtype="float32")))
    rows = {item.promise.name: item for item in told if isinstance(item, Row)}
    assert set(rows) == {"start/refusal", "start/ready"}
    assert len(rows["start/refusal"].samples) == 5
    assert rows["start/ready"].value > 0
