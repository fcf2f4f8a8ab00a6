"""The web page, in a real browser: what it shows, which calls it makes, and its security policy.

Its answers are compared with those of a gRPC client, and its chats with those of the HTTP API; the
models compute in fp64, where tokens do not depend on the batch. Names and texts of one server are
HTML, which must stay text.
"""

import json
import os
import shlex
import shutil
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
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
from tests.support.tcp_relay import TcpRelay

pytestmark = pytest.mark.slow  # Servers of its own, and a browser.

TEXT = "twelve and thirty? answer:"
OTHER_ADAPTERS = 120  # More adapters than two pages of the list.
TOKEN = "a-token-for-the-page-0123456789"
SUBJECT = "<img src=x onerror=window.hit=1>"
RESTART_S = 60.0
# Each turn is one line, so a conversation is its lines.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)
CHAT = "/v1/chat/completions"
LAST = ".exchange:last-child"
NO_ADAPTER = "This server has no adapter"
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


def write_adapters(folder: Path, checkpoint: Path, template: str) -> Path:
    """Write the adapter `sum`, and `fox` with a prompt template; return their directory."""
    adapters = folder / "adapters"
    adapters.mkdir()
    encode = open_tokenizer(checkpoint / "tokenizer").encode
    write_adapter(adapters / "sum.safetensors", checkpoint, encode("what is the sum of"))
    prompt_template = PromptTemplate(template, (3,))
    rows = encode("the quick brown")[:3]
    write_adapter(adapters / "fox.safetensors", checkpoint, rows, template=prompt_template)
    return adapters


