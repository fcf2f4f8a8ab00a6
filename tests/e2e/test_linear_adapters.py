"""LoRA, activated LoRA, DoRA and IA3 on every wire of a real server.

The oracle is the plain generation loop with the adapter, on the same checkpoint in this process; in
fp64 its texts are equal.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import gpt
import preamble
from clients.adapter_client import AdapterCalls
from clients.client import CallError, Options
from gpt.adapters.adapter_file import Adapter, Card, build_adapter, open_adapter, save_adapter
from gpt.adapters.golden_examples import record_golden_examples
from gpt.adapters.prompt_template import PromptTemplate
from gpt.adapters.sequence_adapters import sequence_adapters
from gpt.checkpoint.digest import identify
from gpt.formats.registry import open_checkpoint
from gpt.generation.completions import complete_prompts
from gpt.linear_adapter import LinearAdapter
from gpt.tokenizers.tokenizer import open_tokenizer
from protos.preamble.v1 import admin_pb2, admin_pb2_grpc
from tests.support.linear_adapters import random_linears
from tests.support.nemo_linears import write_nemo_linears
from tests.support.peft_files import write_peft_lora
from tests.support.servers import CONFIG, Server, eventually, serving, write_checkpoint
from tests.support.tgis_calls import TgisServer
from tests.support.tokens_file import CREW, GUEST, tokens_file
from tests.support.tritonclient_calls import infer, text_of

pytestmark = pytest.mark.slow  # Servers of its own: too long for the fast suite.

TEXT = "the quick brown fox answer:"
LACKING = "the quick brown fox"  # Without the invocation.
NEW = 8
CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class Deployment:
    """A checkpoint with its oracle, an adapter directory, an import directory, and a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.checkpoint = write_checkpoint(folder)
        self.base = open_checkpoint(self.checkpoint)
        self.base_digest = identify(self.base).digest
        self.model = gpt.load(self.checkpoint, dtype="float64")
        self.tokenizer = open_tokenizer(self.checkpoint / "tokenizer")
        self.adapters, self.imports = folder / "adapters", folder / "imports"
        for directory in (self.adapters, self.imports):
            directory.mkdir()
        self.invocation = tuple(self.tokenizer.encode(TEXT)[-2:])
        rows = self.base.read("embedding.word_embeddings.weight")[[5, 6, 7]]
        for method in ("lora", "dora", "ia3"):
            linears = random_linears(CONFIG, method, seed=len(method), strength=0.5)
            self.save(Card(method), linears=linears)
        alora = random_linears(CONFIG, seed=9, strength=0.5)
        self.save(Card("alora", invocation=self.invocation), linears=alora)
        self.save(Card("both"), rows, random_linears(CONFIG, seed=11, strength=0.5))
        for seed, name in enumerate(("cached", "reloaded", "later")):
            write_peft_lora(self.imports / name, CONFIG, seed=seed)
        write_peft_lora(folder / "outside", CONFIG, seed=8)
        self.server: Server

    def build(
        self, card: Card, table: Any = None, linears: dict[str, LinearAdapter] | None = None
    ) -> Adapter:
        card = replace(card, base_digest=card.base_digest or self.base_digest)
        return build_adapter(replace(card, hidden_size=CONFIG.hidden_size), table, linears)

    def save(self, card: Card, table: Any = None, linears: Any = None) -> None:
        adapter = self.build(card, table, linears)
        save_adapter(adapter, self.adapters / f"{card.name}.safetensors")

    def expected(self, adapter: Adapter | None, text: str = TEXT, new: int = NEW) -> str:
        """The text of the plain generation loop."""
        prompt = self.tokenizer.encode(text)
        if adapter is not None:
            virtual = range(CONFIG.vocab_size, CONFIG.vocab_size + len(adapter.table))
            prompt = [*virtual, *prompt]
        adapters = sequence_adapters(adapter, self.model, [prompt]) if adapter else []
        table = adapter.table if adapter is not None and len(adapter.table) else None
        (completion,) = complete_prompts(
            self.model,
            self.tokenizer,
            [prompt],
            adapter_table=table,
            adapters=adapters,
            max_new_tokens=new,
        )
        return completion.text

    def expected_of_file(self, name: str) -> str:
        return self.expected(open_adapter(self.adapters / f"{name}.safetensors"))

    def expected_of_import(self, path: Path) -> str:
        return self.expected(open_adapter(path, base=self.base))

    def post(self, path: str, body: object, token: str | None = None) -> tuple[int, Any]:
        status, text = self.server.request(path, body, token=token)
        return status, json.loads(text) if text.startswith("{") else text

    def complete(self, model: str, text: str = TEXT) -> str:
        body = {"model": model, "prompt": text, "max_tokens": NEW, "temperature": 0}
        status, answer = self.post("/v1/completions", body)
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def models(self) -> dict[str, Any]:
        """The records of /v1/models by id."""
        records = json.loads(self.server.get("/v1/models")[1])["data"]
        return {record["id"]: record for record in records}

    def load(self, name: str, path: str, **fields: object) -> tuple[int, Any]:
        return self.post(LOAD, {"lora_name": name, "lora_path": path, **fields})


