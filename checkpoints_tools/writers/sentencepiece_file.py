"""SentencePiece model file: its pieces with types and scores, and its normalization settings.

The sentencepiece library does not report all of these fields, so they are read from the file's
protobuf. The schema below contains only the fields that an export needs, with the field numbers and
defaults of sentencepiece_model.proto. The module does not encode text.
"""

from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

_SCHEMA = """
name: "preamble/sentencepiece_file.proto" package: "preamble.sentencepiece_file" syntax: "proto2"
message_type { name: "Piece"
  field { name: "piece" number: 1 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "score" number: 2 label: LABEL_OPTIONAL type: TYPE_FLOAT }
  field { name: "type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" } }
message_type { name: "Trainer"
  field { name: "model_type" number: 3 label: LABEL_OPTIONAL type: TYPE_INT32 default_value: "1" }
  field { name: "treat_whitespace_as_suffix" number: 24 label: LABEL_OPTIONAL type: TYPE_BOOL }
  field { name: "byte_fallback" number: 35 label: LABEL_OPTIONAL type: TYPE_BOOL } }
message_type { name: "Normalizer"
  field { name: "precompiled_charsmap" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES }
  field { name: "add_dummy_prefix" number: 3 label: LABEL_OPTIONAL type: TYPE_BOOL
          default_value: "true" }
  field { name: "remove_extra_whitespaces" number: 4 label: LABEL_OPTIONAL type: TYPE_BOOL
          default_value: "true" }
  field { name: "escape_whitespaces" number: 5 label: LABEL_OPTIONAL type: TYPE_BOOL
          default_value: "true" } }
message_type { name: "Model"
  field { name: "pieces" number: 1 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: "Piece" }
  field { name: "trainer" number: 2 label: LABEL_OPTIONAL type: TYPE_MESSAGE type_name: "Trainer" }
  field { name: "normalizer" number: 3 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: "Normalizer" }
  field { name: "denormalizer" number: 5 label: LABEL_OPTIONAL type: TYPE_MESSAGE
          type_name: "Normalizer" } }
"""


class PieceType(IntEnum):
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


class SentencePieceAlgorithm(IntEnum):
    """How a model encodes text; the names are those of sentencepiece."""

    UNIGRAM = 1
    BPE = 2
    WORD = 3
    CHAR = 4


@dataclass(frozen=True)
class SentencePieceEntry:
    """One piece of the vocabulary; its id is its position in the file."""

    text: str
    score: float
    type: PieceType


@dataclass(frozen=True)
class SentencePieceFile:
    pieces: tuple[SentencePieceEntry, ...]
    algorithm: SentencePieceAlgorithm
    byte_fallback: bool
    # Whether the file maps characters to others, for example by the rules of nmt_nfkc.
    maps_characters: bool
    maps_decoded_characters: bool
    adds_dummy_prefix: bool
    removes_extra_whitespace: bool
    escapes_whitespace: bool
    whitespace_is_suffix: bool


@cache
def _model_class() -> Any:
    pool = descriptor_pool.DescriptorPool()  # A pool of its own, without the library's messages.
    pool.Add(text_format.Parse(_SCHEMA, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(
        pool.FindMessageTypeByName("preamble.sentencepiece_file.Model")
    )


def parse_sentencepiece_file(content: bytes) -> SentencePieceFile:
    """Parse a model file that the sentencepiece library has opened already."""
    model = _model_class().FromString(content)
    normalizer = model.normalizer
    return SentencePieceFile(
        pieces=tuple(
            SentencePieceEntry(piece.piece.decode(), piece.score, PieceType(piece.type))
            for piece in model.pieces
        ),
        algorithm=SentencePieceAlgorithm(model.trainer.model_type),
        byte_fallback=model.trainer.byte_fallback,
        maps_characters=bool(normalizer.precompiled_charsmap),
        maps_decoded_characters=bool(model.denormalizer.precompiled_charsmap),
        adds_dummy_prefix=normalizer.add_dummy_prefix,
        removes_extra_whitespace=normalizer.remove_extra_whitespaces,
        escapes_whitespace=normalizer.escape_whitespaces,
        whitespace_is_suffix=model.trainer.treat_whitespace_as_suffix,
    )
