"""Comparison of answers: the same requests to servers and to the Python API of two checkouts.

Rounding depends on the sequences that share a step, and timing can change these sequences. Requests
are therefore sent one after another. A request of several sequences is not sent to servers with
pipeline stages. Servers without pipeline stages get such a request several times, and its answers
count as equal if both checkouts have an answer in common.
"""

import http.client
import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import yaml
from google.protobuf import json_format

from bench.harness.checkouts import Checkout, CheckoutError, Server
from bench.regression.checkout_pair import CheckoutPair, ComparedRow, Results, compare
from bench.regression.request_mix import (
    IN_PROCESS,
    INT8,
    INT8_CALLS,
    LIMITS,
    NO_INT8,
    REQUESTS,
    SETUPS,
    SEVERAL_SEQUENCES,
    Call,
    Setup,
    calls_by_setup,
    prompts,
    python_requests,
)
from bench.regression.tuning_results import run_tune, tune_settings
from protos.preamble.v1 import generation_pb2 as pb

CALL_S = 120.0
REPEATS = 4  # A request of several sequences is sent this number of times.


def send_call(server: Server, call: Call) -> bytes:
    """Return the answer or the error as JSON, without the fields that differ in every run."""
    return _send_grpc(server, call) if call.rpc else _send_http(server, call)


def _send_http(server: Server, call: Call) -> bytes:
    connection = http.client.HTTPConnection(server.http, timeout=CALL_S)
    try:
        headers = {"content-type": "application/json"}
        connection.request("POST", call.http, call.body, headers)
        reply = connection.getresponse()
        body = reply.read().decode()
    finally:
        connection.close()
    if reply.headers.get_content_type() == "text/event-stream":
        return json.dumps([reply.status, _join_events(body)]).encode()
    return json.dumps(
        [reply.status, _without_random_fields(json.loads(body))], sort_keys=True
    ).encode()


def _join_events(body: str) -> dict[str, Any]:
    """Join the events of a stream; the number of tokens per event depends on timing."""
    texts: dict[int, str] = {}
    ends: list[Any] = []
    for line in body.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        event = json.loads(line.removeprefix("data: "))
        for choice in event.get("choices", []):
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
            if choice.get("finish_reason"):
                ends.append([choice["index"], choice["finish_reason"]])
        if event.get("usage") or event.get("error"):
            ends.append([event.get("usage"), event.get("error")])
    return {"texts": texts, "ends": ends}


def _without_random_fields(answer: dict[str, Any]) -> dict[str, Any]:
    """Drop the id, the time and the error message; the status and the code remain."""
    compared = {key: field for key, field in answer.items() if key not in ("id", "created")}
    if isinstance(compared.get("error"), dict):
        compared["error"] = {
            key: field for key, field in compared["error"].items() if key != "message"
        }
    return compared


def _send_grpc(server: Server, call: Call) -> bytes:
    path = f"/preamble.v1.GenerationService/{call.rpc}"
    response_class = getattr(pb, f"{call.rpc}Response")
    with grpc.insecure_channel(server.grpc) as channel:
        # Without a serializer, requests and responses are bytes.
        invoke: Any = channel.unary_unary(path)
        invoke_stream: Any = channel.unary_stream(path)
        try:
            if call.rpc == "GenerateStream":
                messages = invoke_stream(call.body, timeout=CALL_S)
                pieces = [response_class.FromString(message) for message in messages]
                return json.dumps(_join_pieces(pieces)).encode()
            reply = response_class.FromString(invoke(call.body, timeout=CALL_S))
        except grpc.RpcError as error:
            return json.dumps([str(error.code())]).encode()
    return json.dumps(json_format.MessageToDict(reply), sort_keys=True).encode()


