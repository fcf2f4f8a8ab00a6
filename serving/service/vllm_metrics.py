"""vLLM's names of metrics: our families under the names and labels that vLLM's users query.

Dashboards, autoscalers and routers that were written for vLLM read these series unchanged. Each one
is derived from a family of ours when a scrape is rendered, so nothing is counted twice and the
values are equal. Types and units are vLLM's; histograms have our buckets. A metric of vLLM for
which this server has no count does not exist here. docs/metrics.md has a table of all names.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import Exemplar, Metric, Sample

# vLLM numbers the engines of a server.
ENGINE_LABELS = {"engine": "0"}
# Marks a label of ours that an alias does not have; the alias sums over its values.
_DROPPED = ""


@dataclass(frozen=True)
class _Alias:
    """A family of vLLM's, derived from one of ours.

    `labels`: vLLM's names of our labels, or `_DROPPED`. `values`: vLLM's names of label values.
    `extra_labels`: labels of each series that ours do not have.
    """

    name: str  # Of the family; samples of counters end in `_total`.
    source: str
    help_text: str
    labels: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    extra_labels: Mapping[str, str] = field(default_factory=lambda: ENGINE_LABELS)

    def derive(self, family: Metric) -> Metric:
        """Return vLLM's family with the values of ours."""
        alias = Metric(self.name, self.help_text, family.type)
        samples: dict[tuple[str, frozenset[tuple[str, str]]], Sample] = {}
        for sample in family.samples:
            name = self.name + sample.name.removeprefix(family.name)
            labels = {**self._translate(sample.labels), **self.extra_labels}
            key = name, frozenset(labels.items())
            value, exemplar = sample.value, sample.exemplar
            previous = samples.get(key)
            if previous is not None:
                value += previous.value
                exemplar = _newer(exemplar, previous.exemplar)
            samples[key] = Sample(name, labels, value, exemplar=exemplar)
        alias.samples = list(samples.values())
        return alias

    def _translate(self, labels: Mapping[str, str]) -> dict[str, str]:
        translated = {}
        for label, value in labels.items():
            alias_label = self.labels.get(label, label)
            if alias_label != _DROPPED:
                is_renamed = label in self.labels
                translated[alias_label] = self.values.get(value, value) if is_renamed else value
        return translated


def _newer(first: Exemplar | None, second: Exemplar | None) -> Exemplar | None:
    """Return the exemplar with the later timestamp."""
    exemplars = [exemplar for exemplar in (first, second) if exemplar is not None]
    return max(exemplars, key=lambda exemplar: float(exemplar.timestamp or 0), default=None)


