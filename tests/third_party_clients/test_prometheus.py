"""Prometheus: promtool's checks of the scrape and the rules, and a real server that scrapes.

Debian's package has both programs; deploy/prometheus/install.sh installs them under build/tools.
Without them, the tests are skipped with that reason.
"""

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from clients.client import Options
from tests.support.servers import (
    ROOT,
    Server,
    eventually,
    free_port,
    serving,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.clients

RULES = ROOT / "deploy/prometheus"
SCRAPE_S = 1
UP_S = 60.0
# Alerts that a busy machine may raise, until they have lasted some minutes.
BY_THE_CLOCK = {"PreambleDown", "PreambleSlowFirstToken", "PreambleSlowNextToken"}
TRACE_ID = "5f" * 16
# Queries of dashboards and autoscalers for vLLM.
VLLM_QUERIES = (
    "histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket"
    '{model_name="checkpoint"}[1m])))',
    'histogram_quantile(0.5, rate(vllm:inter_token_latency_seconds_bucket{engine="0"}[1m]))',
    "histogram_quantile(0.99, sum by (le) (rate(vllm:time_per_output_token_seconds_bucket[1m])))",
    "rate(vllm:e2e_request_latency_seconds_sum[1m]) / rate(vllm:e2e_request_latency_seconds_count"
    "[1m])",
    "rate(vllm:request_queue_time_seconds_sum[1m])",
    "rate(vllm:request_prefill_time_seconds_sum[1m])",
    "rate(vllm:request_decode_time_seconds_sum[1m])",
    "rate(vllm:prompt_tokens_total[1m]) + rate(vllm:generation_tokens_total[1m])",
    "sum by (le) (increase(vllm:request_prompt_tokens_bucket[1m]))",
    "sum by (le) (increase(vllm:request_generation_tokens_bucket[1m]))",
    "sum by (finished_reason) (increase(vllm:request_success_total[1m]))",
    "rate(vllm:prefix_cache_hits_total[1m]) / rate(vllm:prefix_cache_queries_total[1m])",
    "sum(vllm:num_requests_waiting) + sum(vllm:num_requests_running)",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    'vllm:lora_requests_info{running_lora_adapters="sum"}',
    'vllm:lora_adapter_loaded{adapter_name="sum", level="gpu"}',
    'vllm:cache_config_info{block_size="16"}',
)
INSTALL = "run deploy/prometheus/install.sh (make clients-tools)"


def program(name: str) -> str:
    installed = ROOT / "build/tools/prometheus/usr/bin" / name
    executable = str(installed) if installed.exists() else shutil.which(name)
    if executable is None:
        pytest.skip(f"{name} is not here: {INSTALL}")
    return executable


def run_promtool(*arguments: str, text: str | None = None) -> tuple[int, str]:
    """The exit code and the output of promtool."""
    completed = subprocess.run(
        [program("promtool"), *arguments],
        cwd=RULES,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return completed.returncode, completed.stdout + completed.stderr


def promtool(*arguments: str, text: str | None = None) -> str:
    """The output of promtool; the test fails if it reports a problem."""
    code, output = run_promtool(*arguments, text=text)
    assert code == 0, output
    return output


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with some completed requests: with and without adapter, unary and streamed."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("scraped")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters/sum.safetensors", checkpoint, [5, 6, 7])
    with serving(checkpoint, folder / "s.yaml", adapters=str(folder / "adapters")) as server:
        send_requests(server)
        yield server


def send_requests(server: Server) -> None:
    with server.client() as client:
        client.generate("1 2 3 4", Options(max_new_tokens=8, adapter="sum"))
        list(client.stream("1 2 3 4", Options(max_new_tokens=8)))


def send_traced_request(server: Server) -> None:
    request = urllib.request.Request(f"http://{server.http_address}/v1/completions")
    request.add_header("Content-Type", "application/json")
    request.add_header("traceparent", f"00-{TRACE_ID}-{'ab' * 8}-01")
    request.data = json.dumps({"prompt": [1, 2, 3], "max_tokens": 4}).encode()
    with urllib.request.urlopen(request, timeout=60) as page:
        assert page.status == 200


def test_promtool_accepts_the_scrape(server: Server) -> None:
    lines = server.get("/metrics")[1].splitlines(keepends=True)
    ours = "".join(line for line in lines if "vllm:" not in line)
    assert promtool("check", "metrics", text=ours).strip() == ""
    # vLLM's names have a colon, which promtool reports; it can parse them, and reports no more.
    aliases = "".join(line for line in lines if "vllm:" in line)
    _, output = run_promtool("check", "metrics", text=aliases)
    assert output
    for problem in output.splitlines():
        assert re.fullmatch(r"vllm:\w+ metric names should not contain ':'", problem), problem


def test_promtool_accepts_rules_and_configuration() -> None:
    rules = [
        rule
        for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yaml")


def test_alerts_fire_exactly_on_their_conditions() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


@dataclass
class Prometheus:
    port: int

    def get(self, path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=60) as page:
            response = json.load(page)
        assert response["status"] == "success", response
        return response["data"]

    def value(self, query: str) -> float | None:
        """The value of the only series of a query, or None without a series."""
        results = self.get("query", query=query)["result"]
        assert len(results) <= 1, results
        return float(results[0]["value"][1]) if results else None


def unexpected_alerts(prometheus: Prometheus) -> list[str]:
    """Alerts that fire, or that are pending for another reason than a busy machine."""
    return [
        alert["labels"]["alertname"]
        for alert in prometheus.get("alerts")["alerts"]
        if alert["state"] == "firing" or alert["labels"]["alertname"] not in BY_THE_CLOCK
    ]


def exemplar_traces(prometheus: Prometheus) -> set[str]:
    """The trace ids of the exemplars of times to first token."""
    query = "preamble_time_to_first_token_seconds_bucket"
    now = time.time()
    series = prometheus.get("query_exemplars", query=query, start=str(now - 600), end=str(now))
    return {
        exemplar["labels"].get("trace_id", "")
        for entry in series
        for exemplar in entry["exemplars"]
    }


@contextmanager
def scraping(server: Server, folder: Path) -> Iterator[Prometheus]:
    """A real Prometheus with our configuration, except for the port and the interval."""
    settings = yaml.safe_load((RULES / "prometheus.yaml").read_text())
    settings["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{SCRAPE_S}s")
    settings["rule_files"] = [str(RULES / "alerts.yaml")]
    (job,) = settings["scrape_configs"]
    match = re.search(r"\bhttp=(\S+)", server.ready)
    assert match is not None
    job["static_configs"][0]["targets"] = [match[1]]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    port = free_port()
    arguments = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--enable-feature=exemplar-storage",
    ]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        prometheus = Prometheus(port)

        def ready() -> bool:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                return prometheus.value('up{job="preamble"}') == 1
            except OSError:
                return False

        eventually(ready, UP_S)
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_prometheus_evaluates_every_rule_and_panel(server: Server, tmp_path: Path) -> None:
    with scraping(server, tmp_path) as prometheus:
        tokens_before = prometheus.value("preamble_generated_tokens_total")
        end = time.monotonic() + 4 * SCRAPE_S
        while time.monotonic() < end:  # Rates need traffic between several scrapes.
            send_requests(server)
            send_traced_request(server)
            time.sleep(SCRAPE_S / 4)

        def has_more_tokens() -> bool:
            tokens = prometheus.value("preamble_generated_tokens_total")
            return tokens == server.metric("preamble_generated_tokens_total")

        eventually(has_more_tokens)
        assert tokens_before is not None
        assert prometheus.value("preamble_generated_tokens_total") != tokens_before

        # Prometheus asks for OpenMetrics, which has exemplars; the text format has none.
        eventually(lambda: TRACE_ID in exemplar_traces(prometheus))
        for query in VLLM_QUERIES:
            assert prometheus.get("query", query=query)["result"], query
        for name in ("generation_tokens", "prompt_tokens"):
            ours = name.replace("generation", "generated")
            vllm = prometheus.value(f"vllm:{name}_total")
            assert vllm == prometheus.value(f"preamble_{ours}_total") != 0

        groups = prometheus.get("rules")["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        eventually(
            lambda: all(
                rule["health"] == "ok"
                for group in prometheus.get("rules")["groups"]
                for rule in group["rules"]
            )
        )
        assert len(rules) > 20
        eventually(lambda: not unexpected_alerts(prometheus))

        board = json.loads((ROOT / "deploy/grafana/preamble.json").read_text())
        empty = []
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
                if not prometheus.get("query", query=query)["result"]:
                    empty.append((panel["title"], target["expr"]))
        # Panels that show only failures or running requests are empty on a healthy idle server.
        empty_panels = {"Failed calls by reason", "Rejected calls", "Time since the last step"}
        assert {title for title, _ in empty} <= empty_panels, empty


def test_prometheus_detects_a_stopped_server(server: Server, tmp_path: Path) -> None:
    with scraping(server, tmp_path) as prometheus:
        assert server.stop() == 0

        def pending() -> bool:
            names = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
            return "PreambleDown" in names and names <= BY_THE_CLOCK

        eventually(pending)
