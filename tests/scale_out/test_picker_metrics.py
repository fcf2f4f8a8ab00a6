"""A real server's metrics as llm-d's endpoint picker reads them, with 10,000 adapters."""

import http.client
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from clients.client import Options
from tests.support.manifests import manifest
from tests.support.picker_metrics import (
    VLLM_ENGINE,
    PickerError,
    Specification,
    affinity_score,
    parse_families,
    read_endpoint,
)
from tests.support.servers import (
    WAIT_S,
    Server,
    eventually,
    is_idle,
    serving,
    write_adapter,
    write_checkpoint,
)

ADAPTERS = 10_000
DISTINCT = 20  # Adapters with content of their own; the others are links to the last one.
ROWS = 4
DEVICE_ADAPTERS = 8  # Adapters that fit on the device.
RUNNING_MAX = 4
SCRAPES = 100
SCRAPE_MS_MAX = 5.0  # Of CPU time: unless it is configured, the picker scrapes every 50 ms.
MARGIN = 5.0


def preamble_engine() -> dict[str, Any]:
    text = manifest("ConfigMap", "preamble-picker")["data"]["config.yaml"]
    plugins = {plugin["type"]: plugin for plugin in yaml.safe_load(text)["plugins"]}
    (engine,) = plugins["core-metrics-extractor"]["parameters"]["engineConfigs"]
    return dict(engine)


ENGINES = {"preamble": preamble_engine(), "vllm": VLLM_ENGINE}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("picker")
    checkpoint = write_checkpoint(folder)
    adapters = folder / "adapters"
    adapters.mkdir()
    for number in range(DISTINCT):
        path = adapters / f"a{number}.safetensors"
        write_adapter(path, checkpoint, [3 + number + row for row in range(ROWS)])
    for number in range(DISTINCT, ADAPTERS):
        os.link(path, adapters / f"a{number}.safetensors")
    limits: dict[str, Any] = {
        "adapters": str(adapters),
        "adapter_rows_max": DEVICE_ADAPTERS * ROWS,
        "running_requests_max": RUNNING_MAX,
    }
    with serving(checkpoint, log=folder / "log", **limits) as server:
        yield server