@contextmanager
def deployed(folder: Path, **settings: Any) -> Iterator[Deployment]:
    deployment = Deployment(folder)
    template = folder / "template.jinja"
    template.write_text(CHAT_TEMPLATE)
    with serving(
        deployment.checkpoint,
        adapters=str(deployment.adapters),
        adapter_imports=str(deployment.imports),
        adapters_poll_s=0.2,
        lora_modules=[f"start={folder / 'outside'}"],
        chat_template=str(template),
        **settings,
    ) as deployment.server:
        yield deployment


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(tmp_path_factory.mktemp("linears")) as deployment:
        yield deployment


# ------------------------------------------------------------------------------------------- wires


class RefusedCall(Exception):
    """A call that was refused, with the protocol's code or status."""

    def __init__(self, code: object, message: str) -> None:
        super().__init__(message)
        self.code = code


def _http(deployment: Deployment, path: str, body: object) -> Any:
    status, answer = deployment.post(path, body)
    if status != 200:
        raise RefusedCall(status, json.dumps(answer))
    return answer


def by_grpc(deployment: Deployment, adapter: str, text: str) -> str:
    try:
        with deployment.server.client() as client:
            options = Options(adapter=adapter, max_new_tokens=NEW)
            return client.generate(text, options).text
    except CallError as error:
        raise RefusedCall(error.code, str(error)) from None


def by_completions(deployment: Deployment, adapter: str, text: str) -> str:
    body = {"model": adapter, "prompt": text, "max_tokens": NEW, "temperature": 0}
    answer = _http(deployment, "/v1/completions", body)
    return str(answer["choices"][0]["text"])