@pytest.fixture(scope="module")
def deployment(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    folder = tmp_path_factory.mktemp("page")
    checkpoint = write_checkpoint(folder)
    adapters = write_adapters(folder, checkpoint, "{numbers}<|VIRTUAL_PROMPT_0|> answer:")
    for number in range(OTHER_ADAPTERS):
        shutil.copy(adapters / "sum.safetensors", adapters / f"other-{number:03}.safetensors")
    with serving(checkpoint, folder / "s.yaml", adapters=str(adapters)) as server:
        yield PageServer(server, browser)


@pytest.fixture(scope="module")
def chat_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server whose model has a chat template; `fox` has a prompt template, `sum` has none."""
    folder = tmp_path_factory.mktemp("chats")
    checkpoint = write_checkpoint(folder)
    adapters = write_adapters(folder, checkpoint, "{first}<|VIRTUAL_PROMPT_0|> and {second}")
    settings: dict[str, Any] = {"adapters": str(adapters), "served_model_name": ["small-chat"]}
    settings["chat_template"] = str(folder / "chat_template.jinja")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with serving(checkpoint, folder / "s.yaml", **settings) as server:
        yield PageServer(server, browser)


@pytest.fixture(scope="module")
def html_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageServer]:
    """A server with tokens, whose model chats, has an HTML name and generates only HTML."""
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
    limits["chat_template"] = str(folder / "chat_template.jinja")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    with serving(checkpoint, folder / "s.yaml", **limits) as server:
        yield PageServer(server, browser)


def choose_adapter(tab: Tab, name: str) -> None:
    tab.fill("#adapter", name)
    tab.read("#choices li", f"^{name}")
    tab.press("Enter")
    assert tab.value("document.querySelector('#adapter').value") == name


def submit_prompt(tab: Tab, prompt: str, tokens: int | None = None) -> str:
    """Send a prompt, and return the answer that is shown in the end."""
    if tokens is not None:
        tab.fill("#max-tokens", str(tokens))
    tab.fill("#field-0", prompt)
    tab.press("Enter")
    return wait_for_answer(tab)


def wait_for_answer(tab: Tab) -> str:
    tab.wait(
        f"document.querySelector('{LAST}[aria-busy=false]')"
        " && !document.querySelector('#run').hidden"
    )
    return str(tab.value(f"document.querySelector('{LAST} .answer').textContent"))


def paths_posted(tab: Tab, start: int = 0) -> list[str]:
    """The completion requests of a tab, as the paths of their addresses."""
    paths = ["/" + address.split("/", 3)[3] for address in tab.requested[start:]]
    return [path for path in paths if path.endswith("completions")]


# ------------------------------------------------------------------------------------- status


def test_page_shows_the_model_and_its_load(deployment: PageServer) -> None:
    tab = deployment.ready()
    models = json.loads(deployment.server.get("/v1/models")[1])["data"]
    assert tab.text("h1") == models[0]["id"] == "checkpoint"
    assert tab.text("#summary").endswith(" parameters · float64")
    assert "server, last 2 s" in tab.text("#load-title")
    assert "hidden size" not in tab.text("aside")
    tab.click("#details summary")
    status_text = tab.read("aside", "Preamble")
    for expected in (
        "4,096 tokens",
        str(OTHER_ADAPTERS + 2),
        "2 layers, hidden size 32",
        "Limited by",
    ):
        assert expected in status_text, expected
    for absent in ("Ranks", "kv_tokens_max", "running_requests_max"):
        assert absent not in status_text, absent
    with deployment.server.client() as client:
        # The page polls every two seconds.
        client.generate(TEXT, Options(max_new_tokens=200, ignore_ends=True))
    tab.wait("/[1-9].* at most/.test(document.querySelector('#chart').getAttribute('aria-label'))")
    assert tab.value("document.querySelectorAll('#chart polyline').length") == 1
    assert tab.text("#peak").startswith("peak ")


@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_fits_its_window(deployment: PageServer, width: int) -> None:
    tab = deployment.ready()
    tab.resize(width)
    choose_adapter(tab, "sum")
    submit_prompt(tab, TEXT * 9, 40)
    for part in ("#more", "#equivalent", "#details"):
        tab.click(f"{part} > summary")
    assert tab.value("document.documentElement.scrollWidth") <= width
    rows = tab.value(
        "[...document.querySelectorAll('.figures > div')].map((each) => each.offsetTop)"
    )
    columns = 2 if width == 360 else 4
    assert [rows.count(row) for row in sorted(set(rows))] == [columns] * (4 // columns)


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
    assert tab.text(f"{LAST} .count") == "12 tokens"
    assert tab.text(f"{LAST} .end") == "at the length limit"
    assert tab.text(f"{LAST} .first").endswith("s")
    assert tab.text(f"{LAST} .who") == "sum"
    assert tab.value("document.querySelector('#field-0').value") == TEXT


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


def test_an_unknown_adapter_is_an_error_and_never_the_base(deployment: PageServer) -> None:
    tab = deployment.ready()
    start = len(tab.requested)
    tab.fill("#adapter", "zzz")
    tab.press("Tab")
    tab.fill("#field-0", TEXT)
    assert "“zzz”" in tab.read("#adapter-error", NO_ADAPTER)
    senders: list[Callable[[], None]] = [lambda: tab.press("Enter"), lambda: tab.click("#run")]
    for send in senders:
        tab.click("#field-0")
        send()
        tab.wait("document.activeElement.id === 'adapter'")
    tab.press("Enter")  # In the input itself.
    tab.fill("#adapter", "su")  # Faster than the list, in which "None" is highlighted.
    tab.press("Enter")
    tab.wait(
        "document.querySelector('#adapter').value !== 'su'"
        " || !document.querySelector('#adapter-error').hidden"
    )
    tab.fill("#adapter", "zzz")
    tab.press("Enter")
    assert "“zzz”" in tab.read("#adapter-error", NO_ADAPTER)
    assert tab.value("document.querySelector('#adapter').value") == "zzz"
    assert tab.value("document.querySelector('#adapter').getAttribute('aria-invalid')") == "true"
    assert paths_posted(tab, start) == []
    assert tab.value("document.querySelectorAll('.exchange').length") == 0

    tab.fill("#adapter", "fox@1")  # A name that is typed, but not chosen from the list.
    tab.press("Tab")
    tab.read("#fields", "numbers")
    assert tab.text("#adapter-error") == ""
    tab.fill("#adapter", "")
    tab.press("Tab")
    tab.read("#fields", "Prompt")
    assert submit_prompt(tab, TEXT, 4)
    assert tab.text(f"{LAST} .who") == "checkpoint"


def test_a_list_of_an_earlier_text_selects_nothing(deployment: PageServer) -> None:
    """Enter chose "None", the base model, of a list that arrived after the text was changed."""
    tab = deployment.ready()
    tab.value("""(() => {
        const fetchNow = window.fetch;
        window.fetch = async (...call) => {
            const response = await fetchNow(...call);
            await new Promise((arrive) => { window.arrive = arrive; });
            window.fetch = fetchNow;
            return response;
        };
    })()""")
    tab.click("#adapter")
    tab.wait("Boolean(window.arrive)")
    tab.value("""(async () => {
        const input = document.querySelector("#adapter");
        input.value = "zzz";
        input.dispatchEvent(new Event("input"));
        window.arrive();
        await new Promise((done) => setTimeout(done, 20));  // The search for "zzz" starts later.
    })()""")
    tab.press("Enter")
    assert "“zzz”" in tab.read("#adapter-error", NO_ADAPTER)
    assert tab.value("document.querySelector('#adapter').value") == "zzz"


def test_error_messages_of_the_server_are_shown(deployment: PageServer) -> None:
    tab = deployment.ready()
    submit_prompt(tab, TEXT, 100_000)
    assert tab.text(f"{LAST} .end") == "refused"
    assert "4096" in tab.read(f"{LAST} .failure", "tokens")


# ------------------------------------------------------------------------------------------- chats


def chat(server: PageServer, messages: list[Any], **fields: Any) -> str:
    """The answer of the HTTP API."""
    body = {"messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    status, text = server.server.request(CHAT, body)
    assert status == 200, text
    return str(json.loads(text)["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_a_conversation_contains_its_earlier_messages(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    models = json.loads(chat_server.server.get("/v1/models")[1])["data"]
    assert tab.text("h1") == models[0]["id"] == "small-chat"
    assert tab.text("#fields") == "Message"
    first = submit_prompt(tab, "one and two?", 12)
    assert first == chat(chat_server, [user("one and two?")]) != ""
    assert tab.value("document.activeElement.id") == "field-0"
    assert tab.value("document.querySelector('#field-0').value") == ""
    history = [user("one and two?"), assistant(first)]
    second = submit_prompt(tab, "and three?")
    assert second == chat(chat_server, [*history, user("and three?")])
    assert tab.text(f"{LAST} .question") == "and three?"
    assert tab.text(f"{LAST} .who") == "small-chat"

    choose_adapter(tab, "sum")  # An adapter without a template continues the conversation.
    history += [user("and three?"), assistant(second)]
    third = submit_prompt(tab, "and four?")
    assert third == chat(chat_server, [*history, user("and four?")], model="sum")
    assert tab.text(f"{LAST} .who") == "sum"
    assert tab.value("document.querySelectorAll('.exchange').length") == 3

    tab.click("#new")
    assert tab.value("document.querySelectorAll('.exchange').length") == 0
    tab.fill("#adapter", "")
    tab.press("Tab")
    assert submit_prompt(tab, "one and two?") == first
    assert paths_posted(tab) == [CHAT] * 4
    assert tab.complaints == []


def test_an_adapter_with_a_template_completes_its_fields(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    answer = submit_prompt(tab, "one and two?", 8)
    choose_adapter(tab, "fox")
    assert tab.text("#fields").split() == ["first", "second"]
    tab.fill("#field-1", "two")
    completion = submit_prompt(tab, "one")
    with chat_server.server.client() as client:
        options = Options(max_new_tokens=8, adapter="fox")
        inputs = {"first": "one", "second": "two"}
        assert completion == client.generate(inputs, options).text != ""
    assert tab.text(f"{LAST} .question") == "first: one\nsecond: two"
    choose_adapter(tab, "sum")
    messages = [user("one and two?"), assistant(answer), user("go on")]
    expected = chat(chat_server, messages, model="sum", max_tokens=8)
    assert submit_prompt(tab, "go on") == expected


def test_enter_sends_and_shift_enter_adds_a_line(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    tab.fill("#max-tokens", "12")
    tab.fill("#field-0", "one")
    tab.press("Shift+Enter")
    tab.type("two")
    assert tab.value("document.querySelector('#field-0').value") == "one\ntwo"
    tab.press("Enter")
    assert wait_for_answer(tab) == chat(chat_server, [user("one\ntwo")])
    tab.fill("#field-0", "  ")
    tab.press("Enter")  # There is nothing to send.
    tab.fill("#field-0", "one")
    tab.press("Enter", control=True)
    wait_for_answer(tab)
    assert paths_posted(tab) == [CHAT] * 2


def test_more_fields_are_sent(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    assert not tab.value("document.querySelector('#top-p').checkVisibility()")
    tab.click("#more summary")
    tab.fill("#temperature", "0.8")
    tab.fill("#top-p", "0.9")
    tab.fill("#seed", "7")
    tab.fill("#system", "be of use")
    fields: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 7}
    messages = [{"role": "system", "content": "be of use"}, user("one?")]
    expected = chat(chat_server, messages, **fields)
    assert submit_prompt(tab, "one?", 12) == expected
    assert expected != chat(chat_server, messages, **{**fields, "seed": 8})
    tab.click("#new")
    stop = expected[4:6]
    tab.fill("#stop-texts", "\\n\\n\n" + stop.replace("\\", r"\\").replace("\n", r"\n"))
    fields["stop"] = ["\n\n", stop]
    assert submit_prompt(tab, "one?") == chat(chat_server, messages, **fields) != expected
    assert tab.text(f"{LAST} .end") == "complete"
    tab.fill("#seed", "-1")
    tab.click("#more summary")
    start = len(tab.requested)
    tab.fill("#field-0", "one?")
    tab.press("Enter")  # The browser shows its message beside the input.
    tab.wait("document.activeElement.id === 'seed'")
    assert paths_posted(tab, start) == []


def test_answer_and_command_can_be_copied(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    tab.fill("#field-0", "one")
    tab.press("Shift+Enter")
    tab.type("it's <b>two</b>")
    tab.fill("#max-tokens", "12")
    tab.click("#equivalent summary")
    tab.read("#command", "curl")
    tab.click("#equivalent .copy")
    tab.read("#announcement", "Copied")
    command = tab.value("navigator.clipboard.readText()")
    assert command == tab.text("#command")
    tab.click("#run")
    answer = wait_for_answer(tab)
    tab.click(f"{LAST} .copy")
    tab.read(f"{LAST} .copy", "Copied")
    assert tab.value("navigator.clipboard.readText()") == answer

    curl, address, *options = shlex.split(command.replace("\\\n", ""))
    values = dict(zip(options[::2], options[1::2], strict=True))
    assert (curl, address) == ("curl", f"{chat_server.address}v1/chat/completions")
    assert values["-H"] == "content-type: application/json"
    body = json.loads(values["-d"])
    assert body["model"] == "small-chat"
    assert chat(chat_server, **body) == answer


def test_copying_works_without_the_clipboard_object(chat_server: PageServer) -> None:
    """Browsers have no clipboard object in a page of another host without TLS."""
    tab = chat_server.ready()
    tab.value("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    answer = submit_prompt(tab, "one", 12)
    tab.click(f"{LAST} .copy")
    tab.read("#announcement", "^Copied")
    tab.click("#field-0")
    tab.press("v", control=True)
    # A textarea has no carriage returns.
    assert tab.value("document.querySelector('#field-0').value") == answer.replace("\r", "\n")


def test_a_broken_stream_keeps_the_answer_and_the_conversation(chat_server: PageServer) -> None:
    with TcpRelay(chat_server.server.http_address) as relay:
        tab = chat_server.browser.open(f"http://{relay.address}/")
        tab.read("#state", "Ready")
        tab.fill("#max-tokens", "3000")
        tab.fill("#field-0", "go on")
        tab.press("Enter")
        tab.read(f"{LAST} .count", "[0-9]")
        relay.cut()
        assert "connection" in tab.read(f"{LAST} .failure", "was lost")
        partial = wait_for_answer(tab)
        assert tab.text(f"{LAST} .end") == "interrupted" and partial
        messages = [user("go on"), assistant(partial), user("and now?")]
        expected = chat(chat_server, messages)
        assert submit_prompt(tab, "and now?", 12) == expected


def rank_processes(server: Server) -> list[int]:
    """The ranks among the server's processes, which include the one of the chat template."""
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.ranks}
    return [pid for pid, name in names.items() if b"template_sandbox" not in name]


