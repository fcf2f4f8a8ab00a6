"""Usage: the counts of tenants and adapters, their bound, and the file for billing."""

import logging
import subprocess
import sys
import time
from dataclasses import asdict, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from gpt.errors import AdapterError, ConfigError
from gpt.sampling_params import SamplingParams
from serving.config import ObservabilityConfig
from serving.request import AnswerSpec, Piece, Request
from serving.service.metrics import Metrics
from serving.service.usage import OTHER, RequestUsage, UsageKey, UsageMeter
from serving.service.usage_file import UsageFile
from tests.support.full_disk import full_disk
from tests.support.privileges import plain_user
from tests.support.servers import ROOT, eventually
from tests.support.usage_records import COUNTS, read_usage_file, sum_records, usage_series

ANSWER = AnswerSpec(prompt=(1, 2, 3, 4, 5), sampling=SamplingParams(max_new_tokens=9))


def answer(adapter: str = "", *prompt: int, **fields: Any) -> AnswerSpec:
    return replace(ANSWER, adapter=adapter, prompt=prompt or ANSWER.prompt, **fields)


def tokens(count: int, index: int = 0, **fields: Any) -> Piece:
    return Piece((7,) * count, "", None, index=index, **fields)


def counts(meter: UsageMeter) -> dict[tuple[str, str], list[int]]:
    return {key: list(asdict(value).values()) for key, value in meter.snapshot().items()}


def add_request(meter: UsageMeter, tenant: str, adapter: str, generated_tokens: int = 1) -> None:
    usage = meter.open_request(Request((answer(adapter),), tenant=tenant))
    usage.record_piece(tokens(generated_tokens))
    usage.close()


# ------------------------------------------------------------------------------------- counting


def opened(*answers: AnswerSpec) -> tuple[UsageMeter, RequestUsage]:
    meter = UsageMeter()
    return meter, meter.open_request(Request(answers, tenant="acme"))


def test_tokens_count_when_they_are_delivered() -> None:
    meter, usage = opened(answer("tax@3", virtual_tokens=2))
    assert counts(meter) == {("acme", "tax"): [1, 0, 0, 0, 0]}
    usage.record_piece(tokens(1, cached_tokens=4))
    usage.record_piece(tokens(3))
    assert counts(meter) == {("acme", "tax"): [1, 3, 2, 4, 4]}
    usage.close()
    assert counts(meter) == {("acme", "tax"): [1, 3, 2, 4, 4]}


def test_a_prompt_of_several_answers_counts_once() -> None:
    meter, usage = opened(answer(), answer(), answer("tax@1"), answer("tax@1"))
    for index in (1, 0, 3, 3, 1):  # The first answer with the adapter has no output.
        usage.record_piece(tokens(2, index, cached_tokens=index))
    assert counts(meter)["acme", ""] == [1, 5, 0, 0, 6]
    assert counts(meter)["acme", "tax"] == [1, 0, 0, 0, 4]
    usage.close()
    assert counts(meter)["acme", "tax"] == [1, 5, 0, 0, 4]


def test_different_prompts_of_a_request_count_each() -> None:
    meter, usage = opened(answer("tax@1", 1, 2), answer("tax@2", 1, 2, 3))
    for index in (0, 1):
        usage.record_piece(tokens(1, index))
    usage.close()
    assert counts(meter) == {("acme", "tax"): [1, 5, 0, 0, 2]}


def test_scored_continuations_count_as_generated_tokens() -> None:
    meter, usage = opened(
        answer("", 1, 2, 3, 8, continuation_tokens=1),
        answer("", 1, 2, 3, 8, 9, continuation_tokens=2),
    )
    for index in (0, 1):
        usage.record_piece(replace(tokens(0, index), finish="scored"))
    usage.close()
    assert counts(meter) == {("acme", ""): [1, 3, 0, 0, 3]}