def by_chat(deployment: Deployment, adapter: str, text: str) -> str:
    messages = [{"role": "user", "content": text}]
    body = {"model": adapter, "messages": messages, "max_tokens": NEW, "temperature": 0}
    answer = _http(deployment, "/v1/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def by_kserve_http(deployment: Deployment, adapter: str, text: str) -> str:
    body = {"text_input": text, "max_tokens": NEW, "exclude_input_in_output": True}
    return str(_http(deployment, f"/v2/models/{adapter}/generate", body)["text_output"])


def by_kserve_grpc(deployment: Deployment, adapter: str, text: str) -> str:
    try:
        with triton.InferenceServerClient(deployment.server.address) as client:
            return text_of(infer(client, adapter, text=text, max_tokens=NEW))
    except InferenceServerException as error:
        raise RefusedCall(error.status(), str(error.message())) from None


def by_kserve_input(deployment: Deployment, adapter: str, text: str) -> str:
    try:
        with triton.InferenceServerClient(deployment.server.address) as client:
            result = infer(client, "preamble", text=text, max_tokens=NEW, lora_name=adapter)
            return text_of(result)
    except InferenceServerException as error:
        raise RefusedCall(error.status(), str(error.message())) from None


def by_tgi(deployment: Deployment, adapter: str, text: str) -> str:
    body = {"inputs": text, "parameters": {"adapter_id": adapter, "max_new_tokens": NEW}}
    return str(_http(deployment, "/generate", body)["generated_text"])


def by_tgis(deployment: Deployment, adapter: str, text: str, field: str = "adapter_id") -> str:
    try:
        with grpc.insecure_channel(deployment.server.address) as channel:
            tgis = TgisServer(deployment.server, deployment.checkpoint, channel)
            call = tgis.ask(text, adapter={field: adapter}, stopping={"max_new_tokens": NEW})
            return str(call().responses[0].text)
    except grpc.RpcError as error:
        raise RefusedCall(error.code().name, str(error.details())) from None


def by_tgis_prefix_id(deployment: Deployment, adapter: str, text: str) -> str:
    return by_tgis(deployment, adapter, text, "prefix_id")


Wire = Callable[[Deployment, str, str], str]
# The wires, with the code of an invalid prompt and that of an unusable adapter.
WIRES: dict[Wire, tuple[object, object]] = {
    by_grpc: ("INVALID_ARGUMENT", "FAILED_PRECONDITION"),
    by_completions: (400, 409),
    by_chat: (400, 409),
    by_kserve_http: (400, 409),
    by_kserve_grpc: ("StatusCode.INVALID_ARGUMENT", "StatusCode.FAILED_PRECONDITION"),
    by_kserve_input: ("StatusCode.INVALID_ARGUMENT", "StatusCode.FAILED_PRECONDITION"),
    by_tgi: (422, 409),
    by_tgis: ("INVALID_ARGUMENT", "FAILED_PRECONDITION"),
    by_tgis_prefix_id: ("INVALID_ARGUMENT", "FAILED_PRECONDITION"),
}


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.__name__)
def test_every_kind_of_adapter_is_served_on_every_wire(deployment: Deployment, wire: Wire) -> None:
    texts = {"": deployment.expected(None)}
    for name in ("lora", "alora", "dora", "ia3", "both"):
        texts[name] = deployment.expected_of_file(name)
        assert wire(deployment, name, TEXT) == texts[name], name
    assert len(set(texts.values())) == len(texts), "each adapter acts"
    # A folder of the import directory, which the first request imports.
    cached = deployment.expected_of_import(deployment.imports / "cached")
    assert wire(deployment, "cached", TEXT) == cached


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.__name__)
def test_a_prompt_without_the_invocation_is_refused(deployment: Deployment, wire: Wire) -> None:
    with pytest.raises(RefusedCall, match="does not contain the invocation of adapter") as caught:
        wire(deployment, "alora", LACKING)
    assert caught.value.code == WIRES[wire][0]
    assert "alora@1" in str(caught.value)


@pytest.mark.parametrize("wire", WIRES, ids=lambda wire: wire.__name__)
def test_a_folder_that_is_unusable_is_refused(deployment: Deployment, wire: Wire) -> None:
    write_peft_lora(deployment.imports / "deep", CONFIG, layers=3)
    with pytest.raises(RefusedCall, match=r"model\.layers\.2") as caught:
        wire(deployment, "deep", TEXT)
    assert caught.value.code == WIRES[wire][1]
    assert str(deployment.folder) not in str(caught.value)


# -------------------------------------------------------------------------------- vLLM's two routes


def test_an_adapter_is_loaded_listed_replaced_and_unloaded(deployment: Deployment) -> None:
    later = deployment.imports / "later"
    status, text = deployment.load("mail", "later")
    assert (status, text) == (200, "Success: LoRA adapter 'mail' added successfully.")
    assert deployment.complete("mail") == deployment.expected_of_import(later)
    models = deployment.models()
    assert models["mail"]["root"] == "later" and models["mail"]["parent"] == "checkpoint"
    assert models["start"]["root"] == str(deployment.folder / "outside")
    assert models["lora"]["root"] == models["lora"]["parent"] == "checkpoint"

    status, answer = deployment.load("mail", "reloaded")
    assert (status, answer["error"]["type"], answer["error"]["code"]) == (
        400,
        "InvalidUserInput",
        400,
    )
    assert answer["error"]["message"] == (
        "The lora adapter 'mail' has already been loaded. If you want to load the adapter in "
        "place, set 'load_inplace' to True."
    )
    status, text = deployment.load("mail", "reloaded", load_inplace=True)
    assert (status, text) == (200, "Success: LoRA adapter 'mail' added successfully.")
    reloaded = deployment.expected_of_import(deployment.imports / "reloaded")
    assert deployment.complete("mail") == reloaded
    assert deployment.models()["mail"]["root"] == "reloaded"

    status, text = deployment.post(UNLOAD, {"lora_name": "mail"})
    assert (status, text) == (200, "Success: LoRA adapter 'mail' removed successfully.")
    status, answer = deployment.post("/v1/completions", {"model": "mail", "prompt": TEXT})
    assert status == 404 and "mail" not in deployment.models()
    status, answer = deployment.post(UNLOAD, {"lora_name": "mail"})
    assert status == 404
    assert answer["error"] == {
        "message": "The lora adapter 'mail' cannot be found.",
        "type": "NotFoundError",
        "param": "lora_name",
        "code": 404,
    }