def _join_pieces(pieces: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """Join the pieces of each answer; the number of tokens per piece depends on timing."""
    answers: dict[int, dict[str, Any]] = {}
    for piece in pieces:
        answer = answers.setdefault(piece.index, {"text": "", "ids": [], "rest": {}})
        answer["text"] += piece.text
        answer["ids"] += list(piece.token_ids)
        fields = json_format.MessageToDict(piece)
        answer["rest"] |= {
            name: fields[name] for name in fields if name not in ("text", "tokenIds")
        }
    return answers


# A program that uses the documented Python API. It reads the server's config and the fields of each
# `Ask` from standard input.
PROGRAM = """
import json, sys
import serving
from serving.config import ServerConfig
from serving.request import Ask
work = json.loads(sys.stdin.readline())
answers_by_request = []
with serving.open_engine(ServerConfig(**work["config"])) as engine:
    for fields in work["asks"]:
        answers = []
        for answer in engine.generate([Ask(**fields)]):
            scores = [score.logprob for score in answer.scores]
            ids = list(answer.token_ids)
            answers.append([ids, answer.text, answer.finish, answer.seed, scores])
        answers_by_request.append(answers)
print(json.dumps({"answers": answers_by_request}))
"""


def compare_requests(pair: CheckoutPair) -> Iterator[ComparedRow]:
    """Compare answers of servers, of the in-process engine and of `preamble generate`."""
    adapters = _tune_adapters(pair)
    texts = prompts(pair.model)
    yield from _compare_servers(pair, adapters, texts)
    yield from _compare_in_process(pair, adapters, texts)
    yield from _compare_command(pair, adapters, texts[0])


def _tune_adapters(pair: CheckoutPair) -> Path:
    """Train two adapters with `pair.other`; the servers of both checkouts use them."""
    folder = pair.folder / "adapters-run"
    records = pair.records()
    for name, method in (("rows", "mlp"), ("keys", "prefix")):
        settings = tune_settings(pair.model, records, name, {"method": method, "steps": 3})
        run_tune(pair.other, folder, settings)
    adapters = pair.folder / "adapters"
    shutil.copytree(folder / "out", adapters)
    return adapters


def _compare_servers(
    pair: CheckoutPair, adapters: Path, texts: Sequence[str]
) -> Iterator[ComparedRow]:
    """For each setup, start a server of each checkout, and send both servers the same calls."""
    limits = pair.folder / "limits.yaml"
    limits.write_text(yaml.safe_dump(LIMITS))
    calls = calls_by_setup(texts, SETUPS, REQUESTS - IN_PROCESS)
    calls |= calls_by_setup(texts, (INT8,), INT8_CALLS)
    for setup in (*SETUPS, INT8):
        numbered = enumerate(calls[setup.name])
        setup_calls = {f"{setup.name} {number:02} {call.kind}": call for number, call in numbered}
        arguments = setup.serve_arguments(pair.model, adapters, limits)

        def serve(
            checkout: Checkout,
            setup: Setup = setup,
            arguments: Sequence[str | Path] = arguments,
            setup_calls: Mapping[str, Call] = setup_calls,
        ) -> Results:
            try:
                with checkout.server(arguments, pair.folder_of(checkout)) as server:
                    return {name: _answers(server, call) for name, call in setup_calls.items()}
            except CheckoutError as error:
                if setup is INT8 and NO_INT8 in str(error):
                    return {}
                raise

        this, other = common_answers(*pair.run(serve))
        yield from compare("requests", this, other)
        pair.log(
            f"requests {setup.name}: {len(setup_calls)} sent, {_error_count(this)} refused"
            if this
            else f"requests {setup.name}: not compared, this processor lacks {NO_INT8}"
        )


def _answers(server: Server, call: Call) -> bytes:
    """Send a call, if necessary several times; return a JSON list of its distinct answers."""
    repeats = REPEATS if call.kind in SEVERAL_SEQUENCES else 1
    answers = {send_call(server, call).decode() for _ in range(repeats)}
    return json.dumps(sorted(answers)).encode()


def common_answers(this: Results, other: Results) -> tuple[Results, Results]:
    """Reduce each list of answers to one answer.

    If the lists of the two checkouts have a common answer, both lists are reduced to that answer.
    Otherwise, each list is reduced to its first answer.
    """
    this_answers = dict[str, bytes]()
    other_answers = dict[str, bytes]()
    for name in this.keys() & other.keys():
        ours: list[str] = json.loads(this[name])
        theirs: list[str] = json.loads(other[name])
        common = [answer for answer in ours if answer in theirs]
        this_answers[name] = (common or ours)[0].encode()
        other_answers[name] = (common or theirs)[0].encode()
    return this_answers, other_answers


def _compare_in_process(
    pair: CheckoutPair, adapters: Path, texts: Sequence[str]
) -> Iterator[ComparedRow]:
    config = {
        "model": str(pair.model),
        "adapters": str(adapters),
        "dtype": "float32",
        "kv_tokens_max": 8192,
    }
    argument = {"config": config, "asks": python_requests(texts, IN_PROCESS)}

    def generate(checkout: Checkout) -> Results:
        answers = checkout.call(PROGRAM, argument, pair.folder_of(checkout))["answers"]
        return {
            f"in process float32 {number:03}": json.dumps(answer).encode()
            for number, answer in enumerate(answers)
        }

    yield from compare("requests", *pair.run(generate))
    pair.log(f"requests in process: {IN_PROCESS} answered")


def _compare_command(pair: CheckoutPair, adapters: Path, text: str) -> Iterator[ComparedRow]:
    arguments = ["preamble", "generate", "--model", str(pair.model), "--adapters", str(adapters)]
    arguments += ["--max-new-tokens", "16", "--temperature", "1", "--seed", "5", text]

    def generate(checkout: Checkout) -> Results:
        return {"preamble generate": checkout.command(arguments, pair.folder_of(checkout)).encode()}

    yield from compare("requests", *pair.run(generate))


def _error_count(results: Results) -> int:
    """Return the number of answers that are errors; some requests are invalid on purpose."""
    return sum(bool(re.match(rb'\[(4|5|"StatusCode)', answer)) for answer in results.values())
