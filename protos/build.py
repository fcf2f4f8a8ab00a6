"""Proto compiler script: writes Python stubs beside the protos, for `make protos` and the wheel.

A proto keeps its canonical name (`preamble/v1/x.proto`) in its descriptor, because clients in other
languages and server reflection use this name. In Python, `preamble` is the module of the command
(preamble.py), so the script rewrites the imports that protoc generates: `preamble.v1` becomes
`protos.preamble.v1`. Protos of other APIs (protos/foreign) are compiled to descriptor sets (.binpb)
instead of stubs.
"""

import re
import sys
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

PROTOS = Path(__file__).resolve().parent
STUBS = PROTOS / "preamble" / "v1"
FOREIGN = PROTOS / "foreign"
IMPORT = re.compile(r"^from preamble\.v1 import", re.MULTILINE)


def main() -> int:
    """Replace all stubs; return 0, or the exit code of protoc, which prints its own errors."""
    for stub in STUBS.glob("*_pb2*"):
        stub.unlink()
    options = [f"-I{PROTOS}", f"-I{files('grpc_tools') / '_proto'}"]
    options += [f"--{kind}_out={PROTOS}" for kind in ("python", "pyi", "grpc_python")]
    code = protoc.main(["protoc", *options, *map(str, sorted(STUBS.glob("*.proto")))])
    for stub in STUBS.glob("*_pb2*"):
        stub.write_text(IMPORT.sub("from protos.preamble.v1 import", stub.read_text()))
    for proto in sorted(FOREIGN.glob("*.proto")):
        target = proto.with_suffix(".binpb")
        options = [f"-I{FOREIGN}", f"--descriptor_set_out={target}", "--include_imports"]
        code = code or protoc.main(["protoc", *options, str(proto)])
    return int(code)


if __name__ == "__main__":
    sys.exit(main())