def test_a_houlsby_adapter_of_nemo_is_loaded_from_its_file(deployment: Deployment) -> None:
    path = deployment.imports / "houlsby.nemo"
    linears = random_linears(CONFIG, "bottleneck", rank=4, seed=21, strength=0.5)
    tuning = {"adapter_dim": 4, "norm_position": "pre"}
    write_nemo_linears(path, linears, CONFIG, tp=2, scheme="adapter", tuning=tuning)
    status, text = deployment.load("houlsby", path.name)
    assert (status, text) == (200, "Success: LoRA adapter 'houlsby' added successfully.")
    expected = deployment.expected_of_import(path)
    assert deployment.complete("houlsby") == expected != deployment.expected(None)
    assert deployment.post(UNLOAD, {"lora_name": "houlsby"})[0] == 200


def test_a_stream_goes_on_with_the_adapter_that_is_replaced(deployment: Deployment) -> None:
    assert deployment.load("moving", "later")[0] == 200
    new = 200
    first = open_adapter(deployment.imports / "later", base=deployment.base)
    options = Options(adapter="moving", max_new_tokens=new)
    with deployment.server.client() as client:
        pieces = client.stream(TEXT, options)
        text = next(pieces).text
        assert deployment.load("moving", "reloaded", load_inplace=True)[0] == 200
        text += "".join(piece.text for piece in pieces)
    assert text == deployment.expected(first, new=new)
    assert deployment.complete("moving") == deployment.expected_of_import(
        deployment.imports / "reloaded"
    )


def test_modules_of_the_command_line_are_served(deployment: Deployment) -> None:
    expected = deployment.expected_of_import(deployment.folder / "outside")
    assert deployment.complete("start") == expected


def zero_linears() -> dict[str, LinearAdapter]:
    return random_linears(CONFIG, strength=0.0)


def bad_adapters(deployment: Deployment) -> dict[str, tuple[Adapter, str]]:
    """Adapters that this model cannot use, with the reason."""
    linears = random_linears(CONFIG)
    change = linears["decoder.layers.0.self_attention.linear_qkv"]
    outside = (3, CONFIG.vocab_size)
    return {
        "all zeros": (deployment.build(Card("x"), None, zero_linears()), "have no effect|zero"),
        "no linear": (
            deployment.build(Card("x"), None, {"decoder.layers.9.mlp.linear_fc1": change}),
            "no linear of this model",
        ),
        "another base": (
            deployment.build(Card("x", base_digest="0" * 64), None, linears),
            "was trained on the model with digest",
        ),
        "another shape": (
            deployment.build(Card("x"), None, {"decoder.layers.0.mlp.linear_fc2": change}),
            "the model has",
        ),
        "the invocation": (
            deployment.build(Card("x", invocation=outside), None, linears),
            f"the token id {CONFIG.vocab_size}, outside the",
        ),
    }


def test_unusable_adapters_are_refused_in_every_form(deployment: Deployment) -> None:
    refused = deployment.imports / "refused.safetensors"
    for case, (adapter, words) in bad_adapters(deployment).items():
        save_adapter(adapter, refused)
        status, answer = deployment.load("x", "refused.safetensors")
        assert (status, answer["error"]["type"]) == (400, "BadRequestError"), (case, answer)
        check_message(case, answer["error"]["message"], words)
        with deployment.server.client() as client:
            with pytest.raises(CallError) as caught:
                AdapterCalls(client).upload("x", refused)
            error = caught.value
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", "ADAPTER_UNUSABLE"), case
            check_message(case, str(error), words)
            # A file in the directory: the call that loads it says why not.
            dropped = deployment.adapters / "dropped.safetensors"
            save_adapter(adapter, dropped)
            with pytest.raises(CallError) as caught:
                AdapterCalls(client).load("dropped")
            assert caught.value.reason == "ADAPTER_UNUSABLE"
            check_message(case, str(caught.value), words)
            dropped.unlink()
    assert "x" not in deployment.models()