def test_failed_answers_count_what_they_delivered() -> None:
    meter, usage = opened(answer(), answer("tax"))
    usage.record_piece(tokens(2, 0))
    for index in (0, 1):
        usage.record_piece(tokens(0, index, error=AdapterError("no")))
    usage.close()
    assert counts(meter) == {("acme", ""): [1, 5, 0, 0, 2], ("acme", "tax"): [1, 0, 0, 0, 0]}


# --------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("labels_max", [1, 2, 3, 7, 20])
def test_combinations_are_bounded_and_lose_no_count(labels_max: int) -> None:
    meter = UsageMeter(labels_max)
    for tenant in range(6):
        for adapter in range(6):
            for _ in range(2):
                add_request(meter, f"t{tenant}", f"a{adapter}" if adapter else "")
    assert len(counts(meter)) <= labels_max
    assert [sum(column) for column in zip(*counts(meter).values(), strict=True)] == [
        72,
        72 * 5,
        0,
        0,
        72,
    ]


def test_a_tenant_with_many_adapters_does_not_hide_the_others() -> None:
    meter = UsageMeter(20)
    for number in range(100):
        add_request(meter, "many", f"a{number}")
    for tenant in ("crew", "guest"):
        add_request(meter, tenant, "")
        add_request(meter, tenant, "tax")
    requests = {key: values[0] for key, values in counts(meter).items()}
    assert requests["many", OTHER] == 90 and len(requests) == 15
    for tenant in ("crew", "guest"):
        assert requests[tenant, ""] == requests[tenant, OTHER] == 1
    for number in range(100):
        add_request(meter, f"t{number}", "")
    assert len(counts(meter)) == 20
    assert counts(meter)[OTHER, OTHER][0] == 96


def test_counters_are_only_in_scrapes_for_operators() -> None:
    metrics, meter = Metrics("chat-7b"), UsageMeter()
    metrics.watch_usage(meter)
    add_request(meter, "acme", "tax@2", 4)
    add_request(meter, "", "")
    assert b"preamble_usage" not in metrics.render()
    series = usage_series(metrics.render(with_usage=True).decode())
    assert series["generated_tokens", "acme", "chat-7b", "tax"] == 4
    assert series["requests", "", "chat-7b", ""] == 1
    assert len(series) == 2 * len(COUNTS)


# ----------------------------------------------------------------------------------------- file


def config(path: Path, **settings: Any) -> ObservabilityConfig:
    return ObservabilityConfig(usage_file=str(path), **settings)


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_each_interval_has_a_record_for_each_used_combination(tmp_path: Path, clock: Clock) -> None:
    path, meter = tmp_path / "usage.jsonl", UsageMeter()
    add_request(meter, "before", "")
    file = UsageFile(config(path), meter, "chat-7b", clock)
    add_request(meter, "acme", "tax", 3)
    add_request(meter, "acme", "", 1)
    clock.now += 60.25
    assert file.write()
    clock.now += 60
    assert file.write()  # Nothing was used.
    add_request(meter, "acme", "tax", 5)
    clock.now -= 3600  # The clock of the machine was set back.
    assert file.write()

    first, _, third = read_usage_file(path)
    server = first.pop("server")
    assert server == third.pop("server")
    assert first == {
        "format": 1,
        "start": "2027-01-15T08:00:00.000Z",
        "end": "2027-01-15T08:01:00.250Z",
        "tenant": "acme",
        "model": "chat-7b",
        "adapter": "tax",
        "requests": 1,
        "prompt_tokens": 5,
        "virtual_tokens": 0,
        "cached_tokens": 0,
        "generated_tokens": 3,
    }
    assert (third["start"], third["end"]) == (2 * ("2027-01-15T08:02:00.250Z",))
    assert sum_records(read_usage_file(path)) == {
        key: values for key, values in counts(meter).items() if key != UsageKey("before", "")
    }


