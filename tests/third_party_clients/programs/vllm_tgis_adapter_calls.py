"""Calls of a TGIS client with the stubs of vllm-tgis-adapter, for a separate process.

    python vllm_tgis_adapter_calls.py ADDRESS TEXT...

Prints the responses as JSON. The package itself imports vLLM, which its stubs do not need: empty
modules replace the parents of the stubs.
"""

import json
import sys
import types
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import grpc

TIMEOUT_S = 60.0


def stubs() -> tuple[Any, Any]:
    spec = find_spec("vllm_tgis_adapter")
    assert spec is not None and spec.origin is not None
    package = Path(spec.origin).parent
    for name, folder in (
        ("vllm_tgis_adapter", package),
        ("vllm_tgis_adapter.grpc", package / "grpc"),
    ):
        module = types.ModuleType(name)
        module.__path__ = [str(folder)]
        sys.modules[name] = module
    module_name = "vllm_tgis_adapter.grpc.pb.generation_pb2"
    return import_module(module_name), import_module(f"{module_name}_grpc")


def ask(pb: Any, stub: Any, texts: list[str]) -> dict[str, Any]:
    details = {"token_logprobs": True, "token_ranks": True, "top_n_tokens": 2}
    params = pb.Parameters(
        method=pb.SAMPLE,
        sampling=pb.SamplingParameters(temperature=0.9, top_k=20, top_p=0.9, seed=11),
        stopping=pb.StoppingCriteria(max_new_tokens=16, stop_sequences=["zzz"]),
        response=pb.ResponseOptions(
            input_text=True, generated_tokens=True, input_tokens=True, **details
        ),
        decoding=pb.DecodingParameters(repetition_penalty=1.1),
    )
    prompts = [pb.GenerationRequest(text=text) for text in texts]
    request = pb.BatchedGenerationRequest(
        model_id="m", prefix_id="sum", requests=prompts, params=params
    )
    batch = stub.Generate(request, timeout=TIMEOUT_S).responses
    streams = []
    for prompt in prompts:
        request = pb.SingleGenerationRequest(adapter_id="sum", request=prompt, params=params)
        streams.append(list(stub.GenerateStream(request, timeout=TIMEOUT_S)))
    request = pb.BatchedTokenizeRequest(
        requests=[pb.TokenizeRequest(text=text) for text in texts],
        return_tokens=True,
        return_offsets=True,
    )
    tokens = stub.Tokenize(request, timeout=TIMEOUT_S).responses
    model = stub.ModelInfo(pb.ModelInfoRequest(model_id="m"), timeout=TIMEOUT_S)
    request = pb.BatchedGenerationRequest(prefix_id="nobody", requests=prompts)
    rejected = stub.Generate.future(request, timeout=TIMEOUT_S)
    return {
        "texts": [response.text for response in batch],
        "streamed": ["".join(response.text for response in stream) for stream in streams],
        "seeds": [response.seed for response in batch] + [stream[0].seed for stream in streams],
        "stops": [pb.StopReason.Name(response.stop_reason) for response in batch],
        "last": [pb.StopReason.Name(stream[-1].stop_reason) for stream in streams],
        "counts": [response.generated_token_count == len(response.tokens) for response in batch],
        "details": [len(token.top_tokens) for token in batch[0].tokens],
        "inputs": [response.input_token_count == len(response.input_tokens) for response in batch],
        "tokens": [
            response.token_count == len(response.tokens) == len(response.offsets)
            for response in tokens
        ],
        "context": model.max_sequence_length,
        "kind": pb.ModelInfoResponse.ModelKind.Name(model.model_kind),
        "code": rejected.code().name,
    }


def main(address: str, *texts: str) -> None:
    pb, services = stubs()
    with grpc.insecure_channel(address) as channel:
        report = ask(pb, services.GenerationServiceStub(channel), list(texts))
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
