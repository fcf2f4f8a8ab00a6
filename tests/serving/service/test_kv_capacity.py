"""KV capacity: the metrics of KV groups of a running server, and the requests that fit."""

from pathlib import Path
from random import Random

import pytest
from prometheus_client.parser import text_string_to_metric_families

from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.kv_groups import SequenceBlocks, kv_groups
from serving.service.kv_capacity import context_concurrency, window_label
from tests.support.models import CLASSIC, lively
from tests.support.servers import CONFIG, Server, eventually, serving

WINDOW, BLOCK_TOKENS, KV_TOKENS = 32, 4, 4000
# One layer without a window, and two groups of layers with one.
WINDOW_CONFIG = CONFIG.with_fields(
    num_layers=3,
    moe_layers=(),
    window_size=WINDOW,
    window_layers=(True, False, True),
    max_position_embeddings=3000,
)


def scrape(server: Server) -> dict[tuple[str, str], float]:
    """The values of a scrape, by name and by label `group`."""
    status, text = server.get("/metrics")
    assert status == 200
    return {
        (sample.name, sample.labels.get("group", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def info_labels(server: Server, name: str, group: str = "") -> dict[str, str]:
    for family in text_string_to_metric_families(server.get("/metrics")[1]):
        for sample in family.samples:
            if sample.name == name and sample.labels.get("group", "") == group:
                return sample.labels
    raise AssertionError(f"no series {name}")


@pytest.mark.slow
def test_a_server_reports_the_blocks_of_each_kv_group(tmp_path: Path) -> None:
    write_native(lively(WINDOW_CONFIG), tmp_path / "checkpoint")
    limits = {"kv_block_tokens": BLOCK_TOKENS, "kv_tokens_max": KV_TOKENS}
    with serving(tmp_path / "checkpoint", **limits) as server:
        blocks = 3 * KV_TOKENS // BLOCK_TOKENS
        with server.client() as client:
            stream = client.stream("3 1 4 1 5", Options(max_new_tokens=2000))
            next(iter(stream))
            held: dict[str, float] = {}

            def has_long_context() -> bool:
                values = scrape(server)
                for name in ("full", f"window_{WINDOW}"):
                    held[name] = values["preamble_kv_group_blocks_held", name]
                    ratio = values["preamble_kv_group_usage_ratio", name]
                    assert ratio == pytest.approx(held[name] / blocks)
                    assert ratio <= values["preamble_kv_usage_ratio", ""] + 0.01
                return held["full"] > 100

            eventually(has_long_context)
            assert scrape(server)["preamble_kv_blocks", ""] == blocks
            # The groups with a window hold the blocks of 32 tokens and of the next ones.
            assert 2 * WINDOW / BLOCK_TOKENS <= held[f"window_{WINDOW}"] <= 2 * (8 + 2)
            for _ in stream:
                pass
        eventually(lambda: scrape(server)["preamble_kv_blocks_held", ""] == 0)
        values = scrape(server)
        assert values["preamble_kv_group_blocks_held", "full"] == 0
        assert values["preamble_kv_group_blocks_held", f"window_{WINDOW}"] == 0
        group_info = info_labels(server, "preamble_kv_group_info", f"window_{WINDOW}")
        assert {name: group_info[name] for name in ("window", "layers", "block_tables")} == {
            "window": str(WINDOW),
            "layers": "2",
            "block_tables": "2",
        }
        # A full context has 3000 tokens, and at most 9 blocks in each group with a window.
        concurrency = blocks / (3000 / BLOCK_TOKENS + 2 * 9)
        cache_info = info_labels(server, "preamble_kv_cache_info")
        assert float(cache_info["context_requests"]) == pytest.approx(concurrency, rel=1e-5)
        assert int(cache_info["context_tokens"]) == int(concurrency * 3000)
        assert server.ready_field("full_context_requests") == str(int(concurrency)) == "3"
        alias = info_labels(server, "vllm:cache_config_info")
        assert alias["kv_cache_size_tokens"] == cache_info["context_tokens"]
        assert alias["kv_cache_max_concurrency"] == cache_info["context_requests"]


def test_context_concurrency_divides_the_blocks_by_those_of_a_full_context() -> None:
    draw = Random(0)
    for _ in range(20):
        window = draw.randint(1, 40)
        pattern = tuple(draw.random() < 0.5 for _ in range(6))
        config = CLASSIC.with_fields(
            num_layers=6, moe_layers=(), window_size=window, window_layers=pattern
        )
        blocks = SequenceBlocks(tuple(group.window for group in kv_groups(config)), 4)
        context = config.max_position_embeddings
        held = max(blocks.held(tokens + 1, tokens) for tokens in range(context))
        assert context_concurrency(config, 1000, 4) == 1000 / held


def test_groups_are_named_by_their_windows() -> None:
    assert [window_label(window) for window in (None, 128)] == ["full", "window_128"]