def test_a_full_disk_delays_the_record_and_loses_nothing(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    path, meter = tmp_path / "usage.jsonl", UsageMeter()
    file = UsageFile(config(path), meter, "m", clock)
    add_request(meter, "acme", "")
    assert file.write()
    size = path.stat().st_size
    with full_disk(size + 50):
        for _ in range(5):
            clock.now += 60
            add_request(meter, "acme", "tax")
            add_request(meter, "crew", "")
            assert not file.write()
    assert path.stat().st_size == size
    assert caplog.text.count("event=usage_not_written") == 1
    clock.now += 60
    assert file.write()

    assert caplog.text.count("event=usage_written_again") == 1
    _, second, third = read_usage_file(path)
    assert second["requests"] == third["requests"] == 5
    assert (second["start"], second["end"]) == (
        "2027-01-15T08:00:00.000Z",
        "2027-01-15T08:06:00.000Z",
    )
    assert sum_records(read_usage_file(path)) == counts(meter)


def test_an_orderly_stop_writes_the_rest(tmp_path: Path) -> None:
    path, meter = tmp_path / "usage.jsonl", UsageMeter()
    with UsageFile(config(path, usage_interval_s=3600.0), meter, "m"):
        add_request(meter, "acme", "tax")
        assert read_usage_file(path) == []
    assert sum_records(read_usage_file(path)) == counts(meter)


def test_the_file_is_written_each_interval(tmp_path: Path) -> None:
    path, meter = tmp_path / "usage.jsonl", UsageMeter()
    with UsageFile(config(path, usage_interval_s=0.1), meter, "m"):
        for number in range(3):
            add_request(meter, "acme", "tax")
            eventually(lambda: sum_records(read_usage_file(path)) == counts(meter))
            assert len(read_usage_file(path)) >= number + 1


def test_files_are_rotated_and_a_deleted_file_is_logged(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    path, meter = tmp_path / "usage.jsonl", UsageMeter()
    settings = config(path, usage_file_bytes_max=100, usage_files_max=3)
    file = UsageFile(settings, meter, "m", clock)
    for _ in range(4):
        add_request(meter, "acme", "")
        assert file.write()
    assert len(read_usage_file(path)) == 3
    assert caplog.text.count("event=usage_files_deleted count=1") == 1


@pytest.mark.parametrize(
    ("name", "message"),
    [("none/usage.jsonl", "No such file"), ("", "Is a directory"), ("locked/u", "Permission")],
)
def test_an_unusable_path_is_refused_at_the_start(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "locked").mkdir(mode=0o500)
    with plain_user(), pytest.raises(ConfigError, match=rf"usage_file: .* \({message}.*\); give"):
        UsageFile(config(tmp_path / name), UsageMeter(), "m")


def test_intervals_that_would_keep_the_disk_busy_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"usage_interval_s is 0\.01; it must be at least 0\.1"):
        ObservabilityConfig(usage_interval_s=0.01)


KILLED = """
import sys, time
from pathlib import Path
from serving.service.usage import UsageMeter
from serving.service.usage_file import UsageFile
from tests.serving.service.test_usage import add_request, config
meter = UsageMeter()
with UsageFile(config(Path(sys.argv[1]), usage_interval_s=0.1), meter, "m"):
    for number in range(1_000_000):
        add_request(meter, "acme", f"a{number % 10}")
        print(number + 1, flush=True)
        time.sleep(0.001)
"""


@pytest.mark.slow
def test_a_kill_loses_at_most_one_interval(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    arguments = [sys.executable, "-c", KILLED, str(path)]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    times = [(int(process.stdout.readline()), time.time()) for _ in range(1000)]
    process.kill()
    process.communicate()

    records = read_usage_file(path)
    end = datetime.fromisoformat(max(record["end"] for record in records)).timestamp()
    assert end > times[-1][1] - 60  # Intervals of 0.1 s, on a machine that may be busy.
    written = sum(record["requests"] for record in records)
    # The test reads the number of a request after the request was counted.
    assert written >= max(number for number, at in times if at < end)
    with UsageFile(config(path), UsageMeter(), "m"):
        pass
    assert path.read_bytes().endswith(b"\n") and len(read_usage_file(path)) == len(records)