def generate(server: Server, adapter: str, tokens: int = 2) -> None:
    with server.client() as client:
        options = Options(max_new_tokens=tokens, ignore_ends=True, adapter=adapter)
        client.generate("a prompt", options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_the_picker_reads_load_cache_and_adapters(server: Server, name: str) -> None:
    engine = ENGINES[name]
    for number in range(12):
        generate(server, f"a{number}")
    eventually(lambda: is_idle(server))
    endpoint = read_endpoint(server.get("/metrics")[1], engine)
    assert (endpoint.waiting, endpoint.running) == (0, 0)
    assert endpoint.block_tokens == server.metric("preamble_kv_block_tokens") > 0
    assert endpoint.blocks == server.metric("preamble_kv_blocks") > 0
    assert endpoint.adapters_max == DEVICE_ADAPTERS
    # The last used adapters are on the device.
    assert endpoint.active_adapters == {f"a{number}" for number in range(4, 12)}
    assert affinity_score(endpoint, "a11") == 1.0
    assert affinity_score(endpoint, "a0") == affinity_score(endpoint, "a9999") == 0.0

    def is_full() -> bool:
        nonlocal endpoint
        endpoint = read_endpoint(server.get("/metrics")[1], engine)
        return endpoint.running == RUNNING_MAX and endpoint.waiting > 0

    with ThreadPoolExecutor(2 * RUNNING_MAX) as pool:
        calls = [
            pool.submit(generate, server, f"a{number}", 200) for number in range(2 * RUNNING_MAX)
        ]
        eventually(is_full)
        for call in calls:
            call.result()
    assert endpoint.waiting <= RUNNING_MAX and 0.0 < endpoint.kv_usage <= 1.0


@pytest.mark.slow
def test_a_scrape_is_cheap_with_ten_thousand_adapters(server: Server) -> None:
    for number in range(12):
        generate(server, f"a{number}")
    eventually(lambda: is_idle(server))
    host, _, port = server.http_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    size = 0
    # The server pauses between scrapes, so the time of a scrape is not its cost.
    started, cpu_s = time.monotonic(), cpu_seconds(server.process.pid)
    for _ in range(SCRAPES):
        # The picker's HTTP client accepts gzip.
        connection.request("GET", "/metrics", headers={"Accept-Encoding": "gzip"})
        size = len(connection.getresponse().read())
    scraped_s, cpu_s = time.monotonic() - started, cpu_seconds(server.process.pid) - cpu_s
    connection.close()
    # The server also polls the directory of adapters.
    idle_cpu_s = cpu_seconds(server.process.pid)
    time.sleep(scraped_s)
    idle_cpu_s = cpu_seconds(server.process.pid) - idle_cpu_s
    cpu_ms = 1e3 * (cpu_s - idle_cpu_s) / SCRAPES
    print(f"{cpu_ms:.1f} ms of CPU time a scrape of {size} bytes, with {ADAPTERS} adapters")
    assert cpu_ms < MARGIN * SCRAPE_MS_MAX


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    ticks = int(fields[11]) + int(fields[12])  # utime and stime; the first field is field 3.
    return ticks / os.sysconf("SC_CLK_TCK")


TEXT = """\
# HELP load Waiting requests.
# TYPE load gauge
load{queue="a"} 3 1000
load{queue="b",pool="x\\"y"} 4.9 2000
load{queue="c"} 5 1999
# TYPE seconds histogram
seconds_bucket{le="+Inf"} 2
seconds_sum 0.5
seconds_count 2
no_type 7
# TYPE adapters gauge
adapters{running_lora_adapters="a, b",waiting_lora_adapters="",max_lora="4"} 10
adapters{running_lora_adapters="c",waiting_lora_adapters="d,",max_lora="4"} 20
"""


def test_the_port_of_the_pickers_rules_reads_the_latest_series() -> None:
    families = parse_families(TEXT)
    assert {name: family.type for name, family in families.items()} == {
        "load": "gauge",
        "seconds": "histogram",
        "no_type": "untyped",
        "adapters": "gauge",
    }
    assert families["load"].samples[1].labels["pool"] == 'x"y'
    read = read_endpoint(TEXT, {"queuedRequestsSpec": "load", "loraSpec": "adapters"})
    assert (read.waiting, read.active_adapters, read.waiting_adapters) == (4, {"c"}, {"d"})
    assert (affinity_score(read, "c"), affinity_score(read, "x")) == (1.0, 0.8)
    assert read_endpoint(TEXT, {"queuedRequestsSpec": "load{queue=c}"}).waiting == 5
    assert read_endpoint(TEXT, {"queuedRequestsSpec": "no_type"}).waiting == 0
    assert Specification.parse('a{b=c, d="e"}').labels == {"b": "c", "d": "e"}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# TYPE no", "# TYPE load gauge\n# TYPE no"),
        ("no_type 7", "# TYPE load gauge\nno_type 7"),
        ("no_type 7", "no_type seven"),
        ("no_type 7", 'no_type{a="1",a="2"} 7'),
        ("no_type 7", "no-type 7"),
        ("no_type 7", 'no_type{a.b="1"} 7'),
        ("} 20\n", "} 20"),
        ('"c",waiting', "c,waiting"),
        ("gauge\nload", "gouge\nload"),
    ],
)
def test_the_port_of_the_pickers_rules_refuses_what_the_picker_refuses(old: str, new: str) -> None:
    if old in TEXT:
        with pytest.raises(PickerError):
            parse_families(TEXT.replace(old, new))


def test_the_port_of_the_pickers_rules_refuses_missing_and_broken_values() -> None:
    for engine in (
        {"queuedRequestsSpec": "absent"},
        {"queuedRequestsSpec": "load{queue=d}"},
        {"queuedRequestsSpec": "load-balance"},
        {"cacheInfoSpec": "absent"},
    ):
        with pytest.raises(PickerError):
            read_endpoint(TEXT, engine)
    with pytest.raises(PickerError):
        read_endpoint(TEXT.replace('max_lora="4"', 'max_lora="4.0"'), {"loraSpec": "adapters"})
    assert read_endpoint(TEXT, {"loraSpec": "absent"}).adapters_max == 0
