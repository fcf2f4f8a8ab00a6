"""vLLM's names: each equals its source in a scrape, with vLLM's labels, in both text formats.

The parsers of prometheus_client read the scrapes. A port of the rules by which llm-d's endpoint
picker reads metrics checks the series of adapters and of the KV cache.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import (
    text_string_to_metric_families as parse_openmetrics,
)
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpt.sampling_params import SamplingParams
from serving.engine.adapter_residency import ResidencySnapshot
from serving.engine.stream import AnswerTiming
from serving.messages import Phases
from serving.request import AnswerSpec, FinishReason
from serving.service.metrics import Metrics
from serving.service.vllm_metrics import ALIASES
from tests.support.servers import ROOT

MODEL = "chat-7b"
ANSWER = AnswerSpec((1, 2, 3), SamplingParams(max_new_tokens=8))
SNAPSHOT = ResidencySnapshot(("sum", "mood"), ("late",), 12, 1.7e9)
IDS = {"trace_id": "a1" * 16, "request_id": "r-1"}
# What a server reads from its engine, by the name of the series.
GAUGES = {
    "scheduler_running_requests": 3.0,
    "scheduler_waiting_requests": 5.0,
    "kv_usage_ratio": 0.25,
    "adapters_resident": 2.0,
}
COUNTERS = {
    "engine_prompt_tokens": 70,
    "engine_cached_tokens": 30,
    "engine_preemptions": 4,
    "engine_drafted_tokens": 9,
    "engine_accepted_tokens": 6,
}


def used_metrics(aliases: str = "vllm") -> Metrics:
    """Metrics after calls of three protocols, with each finish reason."""
    metrics = Metrics(MODEL, aliases)
    for name, gauge in GAUGES.items():
        metrics.watch_gauge(name, "A gauge.", lambda gauge=gauge: gauge)  # type: ignore[misc]
    for name, count in COUNTERS.items():
        metrics.watch_counter(name, "A counter.", lambda count=count: count)  # type: ignore[misc]
    metrics.watch_adapter_residency(lambda: SNAPSHOT)
    metrics.set_cache_info(block_tokens="16", blocks="640", dtype="auto", prefix_cache="true")
    finishes: list[FinishReason] = ["stop", "length", "length", "time", "scored"]
    for number, finish in enumerate(finishes):
        seconds = 0.01 * (number + 1)
        wire = ("openai", "preamble", "tgi")[number % 3]
        metrics.record_first_token(wire, seconds, IDS)
        metrics.next_token.observe(seconds / 3, 4, IDS)
        metrics.generated_tokens.inc(5)
        metrics.cached_tokens.inc(2)
        metrics.record_answer(ANSWER, finish, 5)
        timing = AnswerTiming(0, Phases(seconds, 2 * seconds), 0, 1.0, 1.5, finish)
        metrics.record_timings([timing], 0.9, IDS)
    return metrics


@dataclass(frozen=True)
class Scrape:
    """A scrape, parsed."""

    families: dict[str, Metric]

    def values(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """The values of all samples of a family, by suffix and labels, without our own labels."""
        return {
            (("", sample.name.removeprefix(name)), *sorted(sample.labels.items())): sample.value
            for sample in self.families[name].samples
        }


def read_text(metrics: Metrics) -> Scrape:
    families = parse_text(metrics.render().decode())
    return Scrape({family.name: family for family in families})


def read_openmetrics(metrics: Metrics) -> Scrape:
    text = metrics.render(openmetrics=True).decode()
    families = parse_openmetrics(text)  # type: ignore[no-untyped-call]
    return Scrape({family.name: family for family in families})


@pytest.fixture(scope="module", params=[read_text, read_openmetrics])
def scrape(request: pytest.FixtureRequest) -> Scrape:
    parsed: Scrape = request.param(used_metrics())
    return parsed


def test_both_formats_have_the_same_samples() -> None:
    metrics = used_metrics()
    text, openmetrics = read_text(metrics), read_openmetrics(metrics)
    assert text.families.keys() == openmetrics.families.keys()
    for name in text.families:
        if not name.startswith("process_"):  # These change by themselves.
            assert text.values(name) == openmetrics.values(name), name


def test_every_alias_is_in_the_scrape_with_the_type_of_its_source(scrape: Scrape) -> None:
    for alias in ALIASES:
        assert scrape.families[alias.name].type == scrape.families[alias.source].type, alias.name
        assert scrape.families[alias.name].documentation.endswith("."), alias.name


def test_all_series_of_ours_and_of_vllm_have_the_model_name(scrape: Scrape) -> None:
    for name, family in scrape.families.items():
        is_ours = name.startswith(("preamble_", "vllm:"))
        for sample in family.samples:
            assert sample.labels.get("model_name") == (MODEL if is_ours else None), sample


def test_vllms_values_equal_ours(scrape: Scrape) -> None:
    def only(name: str) -> float:
        (sample,) = scrape.families[name].samples
        assert sample.labels == {"model_name": MODEL, "engine": "0"}
        return sample.value

    assert only("vllm:num_requests_running") == GAUGES["scheduler_running_requests"]
    assert only("vllm:num_requests_waiting") == GAUGES["scheduler_waiting_requests"]
    assert only("vllm:kv_cache_usage_perc") == only("vllm:gpu_cache_usage_perc") == 0.25
    assert only("vllm:prefix_cache_queries") == only("vllm:gpu_prefix_cache_queries") == 70
    assert only("vllm:prefix_cache_hits") == only("vllm:gpu_prefix_cache_hits") == 30
    assert only("vllm:num_preemptions") == 4
    assert only("vllm:prompt_tokens") == 5 * 3
    assert only("vllm:prompt_tokens_cached") == 5 * 2
    assert only("vllm:generation_tokens") == 5 * 5
    assert only("vllm:spec_decode_num_draft_tokens") == 9
    assert only("vllm:spec_decode_num_accepted_tokens") == 6


def test_finish_reasons_that_vllm_does_not_have_count_as_length(scrape: Scrape) -> None:
    family = scrape.families["vllm:request_success"]
    counts = {sample.labels["finished_reason"]: sample.value for sample in family.samples}
    assert counts == {"stop": 1, "length": 4}


@pytest.mark.parametrize(
    ("alias", "source"),
    [
        ("vllm:time_to_first_token_seconds", "preamble_time_to_first_token_seconds"),
        ("vllm:inter_token_latency_seconds", "preamble_inter_token_latency_seconds"),
        ("vllm:time_per_output_token_seconds", "preamble_inter_token_latency_seconds"),
        ("vllm:e2e_request_latency_seconds", "preamble_generation_duration_seconds"),
        ("vllm:request_queue_time_seconds", "preamble_queue_duration_seconds"),
        ("vllm:request_prefill_time_seconds", "preamble_prefill_duration_seconds"),
        ("vllm:request_decode_time_seconds", "preamble_decode_duration_seconds"),
        ("vllm:request_prompt_tokens", "preamble_prompt_length_tokens"),
        ("vllm:request_generation_tokens", "preamble_generated_length_tokens"),
        ("vllm:request_max_num_generation_tokens", "preamble_generated_length_tokens"),
    ],
)
def test_vllms_histograms_equal_ours_summed_over_protocols(
    scrape: Scrape, alias: str, source: str
) -> None:
    expected: dict[tuple[str, str], float] = {}
    for sample in scrape.families[source].samples:
        key = sample.name.removeprefix(source), sample.labels.get("le", "")
        expected[key] = expected.get(key, 0) + sample.value
    actual = {
        (sample.name.removeprefix(alias), sample.labels.get("le", "")): sample.value
        for sample in scrape.families[alias].samples
    }
    assert actual == pytest.approx(expected) and expected["_count", ""] >= 4
    for sample in scrape.families[alias].samples:
        assert sample.labels.keys() - {"le"} == {"model_name", "engine"}


def test_aliases_can_be_turned_off() -> None:
    metrics = used_metrics("off")
    assert b"vllm:" not in metrics.render() + metrics.render(openmetrics=True)


def test_buckets_have_the_newest_exemplar_of_the_call_in_openmetrics_only() -> None:
    metrics = used_metrics()
    assert b"trace_id" not in metrics.render()
    families = read_openmetrics(metrics).families
    for name in (
        "preamble_time_to_first_token_seconds",
        "preamble_inter_token_latency_seconds",
        "preamble_queue_duration_seconds",
        "preamble_prefill_duration_seconds",
        "preamble_decode_duration_seconds",
        "preamble_generation_duration_seconds",
        "vllm:time_to_first_token_seconds",
        "vllm:e2e_request_latency_seconds",
    ):
        exemplars = [sample.exemplar for sample in families[name].samples if sample.exemplar]
        assert exemplars, name
        assert all(exemplar.labels == IDS for exemplar in exemplars)
    assert [sample for sample in families["preamble_requests"].samples if sample.exemplar] == []


def test_the_endpoint_picker_reads_load_cache_and_adapters(scrape: Scrape) -> None:
    for prefix, names in (
        ("vllm", {"info": "vllm:lora_requests_info", "waiting": "vllm:num_requests_waiting"}),
        (
            "preamble",
            {
                "info": "preamble_adapters_info",
                "waiting": "preamble_scheduler_waiting_requests",
            },
        ),
    ):
        assert picked_gauge(scrape, names["waiting"]) == 5, prefix
        adapters = picked_adapters(scrape, names["info"])
        assert adapters == ({"sum", "mood"}, {"late"}, 12), prefix
    assert picked_cache_sizes(scrape) == (16, 640)
    loaded = {
        (sample.labels["adapter_name"], sample.labels["level"], sample.labels["pinned"])
        for sample in scrape.families["vllm:lora_adapter_loaded"].samples
        if sample.value > 0
    }
    assert loaded == {("sum", "gpu", "false"), ("mood", "gpu", "false")}
    assert picked_gauge(scrape, "vllm:num_gpu_loaded_lora_adapters") == 2
    assert picked_gauge(scrape, "vllm:max_gpu_lora_adapters") == 12


# The rules of llm-d's endpoint picker, from its metric protocol: a gauge is the value of its last
# series; of the series with adapter lists the one with the largest value counts, and its label
# values are split at commas; the sizes of the cache are integers in labels.


def picked_gauge(scrape: Scrape, name: str) -> float:
    return list(scrape.families[name].samples)[-1].value


def picked_adapters(scrape: Scrape, name: str) -> tuple[set[str], set[str], int]:
    latest = max(scrape.families[name].samples, key=lambda sample: sample.value)
    running, waiting = (
        {adapter.strip() for adapter in latest.labels[label].split(",") if adapter.strip()}
        for label in ("running_lora_adapters", "waiting_lora_adapters")
    )
    return running, waiting, int(latest.labels["max_lora"])


def picked_cache_sizes(scrape: Scrape) -> tuple[int, int]:
    (sample,) = scrape.families["vllm:cache_config_info"].samples
    return int(sample.labels["block_size"]), int(sample.labels["num_gpu_blocks"])


def test_the_document_lists_every_alias_with_its_type_and_source() -> None:
    types = {name: family.type for name, family in read_text(used_metrics()).families.items()}

    def rows() -> Iterator[tuple[str, str, str]]:
        for alias in ALIASES:
            suffix = "_total" if types[alias.name] == "counter" else ""
            yield f"{alias.name}{suffix}", types[alias.name], f"{alias.source}{suffix}"

    text = (ROOT / "docs/metrics.md").read_text()
    documented = re.findall(r"^\| `(vllm:\w+)` \| (\w+) \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert sorted(documented) == sorted(rows())
