"""Messages of the gRPC protocols: decompression, limits, and the count of their parts."""

import asyncio
import gzip
import random
import zlib
from collections.abc import Callable

import pytest
from google.protobuf.message import DecodeError, Message

from protos.foreign.descriptor_pools import load_package
from protos.preamble.v1 import generation_pb2 as pb
from serving.frontend.wire_messages import PARTS_MAX, count_parts, decompress, parse_message
from serving.request import RefusedError

BYTES_MAX = 1 << 20
Compress = Callable[[bytes], bytes]
REQUEST = pb.GenerateRequest(text="hello world " * 5000, max_new_tokens=3)


def parse(message_type: type[Message], data: bytes, bytes_max: int = BYTES_MAX) -> Message:
    return asyncio.run(parse_message(message_type, data, bytes_max))


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zlib.compress])
@pytest.mark.parametrize("message", [REQUEST, pb.GenerateRequest(text="a"), pb.GenerateRequest()])
def test_message_is_equal_with_every_compression(
    compress: Compress, message: pb.GenerateRequest
) -> None:
    assert parse(pb.GenerateRequest, compress(message.SerializeToString())) == message


@pytest.mark.parametrize("level", range(10))
def test_every_zlib_level_is_recognized(level: int) -> None:
    data = REQUEST.SerializeToString()
    assert decompress(zlib.compress(data, level), len(data)) == data


@pytest.mark.parametrize("compress", [gzip.compress, zlib.compress])
def test_decompressed_message_over_the_limit_is_refused(compress: Compress) -> None:
    with pytest.raises(RefusedError, match=r"over 1048576 bytes.*message_bytes_max"):
        parse(pb.GenerateRequest, compress(bytes(BYTES_MAX + 1)))
    assert decompress(compress(bytes(BYTES_MAX)), BYTES_MAX) == bytes(BYTES_MAX)


def test_message_that_begins_as_zlib_data_is_not_changed() -> None:
    data = b"\x78\x9c" + b"\x01" * 40  # Field 15 is the number 156.
    assert decompress(data, BYTES_MAX) == data


@pytest.mark.parametrize("cut", [1, 8, 20])
def test_truncated_compression_is_unreadable(cut: int) -> None:
    with pytest.raises(DecodeError):
        parse(pb.GenerateRequest, gzip.compress(REQUEST.SerializeToString())[:-cut])


def many_parts() -> list[Message]:
    count = PARTS_MAX + 1
    kserve = load_package("kserve")
    infer = kserve.ModelInferRequest()
    infer.inputs.add(name="x").contents.int_contents.extend([1] * count)
    parameters = kserve.ModelInferRequest()
    for index in range(count // 2):
        parameters.parameters[str(index)].bool_param = True
    tgis = load_package("tgis").BatchedTokenizeRequest()
    for _ in range(count):
        tgis.requests.add()
    return [
        pb.GenerateRequest(inputs=pb.Inputs(fields={str(index): "" for index in range(count)})),
        pb.GenerateRequest(sampling=pb.Sampling(logit_bias=dict.fromkeys(range(count), 1.0))),
        pb.GenerateRequest(guide=pb.Guide(choices=pb.Choices(texts=[""] * count))),
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * count)),
        pb.ScoreRequest(continuations=["a"] * count),
        pb.DetokenizeRequest(token_ids=[300] * count),
        infer,
        parameters,
        tgis,
    ]


@pytest.mark.parametrize("message", many_parts(), ids=lambda message: type(message).__name__)
def test_message_with_too_many_parts_is_refused(message: Message) -> None:
    with pytest.raises(RefusedError, match=r"more than 100000 fields"):
        parse(type(message), message.SerializeToString(), 16 << 20)


def test_large_message_with_few_parts_is_parsed() -> None:
    text = pb.GenerateRequest(text="a" * (4 << 20))
    ids = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[3000] * (PARTS_MAX - 10)))
    for message in (text, ids):
        assert parse(pb.GenerateRequest, message.SerializeToString(), 16 << 20) == message


def test_count_of_random_messages_equals_their_content() -> None:
    generator = random.Random(1)
    for _ in range(50):
        fields = {str(index): "x" for index in range(generator.randrange(20))}
        bias = dict.fromkeys(range(generator.randrange(20)), 1.0)
        ids = [generator.randrange(1 << 31) for _ in range(generator.randrange(20))]
        score = pb.GenerateRequest(
            inputs=pb.Inputs(fields=fields),
            sampling=pb.Sampling(logit_bias=bias, allowed_token_ids=ids),
            max_new_tokens=3,
        )
        # An entry is a field with a key and a value. A packed list is a field with its elements.
        expected = 3 + 3 * (len(fields) + len(bias)) + bool(ids) + len(ids)
        assert count_parts(score.DESCRIPTOR, score.SerializeToString()) == expected


@pytest.mark.parametrize(
    "data", [b"\x0a", b"\x0a\x05abc", b"\x0b", b"\x0f", b"\x08" + b"\xff" * 11, b"\x09abc"]
)
def test_invalid_encoding_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        count_parts(pb.GenerateRequest.DESCRIPTOR, data)
