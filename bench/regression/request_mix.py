"""Request mix: fixed requests of every kind, which a comparison sends to two checkouts.

The requests are bodies of the HTTP API, messages of the gRPC service and fields of the Python API's
`Ask`. They are distributed over dtypes and tensor x pipeline splits, and `request_results.py` sends
them.
"""

import itertools
import json
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from protos.preamble.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Setup:
    """A dtype and a split with which each checkout starts one server."""

    dtype: str
    tp: int
    pp: int

    @property
    def name(self) -> str:
        return f"{self.dtype} {self.tp}x{self.pp}"

    def serve_arguments(self, model: Path, adapters: Path, limits: Path) -> list[str | Path]:
        """Return the command line of `preamble serve`."""
        dtype = ["--dtype", self.dtype]
        if self.dtype == "int8":
            dtype = ["--dtype", "bfloat16", "--weights", "int8"]
        split = ["--tp", str(self.tp), "--pp", str(self.pp)]
        return [model, "--adapters", adapters, "--config", limits, *dtype, *split]


REQUESTS = 200  # Number of all requests except those to an int8 server.
SPLITS = ((1, 1), (2, 1), (1, 2), (2, 2))
SETUPS = (
    *(Setup("float32", *split) for split in SPLITS),
    *(Setup("bfloat16", *split) for split in SPLITS),
    Setup("float64", 1, 1),
    Setup("float64", 2, 2),
)
# Requests to an int8 server are not counted in REQUESTS, because some CPUs do not support int8.
INT8 = Setup("int8", 1, 1)
INT8_CALLS = 16
# REQUESTS includes this number of requests to `serving.open_engine`, which uses no server.
IN_PROCESS = 24
# The error message of a server without int8 support contains this text in every release.
NO_INT8 = "AVX512-VNNI"
LIMITS = {"kv_tokens_max": 8192, "adapters_poll_s": 0.2, "prove": True}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 2, 3]}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Call:
    """A request to one of the two protocols."""

    kind: str
    http: str = ""  # Path of an HTTP request; empty for gRPC.
    rpc: str = ""  # Method of GenerationService; empty for HTTP.
    body: bytes = b""  # The HTTP body or the serialized message.


def prompts(model: Path) -> list[str]:
    """Return the prompts of the demo's tasks, with and without their instruction."""
    lines = (model.parent / "prompts.jsonl").read_text().splitlines()
    instructed = [str(json.loads(line)["prompt"]) for line in lines]
    bare = [text.partition(": ")[2] or text.partition("? ")[2] for text in instructed]
    return [*instructed, *bare]


def calls_by_setup(
    texts: Sequence[str], setups: Sequence[Setup], count: int
) -> dict[str, list[Call]]:
    """Distribute `count` calls over the setups, each kind of request in turn.

    The calls depend only on the arguments. A request of several sequences is not sent to a setup
    with pipeline stages. Instead, it is one of the first requests of the next setup without them.
    """
    draw = random.Random(0)
    kinds = itertools.cycle(_KINDS)
    postponed = deque[str]()
    calls: dict[str, list[Call]] = {setup.name: [] for setup in setups}
    for index, setup in enumerate(setups):
        setup_count = count * (index + 1) // len(setups) - count * index // len(setups)
        while len(calls[setup.name]) < setup_count:
            kind = postponed.popleft() if postponed and setup.pp == 1 else next(kinds)
            if setup.pp > 1 and kind in SEVERAL_SEQUENCES:
                postponed.append(kind)
                continue
            text, seed = draw.choice(texts), draw.randrange(1 << 30)
            calls[setup.name].append(_build_call(kind, text, seed, dict(_KINDS[kind])))
    return calls


