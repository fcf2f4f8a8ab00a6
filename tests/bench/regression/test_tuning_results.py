"""Comparison of tuning runs: durations and the order of metadata are ignored, losses are not."""

import torch
from safetensors.torch import save

from bench.regression.tuning_results import without_times


def test_durations_are_ignored_and_losses_are_compared() -> None:
    first, second, other = (
        without_times("runs/x/metrics.csv", f"step,loss,seconds\n1,{loss},{seconds}\n".encode())
        for loss, seconds in ((0.5, 1.25), (0.5, 7.5), (0.6, 1.25))
    )
    assert first == second != other


def test_the_order_of_metadata_is_ignored_and_its_values_are_compared() -> None:
    def adapter_bytes(metadata: dict[str, str], weight: float) -> bytes:
        content = save({"rows": torch.full((2, 2), weight)}, metadata)
        return without_times("out/x@1.safetensors", content)

    contents = {adapter_bytes({"a": "1", "b": "2", "c": "3"}, 1.0) for _ in range(8)}
    assert len(contents) == 1
    assert adapter_bytes({"a": "1", "b": "2", "c": "4"}, 1.0) not in contents
    assert adapter_bytes({"a": "1", "b": "2", "c": "3"}, 1.5) not in contents


def test_the_date_of_an_adapter_is_ignored() -> None:
    cards = (f'{{"created": "2026-01-01T00:00:0{second}", "rows": 2}}' for second in (1, 2))
    first, second = (
        without_times("out/x@1.safetensors", save({"rows": torch.zeros(2, 2)}, {"card": card}))
        for card in cards
    )
    assert first == second
