"""A stand-in for the endpoint picker of an inference gateway, and a real Envoy that asks it.

It speaks the endpoint picker protocol: Envoy's external processing in the body mode
FULL_DUPLEX_STREAMED. It answers the headers of a request when it has the whole body, names the
endpoint in the header and in the metadata `envoy.lb` DESTINATION, and passes all bodies on as they
come. Calls of gRPC go to the replicas' gRPC ports, all others to their HTTP ports, in turn.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_tools import protoc

from bench.harness.envoy_process import endpoint
from tests.support.envoy import read_config, run_envoy
from tests.support.servers import Server

DESTINATION = "x-gateway-destination-endpoint"
_PACKAGE = "envoy.service.ext_proc.v3"
_OVERWRITE = 2  # HeaderAppendAction.OVERWRITE_IF_EXISTS_OR_ADD
_STREAMS_MAX = 64  # A thread each.


@cache
def _messages() -> dict[str, Any]:
    """Return the messages of ext_proc.proto by their names."""
    proto = Path(__file__).with_name("ext_proc.proto")
    with TemporaryDirectory() as folder:
        output = Path(folder) / "set.binpb"
        arguments = [f"-I{proto.parent}", f"-I{files('grpc_tools') / '_proto'}"]
        arguments += [f"--descriptor_set_out={output}", "--include_imports", str(proto)]
        assert protoc.main(["protoc", *arguments]) == 0
        descriptors = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes())
    pool = descriptor_pool.DescriptorPool()
    for file in descriptors.file:
        pool.Add(file)
    file = pool.FindFileByName(proto.name)
    return {
        name: message_factory.GetMessageClass(descriptor)
        for name, descriptor in file.message_types_by_name.items()
    }


class EndpointPicker:
    """Picks the replicas in turn; `picked` has the endpoints so far."""

    def __init__(self, servers: Sequence[Server]) -> None:
        self.picked: list[str] = []
        self._turns = itertools.count()
        self._servers = list(servers)

    def remove_all(self) -> None:
        """From now on, no replica is ready."""
        self._servers.clear()

    def process(self, requests: Iterator[Any], _context: Any) -> Iterator[Any]:
        """Handle the messages of one HTTP request."""
        response = _messages()["ProcessingResponse"]
        headers: Any = None
        bodies: list[Any] = []
        for request in requests:
            kind = request.WhichOneof("request")
            if kind == "request_headers":
                headers = request.request_headers.headers.headers
                if request.request_headers.end_of_stream:
                    yield self._route(headers)
            elif kind == "request_body":
                bodies.append(request.request_body)
                if request.request_body.end_of_stream:
                    yield self._route(headers)
                    yield from (_pass_body("request_body", body) for body in bodies)
            elif kind == "response_headers":
                yield response(response_headers={})
            elif kind == "response_body":
                yield _pass_body("response_body", request.response_body)
            else:
                yield response(**{kind: {}})

    def _route(self, headers: Any) -> Any:
        response = _messages()["ProcessingResponse"]
        if not self._servers:
            return response(immediate_response={"status": {"code": 503}})
        values = {header.key: header.raw_value.decode() or header.value for header in headers}
        is_grpc = values.get("content-type", "").startswith("application/grpc")
        server = self._servers[next(self._turns) % len(self._servers)]
        address = server.address if is_grpc else server.http_address
        self.picked.append(address)
        header = {"key": DESTINATION, "raw_value": address.encode()}
        option = {"header": header, "append_action": _OVERWRITE}
        common = {"header_mutation": {"set_headers": [option]}, "clear_route_cache": True}
        answer = response(request_headers={"response": common})
        answer.dynamic_metadata.update({"envoy.lb": {DESTINATION: address}})
        return answer


def _pass_body(kind: str, body: Any) -> Any:
    streamed = {"body": body.body, "end_of_stream": body.end_of_stream}
    common = {"body_mutation": {"streamed_response": streamed}}
    return _messages()["ProcessingResponse"](**{kind: {"response": common}})


@contextmanager
def inference_gateway(picker: EndpointPicker, folder: Path) -> Iterator[str]:
    """Run the picker and an Envoy that asks it; yield Envoy's address."""
    handler = grpc.stream_stream_rpc_method_handler(
        picker.process,
        request_deserializer=_messages()["ProcessingRequest"].FromString,
        response_serializer=_serializer(),
    )
    services = grpc.method_handlers_generic_handler(
        f"{_PACKAGE}.ExternalProcessor", {"Process": handler}
    )
    server = grpc.server(ThreadPoolExecutor(_STREAMS_MAX))
    server.add_generic_rpc_handlers((services,))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with run_envoy(_gateway_config(port), folder) as address:
            yield address
    finally:
        server.stop(None).wait()


def _serializer() -> Callable[[Any], bytes]:
    serialize: Callable[[Any], bytes] = _messages()["ProcessingResponse"].SerializeToString
    return serialize


def _gateway_config(picker_port: int) -> Any:
    """The listener of the configuration in deploy/, with a picker instead of a hash policy."""
    config = read_config()
    resources = config["static_resources"]
    http2 = next(
        cluster["typed_extension_protocol_options"]
        for cluster in resources["clusters"]
        if cluster["name"] == "grpc"
    )
    (chain,) = resources["listeners"][0]["filter_chains"]
    manager = chain["filters"][0]["typed_config"]
    manager["http_filters"].insert(
        0,
        {
            "name": "envoy.filters.http.ext_proc",
            "typed_config": {
                "@type": "type.googleapis.com/"
                "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",
                "grpc_service": {"envoy_grpc": {"cluster_name": "picker"}, "timeout": "10s"},
                "message_timeout": "1000s",
                "processing_mode": {
                    "request_header_mode": "SEND",
                    "request_body_mode": "FULL_DUPLEX_STREAMED",
                    "request_trailer_mode": "SEND",
                    "response_header_mode": "SEND",
                    "response_body_mode": "FULL_DUPLEX_STREAMED",
                    "response_trailer_mode": "SEND",
                },
            },
        },
    )
    route = {"match": {"prefix": "/"}, "route": {"cluster": "replicas", "timeout": "0s"}}
    manager["route_config"]["virtual_hosts"][0]["routes"] = [route]
    options_name = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
    same_protocol = {
        options_name: {
            "@type": f"type.googleapis.com/{options_name}",
            "use_downstream_protocol_config": {"http2_protocol_options": {}},
        }
    }
    resources["clusters"] = [
        {
            "name": "replicas",
            "type": "ORIGINAL_DST",
            "connect_timeout": "1s",
            "lb_policy": "CLUSTER_PROVIDED",
            "original_dst_lb_config": {"use_http_header": True, "http_header_name": DESTINATION},
            "typed_extension_protocol_options": same_protocol,
        },
        {
            "name": "picker",
            "type": "STATIC",
            "connect_timeout": "1s",
            "typed_extension_protocol_options": http2,
            "load_assignment": {
                "cluster_name": "picker",
                "endpoints": [{"lb_endpoints": [endpoint(f"127.0.0.1:{picker_port}")]}],
            },
        },
    ]
    return config