def test_an_error_of_the_ranks_ends_an_answer(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    tab.fill("#max-tokens", "3000")
    tab.fill("#field-0", "go on")
    tab.press("Enter")
    tab.read(f"{LAST} .count", "[0-9]")
    (rank,) = rank_processes(chat_server.server)
    os.kill(rank, signal.SIGKILL)
    tab.read(f"{LAST} .failure", "[a-z]")
    assert wait_for_answer(tab) and tab.text(f"{LAST} .end") == "interrupted"
    tab.read("#state", "^Ready", RESTART_S)


def test_a_refused_message_can_be_corrected(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    answer = submit_prompt(tab, "one?", 12)
    submit_prompt(tab, "two?", 100_000)
    assert tab.text(f"{LAST} .end") == "refused"
    assert tab.value("document.querySelector('#field-0').value") == "two?"
    expected = chat(chat_server, [user("one?"), assistant(answer), user("two?")])
    tab.fill("#max-tokens", "12")
    tab.click("#field-0")
    tab.press("Enter")
    assert wait_for_answer(tab) == expected
    assert tab.value("document.querySelectorAll('.exchange').length") == 2


def test_every_input_has_a_label(chat_server: PageServer) -> None:
    tab = chat_server.ready()
    submit_prompt(tab, "one?", 4)
    unlabelled = tab.value(
        "[...document.querySelectorAll('input, textarea')]"
        ".filter((each) => !each.labels.length).map((each) => each.id)"
    )
    unnamed = tab.value(
        "[...document.querySelectorAll('button')].filter((each) => !each.textContent.trim()).length"
    )
    assert (unlabelled, unnamed) == ([], 0)


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


# Replaces `fetch` by one whose answers come late, and counts the polls that are in progress.
SLOW_POLLS = """(() => {
    const fetchNow = window.fetch;
    let open = 0;
    Object.assign(window, { openMax: 0, pollsEnded: 0 });
    window.fetch = async (path, ...options) => {
        if (!/^v1\\/(load|server)$/.test(path)) return fetchNow(path, ...options);
        window.openMax = Math.max(window.openMax, ++open);
        await new Promise((resolve) => setTimeout(resolve, 200));
        try { return await fetchNow(path, ...options); }
        finally { open -= 1; window.pollsEnded += 1; }
    };
    for (let i = 0; i < 5; i++) document.dispatchEvent(new Event("visibilitychange"));
})()"""


def test_polls_of_a_slow_server_do_not_overlap(deployment: PageServer) -> None:
    tab = deployment.ready()
    tab.value(SLOW_POLLS)
    tab.wait("window.pollsEnded >= 3")
    assert tab.value("window.openMax") == 1


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
    assert tab.text(f"{LAST} .question") == SUBJECT
    assert paths_posted(tab) == [CHAT]
    assert tab.value("window.hit") is None
    assert tab.value("document.querySelectorAll('main img, main script').length") == 0
    assert not [complaint for complaint in tab.complaints if "401" not in complaint]


def test_stopping_an_answer_cancels_its_request(html_server: PageServer) -> None:
    tab = sign_in(html_server)
    stops: list[Callable[[], None]] = [lambda: tab.click("#stop"), lambda: tab.press("Escape")]
    for stop in stops:
        start_long_answer(tab)
        stop()
        tab.read(f"{LAST} .end", "stopped")
        count = tab.text(f"{LAST} .count").split()[0].replace(",", "")
        assert 0 < int(count) < LONG_ANSWER_TOKENS
        eventually(lambda: html_server.server.metric(RUNNING) == 0)
        tab.wait("!document.querySelector('#run').hidden")
    # The part of an answer that was stopped belongs to the conversation.
    tab.click("#equivalent summary")
    assert tab.read("#command", "curl").count('"role":"assistant"') == 2


def start_long_answer(tab: Tab) -> None:
    tab.fill("#max-tokens", str(LONG_ANSWER_TOKENS))
    tab.fill("#field-0", "go on")
    tab.click("#run")
    tab.read(f"{LAST} .count", "[0-9]")