def check_message(case: str, message: str, words: str) -> None:
    assert any(part in message for part in words.split("|")), (case, message)
    assert "\n" not in message and "safetensors/" not in message, (case, message)


def test_invalid_requests_have_vllms_errors(deployment: Deployment) -> None:
    both = "Both 'lora_name' and 'lora_path' must be provided."
    cases: list[tuple[str, object, int, str, str]] = [
        (LOAD, {"lora_name": "x"}, 400, "InvalidUserInput", both),
        (LOAD, {"lora_path": "later"}, 400, "InvalidUserInput", both),
        (LOAD, {"lora_name": "", "lora_path": ""}, 400, "InvalidUserInput", both),
        (
            LOAD,
            {"lora_name": "x", "lora_path": "none"},
            404,
            "NotFoundError",
            "Loading lora x failed: No adapter found for none",
        ),
        (
            LOAD,
            {"lora_name": "x", "lora_path": "../outside"},
            400,
            "InvalidUserInput",
            "lora_path is '../outside', outside the directory",
        ),
        (LOAD, {"lora_name": "a/b", "lora_path": "later"}, 400, "InvalidUserInput", "'a/b' is not"),
        (LOAD, {"lora_name": "preamble", "lora_path": "later"}, 400, "InvalidUserInput", "base"),
        (LOAD, {"lora_name": 5, "lora_path": "later"}, 400, "InvalidUserInput", "lora_name"),
        (LOAD, {"lora_nam": "x", "lora_path": "later"}, 400, "InvalidUserInput", "'lora_name'?"),
        (UNLOAD, {}, 400, "InvalidUserInput", "'lora_name' needs to be provided to unload"),
        (UNLOAD, {"lora_name": "nobody"}, 404, "NotFoundError", "'nobody' cannot be found."),
    ]
    for path, body, status, error_type, words in cases:
        actual_status, answer = deployment.post(path, body)
        error = answer["error"]
        assert (actual_status, error["code"], error["type"]) == (status, status, error_type), body
        assert words in error["message"], (body, error)


# ------------------------------------------------------------------ listings, metrics and commands


