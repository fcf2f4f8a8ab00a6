"""The built-in page, in a real browser: what it shows, what it asks, and what it never does.

Its answers are held against those that a client gets over gRPC; the model computes in fp64, where
tokens are the same. Names and texts of a second server are HTML, which must stay text.
"""

import json
import os
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import tokenizers
import yaml

from checkpoints_tools.conversion.convert import write_native
from clients.client import Options
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import Template
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import open_tokenizer
from serving.admission.auth import Access
from serving.frontend.call import Front
from serving.protocols.preamble import web_page
from serving.service.metrics import Metrics
from tests.support.chromium import Browser, Tab, browsing, program
from tests.support.models import lively
from tests.support.servers import (
    CONFIG,
    Server,
    eventually,
    serving,
    stopped,
    write_adapter,
    write_checkpoint,
)

pytestmark = pytest.mark.slow  # Servers of its own, and a browser.

TEXT = "twelve and thirty? answer:"
OTHERS = 120  # Adapters besides; more than two pages of the list.
TOKEN = "a-token-for-the-page-0123456789"
SUBJECT = "<img src=x onerror=window.hit=1>"
RESTART_S = 60.0
RUNNING = "preamble_scheduler_running_requests"


@dataclass(frozen=True)
class World:
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
def world(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("page")
    checkpoint, adapters = write_checkpoint(folder), folder / "adapters"
    adapters.mkdir()
    encode = open_tokenizer(checkpoint / "tokenizer").encode
    write_adapter(adapters / "sum.safetensors", checkpoint, encode("what is the sum of"))
    template = Template("{numbers}<|VIRTUAL_PROMPT_0|> answer:", (3,))
    rows = encode("the quick brown")[:3]
    write_adapter(adapters / "fox.safetensors", checkpoint, rows, template=template)
    for number in range(OTHERS):
        shutil.copy(adapters / "sum.safetensors", adapters / f"other-{number:03}.safetensors")
    with serving(checkpoint, folder / "s.yaml", adapters=str(adapters)) as server:
        yield World(server, browser)


@pytest.fixture(scope="module")
def hostile(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A server with tokens, whose model is called like HTML, and says nothing but HTML."""
    folder = tmp_path_factory.mktemp("hostile")
    words = {f'<img src=x onerror="window.hit={token}">': token for token in range(640)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=next(iter(words))))
    library.save(str(folder / "tokenizer.json"))
    checkpoint, adapters = folder / SUBJECT, folder / "adapters"
    write_native(lively(CONFIG), checkpoint, tokenizer=folder / "tokenizer.json")
    adapters.mkdir()
    rows = open_checkpoint(checkpoint).read("embedding.word_embeddings.weight")[:2]
    card = Card("bold", task="<script>window.hit = 2</script>", method="instruction")
    save_adapter(build_adapter(card, rows), adapters / "bold.safetensors")
    tokens = folder / "tokens.yaml"
    tokens.write_text(yaml.safe_dump({"crew": {"token": TOKEN}}))
    tokens.chmod(0o600)
    limits: dict[str, Any] = {"adapters": str(adapters), "tokens": str(tokens)}
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield World(server, browser)


def choose(tab: Tab, name: str) -> None:
    tab.fill("#adapter", name)
    tab.read("#choices li", f"^{name}")
    tab.press("Enter")
    assert tab.value("document.querySelector('#adapter').value") == name


def answered(tab: Tab, prompt: str, tokens: int) -> str:
    """The answer that is shown in the end."""
    tab.fill("#max-tokens", str(tokens))
    tab.fill("#field-0", prompt)
    tab.press("Enter", control=True)
    tab.wait(
        "document.querySelector('#end').textContent && !document.querySelector('#run').disabled"
    )
    return str(tab.value("document.querySelector('#answer').textContent"))


# ------------------------------------------------------------------------------------ what it shows


def test_it_says_what_is_loaded_and_how_busy_that_is(world: World) -> None:
    tab = world.ready()
    assert tab.text("h1") == "checkpoint"
    facts = tab.read("aside", "Preamble")
    for fact in (
        "2 layers, 32 wide",
        "4,096 tokens",
        "float64",
        "one",
        str(OTHERS + 2),
        "Binds first",
    ):
        assert fact in facts, fact
    with world.server.client() as client:
        # It is looked at every two seconds.
        client.generate(TEXT, Options(max_new_tokens=200, ignore_ends=True))
    tab.wait("/[1-9].* at most/.test(document.querySelector('#chart').getAttribute('aria-label'))")
    assert tab.value("document.querySelectorAll('#chart polyline').length") == 1


def test_it_asks_nothing_of_others_and_breaks_no_rule(world: World) -> None:
    tab = world.ready()
    choose(tab, "sum")
    assert answered(tab, TEXT, 4)
    assert tab.complaints == []
    assert len(tab.asked) > 5
    assert all(address.startswith(world.address) for address in tab.asked), tab.asked


def test_the_browser_is_told_strict_rules_and_asks_for_a_file_once(world: World) -> None:
    with urllib.request.urlopen(world.address) as first:
        headers, body = first.headers, first.read().decode()
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert "checkpoint" not in body  # It tells nothing of this server.
    again = urllib.request.Request(world.address, headers={"If-None-Match": headers["etag"]})
    with pytest.raises(urllib.error.HTTPError, match="304"):
        urllib.request.urlopen(again)
    for file in web_page.FOLDER.iterdir():
        assert (
            "//" not in file.read_text().replace("http://www.w3.org/", "") or file.suffix == ".js"
        )


def test_without_the_setting_there_is_no_page_and_the_calls_are_there() -> None:
    front = Front(Metrics(), Access())
    assert set(web_page.routes(front, page=False)) == set(web_page.LOOKS)
    assert set(web_page.routes(front, page=True)) == {*web_page.LOOKS, *web_page.FILES}


def test_the_calls_that_it_makes_say_what_is_wrong_with_them(world: World) -> None:
    def got(path: str) -> tuple[int, Any]:
        status, told = world.server.get(path)
        return status, json.loads(told)

    status, told = got("/v1/adapters?contains=SU&page_size=1")
    assert (status, told["adapters"][0]["name"], told["next_page_token"]) == (200, "sum", "")
    status, told = got("/v1/adapters?page_size=many")
    assert (status, told["error"]["param"]) == (400, "page_size")
    assert told["error"]["message"] == "page_size is 'many'; it must be a whole number, 0 or more"
    status, told = got("/v1/load?fast=1")
    assert (status, told["error"]["param"]) == (400, "fast")
    assert got("/elsewhere")[0] == 404  # And not the page.


# ----------------------------------------------------------------------------------------- prompts


def test_an_answer_with_an_adapter_is_the_one_that_other_clients_get(world: World) -> None:
    tab = world.ready()
    choose(tab, "sum")
    shown = answered(tab, TEXT, 12)
    with world.server.client() as client:
        options = Options(max_new_tokens=12, adapter="sum")
        assert shown == client.generate(TEXT, options).text != ""
        assert shown != client.generate(TEXT, Options(max_new_tokens=12)).text
    assert tab.text("#made") == "12" and tab.text("#end") == "at max tokens"
    assert tab.text("#first-token").endswith("s")


def test_an_adapters_template_has_a_place_for_each_of_its_fields(world: World) -> None:
    tab = world.ready()
    choose(tab, "fox")
    assert tab.text("#fields") == "numbers"
    shown = answered(tab, "one and two", 8)
    with world.server.client() as client:
        options = Options(max_new_tokens=8, adapter="fox")
        assert shown == client.generate({"numbers": "one and two"}, options).text != ""


def test_many_adapters_are_listed_in_pages_and_found_by_a_part_of_the_name(world: World) -> None:
    tab = world.ready()
    tab.click("#adapter")
    shown = tab.read("#choices", "More")
    assert "None" in shown and "other-000" in shown and "sum" not in shown
    tab.press("ArrowUp")  # From the first one to the last one, which asks for more.
    tab.press("Enter")
    tab.wait("document.querySelectorAll('#choices li').length > 100")
    tab.type("R-07")
    tab.wait("document.querySelectorAll('#choices li').length === 10")
    tab.type("nothing")
    tab.read("#choices", "No adapter has that in its name")
    tab.press("Escape")
    assert tab.value("document.querySelector('#adapter').value") == ""
    assert tab.value("document.querySelector('#choices').hidden")


def test_a_refusal_is_shown_in_the_servers_own_words(world: World) -> None:
    tab = world.ready()
    answered(tab, TEXT, 100_000)
    assert tab.text("#end") == "refused"
    assert "4096" in tab.read("#failure", "tokens")


# --------------------------------------------------------------------------------------- the server


def test_it_says_that_the_server_is_away_and_comes_back_by_itself(world: World) -> None:
    tab = world.ready()
    away = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    tab.send("Network.emulateNetworkConditions", offline=True, **away)
    tab.read("#state", "Not reachable")
    tab.read("#notice", "No answer")
    tab.send("Network.emulateNetworkConditions", offline=False, **away)
    tab.read("#state", "Ready")
    (rank,) = world.server.ranks
    os.kill(rank, signal.SIGKILL)
    eventually(lambda: bool(set(world.server.ranks) - {rank}))
    (heir,) = set(world.server.ranks) - {rank}
    with stopped(heir):  # It is not back before the page has looked.
        tab.read("#state", "Not ready")
    tab.read("#state", "^Ready", RESTART_S)
    assert not tab.text("#notice")


def test_a_token_is_asked_for_kept_in_the_tab_and_forgotten(hostile: World) -> None:
    tab = hostile.browser.open(hostile.address)
    tab.read("#state", "Token needed")
    assert "Bearer TOKEN" in tab.text("#notice")
    assert SUBJECT not in tab.text()
    tab.fill("#token", "not-the-token-0123456789")
    tab.press("Enter")
    tab.read("#notice", "no token of this server")
    tab.fill("#token", TOKEN)
    tab.press("Enter")
    tab.read("#state", "Ready")
    assert tab.value("sessionStorage.length") == 1 and tab.value("localStorage.length") == 0
    assert TOKEN not in tab.value("document.documentElement.outerHTML")
    assert not any(TOKEN in address for address in tab.asked)
    other = hostile.browser.open(hostile.address)
    other.read("#state", "Token needed")
    tab.click("#forget")
    tab.read("#state", "Token needed")
    assert tab.value("sessionStorage.length") == 0


def entered(hostile: World) -> Tab:
    tab = hostile.browser.open(hostile.address)
    tab.read("#state", "Token needed")
    tab.fill("#token", TOKEN)
    tab.press("Enter")
    tab.read("#state", "Ready")
    return tab


def test_html_in_names_and_answers_is_shown_as_text(hostile: World) -> None:
    tab = entered(hostile)
    assert tab.text("h1") == SUBJECT
    assert SUBJECT in tab.value("document.title")
    choose(tab, "bold")
    assert "<script>" in tab.text("#adapter-about")
    shown = answered(tab, SUBJECT, 6)
    assert shown.count("<img src=x onerror=") == 6
    assert tab.value("window.hit") is None
    assert tab.value("document.querySelectorAll('main img, main script').length") == 0
    assert not [said for said in tab.complaints if "401" not in said]


def test_an_answer_is_stopped_and_leaves_the_server(hostile: World) -> None:
    tab = entered(hostile)
    tab.fill("#max-tokens", "4000")
    tab.fill("#field-0", "go on")
    tab.click("#run")
    tab.read("#made", "[0-9]")
    tab.click("#stop")
    tab.read("#end", "stopped")
    assert 0 < int(tab.text("#made").replace(",", "")) < 4000
    eventually(lambda: hostile.server.metric(RUNNING) == 0)
    assert tab.value("document.querySelector('#run').disabled") is False
