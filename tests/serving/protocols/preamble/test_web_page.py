"""The web page, in a real browser: what it shows, which calls it makes, and its security policy.

Its answers are compared with those of a gRPC client; the model computes in fp64, where tokens do
not depend on the batch. Names and texts of a second server are HTML, which must stay text.
"""

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tokenizers
import yaml

from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import PromptTemplate
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import open_tokenizer
from serving.admission.auth import Authenticator
from serving.frontend.call import Frontend
from serving.protocols.preamble import web_page
from serving.service.metrics import Metrics
from tests.support.chromium import Browser, Tab, browsing, program
from tests.support.models import lively
from tests.support.servers import (
    CONFIG,
    Server,
    eventually,
    serving,
    suspended,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own, and a browser.

TEXT = "twelve and thirty? answer:"
OTHER_ADAPTERS = 120  # More adapters than two pages of the list.
TOKEN = "a-token-for-the-page-0123456789"
SUBJECT = "<img src=x onerror=window.hit=1>"
RESTART_S = 60.0
# An answer of this length takes minutes, so that a slow browser can still stop it.
LONG_ANSWER_TOKENS = 200_000
RUNNING = "preamble_scheduler_running_requests"


@dataclass(frozen=True)
class PageServer:
    server: Server
    browser: Browser

    @property
    def address(self) -> str:
        return f"http://{self.server.http_address}/"

    def ready(self) -> Tab:
        tab = self.browser.open(self.address)
        tab.read("#state", "Ready")
        return tab


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    program()
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def deployment(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("page")
    checkpoint = write_checkpoint(folder)
    adapters = folder / "adapters"
    adapters.mkdir()
    encode = open_tokenizer(checkpoint / "tokenizer").encode
    write_adapter(adapters / "sum.safetensors", checkpoint, encode("what is the sum of"))
    template = PromptTemplate("{numbers}<|VIRTUAL_PROMPT_0|> answer:", (3,))
    rows = encode("the quick brown")[:3]
    write_adapter(adapters / "fox.safetensors", checkpoint, rows, template=template)
    for number in range(OTHER_ADAPTERS):
        shutil.copy(adapters / "sum.safetensors", adapters / f"other-{number:03}.safetensors")
    with serving(checkpoint, folder / "s.yaml", adapters=str(adapters)) as server:
        yield PageServer(server, browser)


@pytest.fixture(scope="module")
def html_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with tokens, whose model has an HTML name and generates only HTML."""
    folder = tmp_path_factory.mktemp("hostile")
    vocabulary = {f'<img src=x onerror="window.hit={token}">': token for token in range(640)}
    library = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(vocabulary, unk_token=next(iter(vocabulary)))
    )
    library.save(str(folder / "tokenizer.json"))
    checkpoint = folder / SUBJECT
    adapters = folder / "adapters"
    config = replace(CONFIG, max_position_embeddings=2 * LONG_ANSWER_TOKENS)
    write_native(lively(config), checkpoint, tokenizer=folder / "tokenizer.json")
    adapters.mkdir()
    rows = open_checkpoint(checkpoint).read("embedding.word_embeddings.weight")[:2]
    card = Card("bold", task="<script>window.hit = 2</script>", method="instruction")
    save_adapter(build_adapter(card, rows), adapters / "bold.safetensors")
    tokens = folder / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"crew": {"token": TOKEN}}))
    tokens.chmod(0o600)
    limits: dict[str, Any] = {"adapters": str(adapters), "tokens": str(tokens)}
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield PageServer(server, browser)


def choose_adapter(tab: Tab, name: str) -> None:
    tab.fill("#adapter", name)
    tab.read("#choices li", f"^{name}")
    tab.press("Enter")
    assert tab.value("document.querySelector('#adapter').value") == name


def submit_prompt(tab: Tab, prompt: str, tokens: int) -> str:
    """The answer that is shown in the end."""
    tab.fill("#max-tokens", str(tokens))
    tab.fill("#field-0", prompt)
    tab.press("Enter", control=True)
    tab.wait(
        "document.querySelector('#end').textContent && !document.querySelector('#run').disabled"
    )
    return str(tab.value("document.querySelector('#answer').textContent"))


# ------------------------------------------------------------------------------------- status


def test_page_shows_the_model_and_its_load(deployment: PageServer) -> None:
    tab = deployment.ready()
    assert tab.text("h1") == "checkpoint"
    status_text = tab.read("aside", "Preamble")
    for expected in (
        "2 layers, hidden size 32",
        "4,096 tokens",
        "float64",
        "one",
        str(OTHER_ADAPTERS + 2),
        "Limited first by",
    ):
        assert expected in status_text, expected
    with deployment.server.client() as client:
        # The page polls every two seconds.
        client.generate(TEXT, Options(max_new_tokens=200, ignore_ends=True))
    tab.wait("/[1-9].* at most/.test(document.querySelector('#chart').getAttribute('aria-label'))")
    assert tab.value("document.querySelectorAll('#chart polyline').length") == 1


def test_page_makes_no_foreign_requests_and_violates_no_policy(deployment: PageServer) -> None:
    tab = deployment.ready()
    choose_adapter(tab, "sum")
    assert submit_prompt(tab, TEXT, 4)
    assert tab.complaints == []
    assert len(tab.requested) > 5
    assert all(address.startswith(deployment.address) for address in tab.requested), tab.requested


def test_page_has_a_strict_policy_and_is_cached(deployment: PageServer) -> None:
    with urllib.request.urlopen(deployment.address) as first_response:
        headers = first_response.headers
        body = first_response.read().decode()
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "checkpoint" not in body  # The page itself contains nothing about this server.
    conditional = urllib.request.Request(
        deployment.address, headers={"If-None-Match": headers["etag"]}
    )
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(conditional)
    for file in web_page.FOLDER.iterdir():
        assert (
            "//" not in file.read_text().replace("http://www.w3.org/", "") or file.suffix == ".js"
        )


def test_disabling_the_page_keeps_the_calls() -> None:
    front = Frontend(Metrics(), Authenticator())
    assert set(web_page.routes(front, page=False)) == set(web_page.READ_ROUTES)
    assert set(web_page.routes(front, page=True)) == {*web_page.READ_ROUTES, *web_page.FILES}


def test_page_calls_report_invalid_parameters(deployment: PageServer) -> None:
    def get(path: str) -> tuple[int, Any]:
        status, body = deployment.server.get(path)
        return status, json.loads(body)

    status, body = get("/v1/adapters?contains=SU&page_size=1")
    assert (status, body["adapters"][0]["name"], body["next_page_token"]) == (200, "sum", "")
    status, body = get("/v1/adapters?page_size=many")
    assert (status, body["error"]["param"]) == (400, "page_size")
    assert body["error"]["message"] == "page_size is 'many'; it must be a whole number, 0 or more"
    status, body = get("/v1/load?fast=1")
    assert (status, body["error"]["param"]) == (400, "fast")
    assert get("/elsewhere")[0] == 404  # And not the page.


# ----------------------------------------------------------------------------------------- prompts


def test_adapter_answers_equal_those_of_grpc(deployment: PageServer) -> None:
    tab = deployment.ready()
    choose_adapter(tab, "sum")
    answer = submit_prompt(tab, TEXT, 12)
    with deployment.server.client() as client:
        options = Options(max_new_tokens=12, adapter="sum")
        assert answer == client.generate(TEXT, options).text != ""
        assert answer != client.generate(TEXT, Options(max_new_tokens=12)).text
    assert tab.text("#made") == "12" and tab.text("#end") == "at max tokens"
    assert tab.text("#first-token").endswith("s")


def test_page_has_an_input_for_each_template_field(deployment: PageServer) -> None:
    tab = deployment.ready()
    choose_adapter(tab, "fox")
    assert tab.text("#fields") == "numbers"
    answer = submit_prompt(tab, "one and two", 8)
    with deployment.server.client() as client:
        options = Options(max_new_tokens=8, adapter="fox")
        assert answer == client.generate({"numbers": "one and two"}, options).text != ""


def test_adapters_are_paginated_and_searchable(deployment: PageServer) -> None:
    tab = deployment.ready()
    tab.click("#adapter")
    choices_text = tab.read("#choices", "More")
    assert "None" in choices_text and "other-000" in choices_text and "sum" not in choices_text
    tab.press("ArrowUp")  # From the first choice to the last one, which loads more.
    tab.press("Enter")
    tab.wait("document.querySelectorAll('#choices li').length > 100")
    tab.type("R-07")
    tab.wait("document.querySelectorAll('#choices li').length === 10")
    tab.type("nothing")
    tab.read("#choices", "No adapter's name contains this text")
    tab.press("Escape")
    assert tab.value("document.querySelector('#adapter').value") == ""
    assert tab.value("document.querySelector('#choices').hidden")


def test_error_messages_of_the_server_are_shown(deployment: PageServer) -> None:
    tab = deployment.ready()
    submit_prompt(tab, TEXT, 100_000)
    assert tab.text("#end") == "refused"
    assert "4096" in tab.read("#failure", "tokens")


# --------------------------------------------------------------------------------------- the server


def test_page_reconnects_after_an_outage(deployment: PageServer) -> None:
    tab = deployment.ready()
    offline = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    tab.send("Network.emulateNetworkConditions", offline=True, **offline)
    tab.read("#state", "Not reachable")
    tab.read("#notice", "No answer")
    tab.send("Network.emulateNetworkConditions", offline=False, **offline)
    tab.read("#state", "Ready")
    (rank,) = deployment.server.ranks
    os.kill(rank, signal.SIGKILL)
    eventually(lambda: bool(set(deployment.server.ranks) - {rank}))
    (remaining_rank,) = set(deployment.server.ranks) - {rank}
    with suspended(remaining_rank):  # It is not back before the page has polled.
        tab.read("#state", "Not ready")
    tab.read("#state", "^Ready", RESTART_S)
    assert not tab.text("#notice")


def test_tokens_are_kept_per_tab(html_server: PageServer) -> None:
    tab = html_server.browser.open(html_server.address)
    tab.read("#state", "Token needed")
    assert "Bearer TOKEN" in tab.text("#notice")
    assert SUBJECT not in tab.text()
    tab.fill("#token", "not-the-token-0123456789")
    tab.press("Enter")
    tab.read("#notice", "not valid on this server")
    tab.fill("#token", TOKEN)
    tab.press("Enter")
    tab.read("#state", "Ready")
    assert tab.value("sessionStorage.length") == 1 and tab.value("localStorage.length") == 0
    assert TOKEN not in tab.value("document.documentElement.outerHTML")
    assert not any(TOKEN in address for address in tab.requested)
    other_tab = html_server.browser.open(html_server.address)
    other_tab.read("#state", "Token needed")
    tab.click("#forget")
    tab.read("#state", "Token needed")
    assert tab.value("sessionStorage.length") == 0


def sign_in(html_server: PageServer) -> Tab:
    tab = html_server.browser.open(html_server.address)
    tab.read("#state", "Token needed")
    tab.fill("#token", TOKEN)
    tab.press("Enter")
    tab.read("#state", "Ready")
    return tab


def test_html_is_shown_as_text(html_server: PageServer) -> None:
    tab = sign_in(html_server)
    assert tab.text("h1") == SUBJECT
    assert SUBJECT in tab.value("document.title")
    choose_adapter(tab, "bold")
    assert "<script>" in tab.text("#adapter-about")
    answer = submit_prompt(tab, SUBJECT, 6)
    assert answer.count("<img src=x onerror=") == 6
    assert tab.value("window.hit") is None
    assert tab.value("document.querySelectorAll('main img, main script').length") == 0
    assert not [complaint for complaint in tab.complaints if "401" not in complaint]


def test_stopping_an_answer_cancels_its_request(html_server: PageServer) -> None:
    tab = sign_in(html_server)
    tab.fill("#max-tokens", str(LONG_ANSWER_TOKENS))
    tab.fill("#field-0", "go on")
    tab.click("#run")
    tab.read("#made", "[0-9]")
    tab.click("#stop")
    tab.read("#end", "stopped")
    assert 0 < int(tab.text("#made").replace(",", "")) < LONG_ANSWER_TOKENS
    eventually(lambda: html_server.server.metric(RUNNING) == 0)
    assert tab.value("document.querySelector('#run').disabled") is False