# Kinds of requests with several sequences. In a pipeline, the timing determines which sequences
# share a step, and the rounding of a sequence depends on the sequences in its step.
SEVERAL_SEQUENCES = (
    "several answers",
    "several prompts",
    "beams",
    "beams length",
    "adapter seeded",
    "grpc seeded",
    "grpc stream",
    "grpc adapters",
    "grpc beams",
    "grpc score",
)
# The temperature is high enough that a small change of the logits changes a token.
SEEDED: Mapping[str, Any] = {"temperature": 1.8, "max_tokens": 16, "ignore_eos": True}
GREEDY: Mapping[str, Any] = {"temperature": 0, "max_tokens": 16}
# Maps a kind to the fields of the HTTP body, or of the gRPC message if the kind begins with `grpc`.
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": GREEDY,
    "greedy logprobs": {**GREEDY, "logprobs": 3},
    "seeded": SEEDED,
    "seeded top-k top-p": {**SEEDED, "top_k": 20, "top_p": 0.9, "logprobs": 1},
    "seeded min-p typical-p": {**SEEDED, "min_p": 0.02, "typical_p": 0.95},
    "penalties": {
        **SEEDED,
        "repetition_penalty": 1.5,
        "presence_penalty": 2.0,
        "frequency_penalty": 1.0,
        "max_tokens": 48,
    },
    "stop strings": {**GREEDY, "max_tokens": 24, "stop": [" and", "a "]},
    "stop token": {**GREEDY, "stop_token_ids": [40, 41, 42, 43], "ignore_eos": True},
    "several answers": {**SEEDED, "n": 3, "logprobs": 0},
    "several prompts": {**GREEDY, "prompt": ["12 and 7 =>", "Anna paints =>"], "max_tokens": 6},
    "beams": {"use_beam_search": True, "n": 3, "max_tokens": 8, "temperature": 0},
    "beams length": {
        "use_beam_search": True,
        "n": 2,
        "beam_width": 4,
        "length_penalty": 0.6,
        "early_stopping": True,
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 1,
    },
    "adapter p-tuned": {**GREEDY, "model": "rows"},
    "adapter prefix": {**GREEDY, "model": "keys"},
    "adapter seeded": {**SEEDED, "model": "rows", "n": 2, "logprobs": 1},
    "adapter inputs": {**GREEDY, "model": "keys", "prompt": None},
    "guided JSON": {**SEEDED, "guided_json": SCHEMA, "max_tokens": 40},
    "guided regex": {**GREEDY, "guided_regex": "[0-9]{3,6}( and [a-z]+)?"},
    "guided choice": {**GREEDY, "guided_choice": ["yes", "no", "perhaps"]},
    "priority": {**GREEDY, "priority": -5, "service_class": "throughput"},
    "bias": {**SEEDED, "logit_bias": {"50": 5.0, "51": -100.0}, "bad_words": [" a"]},
    "allowed tokens": {**SEEDED, "allowed_token_ids": list(range(20, 200))},
    "no repeated n-gram": {**GREEDY, "no_repeat_ngram_size": 2, "ignore_eos": True},
    "min tokens": {**GREEDY, "min_tokens": 10, "max_tokens": 20},
    "echo score": {**GREEDY, "max_tokens": 0, "echo": True, "logprobs": 2},
    "prompt logprobs": {**GREEDY, "prompt_logprobs": 2, "max_tokens": 2},
    "stream": {**SEEDED, "stream": True, "stream_options": {"include_usage": True}},
    "long": {**GREEDY, "max_tokens": 96, "ignore_eos": True},
    "truncated": {**GREEDY, "truncate_prompt_tokens": 5},
    "refused field": {**GREEDY, "temprature": 1.0},
    "refused length": {**GREEDY, "max_tokens": 4000},
    "grpc greedy": {"max_new_tokens": 12, "details": {"logprobs": 2, "prompt_logprobs": 1}},
    "grpc seeded": {
        "sampling": {"temperature": 0.9, "top_k": 40, "min_p": 0.01},
        "answers": 3,
        "max_new_tokens": 10,
        "details": {"logprobs": 1},
    },
    "grpc stream": {"max_new_tokens": 12, "sampling": {"temperature": 1.2}, "answers": 2},
    "grpc adapters": {"adapters": ["rows", "keys", ""], "max_new_tokens": 8},
    "grpc decay": {
        "sampling": {"temperature": 1.0, "length_decay": {"start": 4, "factor": 1.5}},
        "max_new_tokens": 24,
        "stops": {"strings": ["=>"], "include_in_text": True},
    },
    "grpc beams": {"beams": {"width": 4}, "answers": 2, "max_new_tokens": 8},
    "grpc guide": {"guide": {"regex": "[a-z]+ [0-9]+"}, "max_new_tokens": 12},
    "grpc score": {"continuations": [" yes", " no", " 34"], "logprobs": 2},
    "grpc tokenize": {},
}


def _build_call(kind: str, text: str, seed: int, kind_fields: dict[str, Any]) -> Call:
    if not kind.startswith("grpc"):
        body: dict[str, Any] = {"prompt": text, "seed": seed, **kind_fields}
        if body["prompt"] is None:
            body = {**body, "inputs": {"prompt": text}}
            del body["prompt"]
        return Call(kind, http="/v1/completions", body=json.dumps(body).encode())
    rpc = {"stream": "GenerateStream", "score": "Score", "tokenize": "Tokenize"}.get(
        kind.partition(" ")[2], "Generate"
    )
    fields: dict[str, Any] = {"text": text, **kind_fields}
    if rpc.startswith("Generate"):  # Without a seed, the server would draw one.
        fields["sampling"] = {**kind_fields.get("sampling", {}), "seed": str(seed)}
    message = json_format.ParseDict(fields, getattr(pb, f"{rpc}Request")())
    return Call(kind, rpc=rpc, body=message.SerializeToString(deterministic=True))


def python_requests(texts: Sequence[str], count: int) -> list[dict[str, Any]]:
    """Return the fields of `count` requests to the Python API."""
    draw = random.Random(1)
    kinds: tuple[dict[str, Any], ...] = (
        {"max_new_tokens": 12},
        {"max_new_tokens": 12, "temperature": 1.0, "logprobs": 1},
        {"max_new_tokens": 8, "temperature": 0.8, "top_p": 0.9, "answers": 3},
        {"max_new_tokens": 8, "adapters": ["rows"]},
        {"max_new_tokens": 8, "adapters": ["keys"], "temperature": 1.0},
        {"max_new_tokens": 8, "beam_width": 3, "answers": 2},
        {"max_new_tokens": 12, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
        {"max_new_tokens": 20, "stop_strings": [" a", "and"]},
    )
    requests = []
    for index in range(count):
        fields = {**kinds[index % len(kinds)], "prompt": draw.choice(texts)}
        requests.append({**fields, "seed": draw.randrange(1 << 30)})
    return requests