# Names of vLLM's current version, and older names that routers and dashboards still read:
# `gpu_cache_usage_perc`, `gpu_prefix_cache_queries`, `gpu_prefix_cache_hits` and
# `time_per_output_token_seconds`. llm-d's router reads the names of adapter residency, which are
# only proposed to vLLM.
ALIASES = (
    _Alias(
        "vllm:num_requests_running", "preamble_scheduler_running_requests", "Running sequences."
    ),
    _Alias(
        "vllm:num_requests_waiting", "preamble_scheduler_waiting_requests", "Waiting sequences."
    ),
    _Alias(
        "vllm:kv_cache_usage_perc",
        "preamble_kv_usage_ratio",
        "Fraction of KV cache blocks held by requests; 1 is all of them.",
    ),
    _Alias(
        "vllm:gpu_cache_usage_perc",
        "preamble_kv_usage_ratio",
        "Older name of vllm:kv_cache_usage_perc.",
    ),
    _Alias(
        "vllm:prefix_cache_queries",
        "preamble_engine_prompt_tokens",
        "Prompt tokens that were looked up in the prefix cache.",
    ),
    _Alias(
        "vllm:gpu_prefix_cache_queries",
        "preamble_engine_prompt_tokens",
        "Older name of vllm:prefix_cache_queries.",
    ),
    _Alias(
        "vllm:prefix_cache_hits",
        "preamble_engine_cached_tokens",
        "Prompt tokens that were in the prefix cache.",
    ),
    _Alias(
        "vllm:gpu_prefix_cache_hits",
        "preamble_engine_cached_tokens",
        "Older name of vllm:prefix_cache_hits.",
    ),
    _Alias(
        "vllm:num_preemptions",
        "preamble_engine_preemptions",
        "Preemptions of running sequences.",
    ),
    _Alias("vllm:prompt_tokens", "preamble_prompt_tokens", "Prompt tokens of finished answers."),
    _Alias(
        "vllm:prompt_tokens_cached",
        "preamble_cached_tokens",
        "Prompt tokens reused from the prefix cache.",
    ),
    _Alias("vllm:generation_tokens", "preamble_generated_tokens", "Generated tokens."),
    _Alias(
        "vllm:request_success",
        "preamble_generation_finished",
        "Finished answers, by finish reason.",
        labels={"reason": "finished_reason"},
        # vLLM has no such reasons. OpenAI's API reports them as "length" too.
        values={"scored": "length", "time": "length"},
    ),
    _Alias(
        "vllm:request_prompt_tokens",
        "preamble_prompt_length_tokens",
        "Prompt tokens per finished answer.",
    ),
    _Alias(
        "vllm:request_generation_tokens",
        "preamble_generated_length_tokens",
        "Generated tokens per finished answer.",
    ),
    _Alias(
        "vllm:request_max_num_generation_tokens",
        "preamble_generated_length_tokens",
        "Generated tokens per finished answer.",
    ),
    _Alias(
        "vllm:time_to_first_token_seconds",
        "preamble_time_to_first_token_seconds",
        "Time to first token, in seconds.",
        labels={"wire": _DROPPED},
    ),
    _Alias(
        "vllm:inter_token_latency_seconds",
        "preamble_inter_token_latency_seconds",
        "Time between consecutive tokens of an answer, in seconds.",
    ),
    _Alias(
        "vllm:time_per_output_token_seconds",
        "preamble_inter_token_latency_seconds",
        "Older name of vllm:inter_token_latency_seconds.",
    ),
    _Alias(
        "vllm:e2e_request_latency_seconds",
        "preamble_generation_duration_seconds",
        "Time from a call's arrival to the end of each finished answer, in seconds.",
    ),
    _Alias(
        "vllm:request_queue_time_seconds",
        "preamble_queue_duration_seconds",
        "Time in the queue, in seconds.",
    ),
    _Alias(
        "vllm:request_prefill_time_seconds",
        "preamble_prefill_duration_seconds",
        "Time to the first token without the time in the queue, in seconds.",
    ),
    _Alias(
        "vllm:request_decode_time_seconds",
        "preamble_decode_duration_seconds",
        "Time from the first token to the end, in seconds.",
    ),
    _Alias(
        "vllm:spec_decode_num_draft_tokens",
        "preamble_engine_drafted_tokens",
        "Draft tokens of speculative decoding.",
    ),
    _Alias(
        "vllm:spec_decode_num_accepted_tokens",
        "preamble_engine_accepted_tokens",
        "Accepted draft tokens of speculative decoding.",
    ),
    _Alias(
        "vllm:cache_config_info",
        "preamble_kv_cache_info",
        "Configuration of the KV cache, as labels.",
        labels={
            "block_tokens": "block_size",
            "blocks": "num_gpu_blocks",
            "context_requests": "kv_cache_max_concurrency",
            "context_tokens": "kv_cache_size_tokens",
            "dtype": "cache_dtype",
            "prefix_cache": "enable_prefix_caching",
        },
        values={"true": "True", "false": "False"},
    ),
    _Alias(
        "vllm:lora_requests_info",
        "preamble_adapters_info",
        "Adapters on the device and adapters that requests wait for, as labels. The value is the "
        "Unix time of the last change.",
        extra_labels={},
    ),
    _Alias(
        "vllm:lora_adapter_loaded",
        "preamble_adapter_resident",
        "Adapters on the device, without private adapters.",
        labels={"adapter": "adapter_name"},
        extra_labels={**ENGINE_LABELS, "level": "gpu", "pinned": "false"},
    ),
    _Alias(
        "vllm:num_gpu_loaded_lora_adapters",
        "preamble_adapters_resident",
        "Number of adapters on the device.",
    ),
    _Alias(
        "vllm:max_gpu_lora_adapters",
        "preamble_adapters_resident_max",
        "Adapters of the present average size that fit on the device.",
    ),
)
_BY_SOURCE = {
    source: [alias for alias in ALIASES if alias.source == source]
    for source in dict.fromkeys(alias.source for alias in ALIASES)
}


def vllm_families(family: Metric) -> Iterator[Metric]:
    """Yield the families of vLLM's that are derived from a family of ours."""
    for alias in _BY_SOURCE.get(family.name, ()):
        yield alias.derive(family)