def test_uploads_listings_and_metrics_say_method_rank_and_size(
    deployment: Deployment, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    adapter = deployment.build(
        Card("up", invocation=deployment.invocation),
        None,
        random_linears(CONFIG, rank=5, seed=20, strength=0.5),
    )
    file = tmp_path / "up.safetensors"
    save_adapter(adapter, file)
    with deployment.server.client() as client:
        uploaded = AdapterCalls(client).upload("up", file)
        info_stub = admin_pb2_grpc.AdminServiceStub(client.channel)
        assert (uploaded.method, uploaded.rank, uploaded.bytes) == ("alora", 5, adapter.nbytes)
        assert tuple(uploaded.invocation) == deployment.invocation
        assert uploaded.virtual_tokens == 0
        assert deployment.complete("up") == deployment.expected(adapter)
        ledger = info_stub.GetServerInfo(admin_pb2.GetServerInfoRequest()).ledger
        load = info_stub.GetLoad(admin_pb2.GetLoadRequest())
    used = deployment.server.metric("preamble_adapter_memory_used_bytes")
    assert 0 < used <= ledger.adapter_memory_bytes
    assert used == load.adapter_memory_used_bytes
    assert deployment.server.metric("preamble_adapter_memory_bytes") == ledger.adapter_memory_bytes
    labels = '{adapter="up",method="alora",rank="5"}'
    assert deployment.server.metric(f"preamble_adapter_size_bytes{labels}") == adapter.nbytes
    families = text_string_to_metric_families(deployment.server.get("/metrics")[1])
    samples = {sample.name: sample for family in families for sample in family.samples}
    lora_info = samples["vllm:lora_requests_info"].labels
    assert "up" in lora_info["running_lora_adapters"].split(",")
    assert lora_info["waiting_lora_adapters"] == ""
    assert int(lora_info["max_lora"]) >= len(lora_info["running_lora_adapters"].split(","))

    address = deployment.server.address
    assert preamble.main(["adapters", "list", "--server", address]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if " up@1" in line)
    assert line.split()[2:5] == ["alora", "rank", "5"] and "MB" in line
    assert preamble.main(["adapters", "show", "up", "--server", address]) == 0
    shown = capsys.readouterr().out
    assert "rank             5\n" in shown and "method           alora\n" in shown


def test_the_command_generates_with_adapters_of_linears(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model", str(deployment.checkpoint), "--dtype", "float64"]
    flags += ["--adapters", str(deployment.adapters), "--max-new-tokens", str(NEW)]
    for name in ("lora", "alora"):
        assert preamble.main(["generate", TEXT, "--task", name, *flags]) == 0
        assert capsys.readouterr().out == f"{deployment.expected_of_file(name)}\n"
    assert preamble.main(["generate", LACKING, "--task", "alora", *flags]) == 1
    assert "does not contain the invocation" in capsys.readouterr().err


def test_loading_needs_the_role_and_stays_in_the_tenants_folder(tmp_path: Path) -> None:
    tokens = tokens_file(
        tmp_path / "tokens.yaml",
        {
            "crew": {"token": CREW, "roles": ["generate", "adapters"]},
            "guest": {"token": GUEST, "roles": ["generate"]},
        },
    )
    with deployed(tmp_path / "served", tokens=tokens) as deployment:
        body = {"lora_name": "own", "lora_path": "later"}
        status, answer = deployment.post(LOAD, body, GUEST)
        assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")
        assert deployment.post(LOAD, body)[0] == 401
        assert deployment.post(LOAD, body, CREW)[0] == 200
        assert (deployment.adapters / "crew" / "own@1.safetensors").is_file()
        models = json.loads(deployment.server.get("/v1/models", CREW)[1])["data"]
        assert {model["id"]: model["root"] for model in models}["own"] == "later"
        guest_models = json.loads(deployment.server.get("/v1/models", GUEST)[1])["data"]
        roots = {model["id"]: model["root"] for model in guest_models}
        assert "own" not in roots
        assert roots["start"] == "checkpoint", "only callers that may load adapters see paths"
        status, answer = deployment.post(UNLOAD, {"lora_name": "start"}, CREW)
        assert (status, answer["error"]["type"]) == (403, "PermissionDeniedError")
        assert deployment.post(UNLOAD, {"lora_name": "own"}, CREW)[0] == 200


def test_golden_examples_are_replayed_on_a_strict_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Deployment(tmp_path)
    template = PromptTemplate("{text} answer:", ())
    linears = random_linears(CONFIG, seed=30, strength=0.5)
    card = Card("good", template=template, invocation=plain.invocation, max_new_tokens=NEW)
    adapter = plain.build(card, None, linears)
    golden = record_golden_examples(
        plain.model, plain.tokenizer, adapter, [{"text": LACKING}, {"text": "one two"}]
    )
    assert golden[0].output == plain.expected(adapter)
    other = random_linears(CONFIG, seed=31, strength=0.5)
    for name, changes in (("good", linears), ("bad", other)):
        plain.save(replace(card, name=name, golden=golden), linears=changes)
    files = [plain.adapters / f"{name}.safetensors" for name in ("good", "bad")]
    model = ["--model", str(plain.checkpoint), "--dtype", "float64"]
    assert preamble.main(["adapters", "check", str(files[0]), *model]) == 0
    assert "2 of 2 golden examples match" in capsys.readouterr().out
    assert preamble.main(["adapters", "check", str(files[1]), *model]) == 1
    with serving(plain.checkpoint, adapters=str(plain.adapters), golden="strict") as plain.server:
        for result in ("passed", "failed"):
            series = f'preamble_adapter_golden_total{{result="{result}"}}'
            eventually(lambda series=series: plain.server.metric(series) == 1)  # type: ignore[misc]
        assert plain.complete("good") == golden[0].output
        with pytest.raises(RefusedCall, match="golden") as caught:
            by_grpc(plain, "bad", TEXT)
        assert caught.value.code == "FAILED_PRECONDITION"


def test_a_server_without_an_adapter_directory_loads_nothing(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path)
    with serving(checkpoint) as server:
        body = {"lora_name": "x", "lora_path": str(tmp_path)}
        status, text = server.request(LOAD, body)
        assert status == 400 and "--adapter-imports DIR" in text
        with server.client() as client:
            with pytest.raises(CallError, match="--adapters DIR") as caught:
                AdapterCalls(client).upload("x", next(checkpoint.glob("*.safetensors")))
            assert caught.value.reason == "NOT_POSSIBLE_NOW"
            assert client.generate(TEXT, Options(max_new_tokens=2)).token_ids
