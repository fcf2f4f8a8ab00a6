"""Prometheus itself: promtool's word on the scrape and on the rules, and a real one that scrapes.

Debian's package has both programs; deploy/prometheus/install.sh puts them under build/tools. Where
they are not, the tests are skipped and say so.
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

pytestmark = pytest.mark.slow

RULES = ROOT / "deploy/prometheus"
SCRAPE_S = 1
UP_S = 60.0
# What a machine that is busy with other things may bring on, until it has lasted some minutes.
BY_THE_CLOCK = {"PreambleDown", "PreambleSlowFirstToken", "PreambleSlowNextToken"}
INSTALL = "run deploy/prometheus/install.sh (make tools)"


def program(name: str) -> str:
    ours = ROOT / "build/tools/prometheus/usr/bin" / name
    found = str(ours) if ours.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: {INSTALL}")
    return found


def promtool(*words: str, text: str | None = None) -> str:
    """What it says of these; a failure of the test unless it is content."""
    done = subprocess.run(
        [program("promtool"), *words],
        cwd=RULES,
        input=text,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that has answered, with an adapter and without, whole and streamed."""
    program("prometheus")
    folder = tmp_path_factory.mktemp("scraped")
    checkpoint = write_checkpoint(folder, tokenizer=False)
    (folder / "adapters").mkdir()
    write_adapter(folder / "adapters/sum.safetensors", checkpoint, [5, 6, 7])
    with serving(checkpoint, folder / "s.yaml", adapters=str(folder / "adapters")) as server:
        ask(server)
        yield server


def ask(server: Server) -> None:
    with server.client() as client:
        client.generate("1 2 3 4", Options(max_new_tokens=8, adapter="sum"))
        list(client.stream("1 2 3 4", Options(max_new_tokens=8)))


def test_promtool_finds_nothing_to_say_about_a_scrape(server: Server) -> None:
    assert promtool("check", "metrics", text=server.get("/metrics")[1]).strip() == ""


def test_promtool_accepts_the_rules_and_the_configuration() -> None:
    rules = [
        rule
        for group in yaml.safe_load((RULES / "alerts.yaml").read_text())["groups"]
        for rule in group["rules"]
    ]
    assert f"SUCCESS: {len(rules)} rules found" in promtool("check", "rules", "alerts.yaml")
    assert "SUCCESS" in promtool("check", "config", "prometheus.yaml")


def test_every_alert_fires_when_it_should_and_not_when_it_should_not() -> None:
    assert "SUCCESS" in promtool("test", "rules", "alerts_test.yaml")


@dataclass
class Prometheus:
    port: int

    def get(self, path: str, **query: str) -> Any:
        address = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(address, timeout=10) as page:
            answer = json.load(page)
        assert answer["status"] == "success", answer
        return answer["data"]

    def value(self, query: str) -> float | None:
        """Of the only series that a query gives; None: it gives none."""
        found = self.get("query", query=query)["result"]
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None


def bad(prometheus: Prometheus) -> list[str]:
    """Alerts that fire, or that may yet and are not a busy machine's."""
    return [
        one["labels"]["alertname"]
        for one in prometheus.get("alerts")["alerts"]
        if one["state"] == "firing" or one["labels"]["alertname"] not in BY_THE_CLOCK
    ]


@contextmanager
def scraping(server: Server, folder: Path) -> Iterator[Prometheus]:
    """A real one, by our own configuration, but for the port and the pace."""
    settings = yaml.safe_load((RULES / "prometheus.yaml").read_text())
    settings["global"] = dict.fromkeys(("scrape_interval", "evaluation_interval"), f"{SCRAPE_S}s")
    settings["rule_files"] = [str(RULES / "alerts.yaml")]
    (job,) = settings["scrape_configs"]
    match = re.search(r"\bhttp=(\S+)", server.ready)
    assert match is not None
    job["static_configs"][0]["targets"] = [match[1]]
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(settings))
    port = free_port()
    words = [
        program("prometheus"),
        f"--config.file={folder / 'prometheus.yaml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
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
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def test_a_real_prometheus_scrapes_a_real_run_and_every_rule_and_panel_evaluates(
    server: Server, tmp_path: Path
) -> None:
    with scraping(server, tmp_path) as prometheus:
        before = prometheus.value("preamble_generated_tokens_total")
        end = time.monotonic() + 4 * SCRAPE_S
        while time.monotonic() < end:  # Rates need traffic at several scrapes.
            ask(server)
            time.sleep(SCRAPE_S / 4)

        def made() -> bool:
            seen = prometheus.value("preamble_generated_tokens_total")
            return seen == server.metric("preamble_generated_tokens_total")

        eventually(made)
        assert before is not None
        assert prometheus.value("preamble_generated_tokens_total") != before

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
        eventually(lambda: not bad(prometheus))

        board = json.loads((ROOT / "deploy/grafana/preamble.json").read_text())
        empty = []
        for panel in board["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"].replace("$instance", ".*").replace("$__rate_interval", "1m")
                if not prometheus.get("query", query=query)["result"]:
                    empty.append((panel["title"], target["expr"]))
        # What shows only trouble, or only what runs just now, is empty on a healthy idle server.
        quiet = {"Bad ends by reason", "Refused for load", "Since the last step"}
        assert {title for title, _ in empty} <= quiet, empty


def test_a_server_that_is_gone_is_seen(server: Server, tmp_path: Path) -> None:
    with scraping(server, tmp_path) as prometheus:
        assert server.stop() == 0

        def pending() -> bool:
            names = {one["labels"]["alertname"] for one in prometheus.get("alerts")["alerts"]}
            return "PreambleDown" in names and names <= BY_THE_CLOCK

        eventually(pending)
