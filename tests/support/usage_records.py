"""Usage of tenants and adapters, as read from a scrape and from a usage file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from gpt.files.json_lines_log import JsonLinesLog

COUNTS = ("requests", "prompt_tokens", "virtual_tokens", "cached_tokens", "generated_tokens")


def usage_series(scrape: str) -> dict[tuple[str, str, str, str], float]:
    """Return the usage counters by count, tenant, model and adapter."""
    return {
        (
            sample.name.removeprefix("preamble_usage_").removesuffix("_total"),
            sample.labels["tenant"],
            sample.labels["model_name"],
            sample.labels["adapter"],
        ): sample.value
        for family in text_string_to_metric_families(scrape)
        for sample in family.samples
        if sample.name.startswith("preamble_usage_") and "tenant" in sample.labels
    }


def read_usage_file(path: Path) -> list[dict[str, Any]]:
    """Return the records of a usage file, with those of its rotated files."""
    return list(JsonLinesLog(path, 1, 1).read())


def sum_records(records: Sequence[dict[str, Any]]) -> dict[tuple[str, str], list[int]]:
    """Return the sums of COUNTS by tenant and adapter."""
    totals: dict[tuple[str, str], Counter[str]] = {}
    for record in records:
        total = totals.setdefault((record["tenant"], record["adapter"]), Counter())
        total.update({name: record[name] for name in COUNTS})
    return {key: [total[name] for name in COUNTS] for key, total in totals.items()}
