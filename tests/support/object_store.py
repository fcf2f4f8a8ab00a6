"""A real object store: SeaweedFS with its S3 gateway, on loopback.

`make clients-tools` installs SeaweedFS and obstore under build/clients/object-store. A server under
test finds obstore through PYTHONPATH; the test process itself through `sys.path`.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpt.object_store.object_store import ObjectStore
from tests.support.client_environments import environment
from tests.support.servers import eventually, free_ports

CLIENT = "object-store"
BUCKET = "adapters"
# Random texts, so that a search finds no other text.
KEY_ID, SECRET = "ONLYFORTESTSKEYID7Q3", "only-for-tests/secret-W8kz5vYt1Rb0"
READER_ID, READER_SECRET = "ONLYFORTESTSREADER2", "only-for-tests/reader-Xp4Lm9Qc"
READY_S = 60.0


def packages() -> Path:
    """The folder of the packages in the store's environment; skips a test without them."""
    (folder,) = environment(CLIENT).glob("lib/python3*/site-packages")
    return folder


def put_folder(folder: Path, url: str) -> ObjectStore:
    """Copy a folder into the store."""
    store = ObjectStore(url)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.write(path.relative_to(folder).as_posix(), path.read_bytes())
    return store


class RunningStore:
    """`weed server -s3` on free ports; `stop` and `start` keep the objects."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._weed = environment(CLIENT) / "bin" / "weed"
        self._process: subprocess.Popen[bytes] | None = None
        ports = free_ports(10)
        self._ports = dict(zip(_PORT_FLAGS, ports, strict=False))
        self.endpoint = f"http://127.0.0.1:{self._ports['s3.port']}"
        self.tls_endpoint = f"https://127.0.0.1:{self._ports['s3.port.https']}"
        self.ca_file = folder / "ca.pem"
        self.certificate = folder / "server.pem"  # Its key is beside it.

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a program that uses the store."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_EC2_METADATA_DISABLED": "true",
            "PYTHONPATH": str(packages()),
        }

    def start(self) -> None:
        data = self._folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        identities = self._folder / "identities.json"
        identities.write_text(json.dumps({"identities": _identities()}))
        if not self.ca_file.exists():
            _make_certificates(self._folder)
        arguments = [f"-{flag}={port}" for flag, port in self._ports.items()]
        arguments += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={data}", "-filer", "-s3"]
        arguments += [f"-s3.cert.file={self.certificate}"]
        arguments += [f"-s3.key.file={self._folder / 'server.key'}"]
        arguments += [f"-s3.config={identities}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        arguments += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=30"]
        with (self._folder / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._weed, "server", *arguments], stdout=log, stderr=log, cwd=self._folder
            )
        eventually(self._answers, READY_S)

    def stop(self, number: int = signal.SIGKILL) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)
            self._process.wait()

    def suspend(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        """Whether an object can be written and read."""
        try:
            store = ObjectStore(f"s3://{BUCKET}")
            store.write("probe", b"1")
            return store.read("probe", 1)[0] == b"1"
        except Exception:
            return False


_PORT_FLAGS = (
    "master.port",
    "master.port.grpc",
    "volume.port",
    "volume.port.grpc",
    "filer.port",
    "filer.port.grpc",
    "s3.port",
    "s3.port.grpc",
    "s3.port.https",
)


def _make_certificates(folder: Path) -> None:
    """Make a CA, `ca.pem`, and a certificate of it for 127.0.0.1."""
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\n")
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    sign = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions"
    for words in (
        f"req -x509 {key} -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        f"req {key} -keyout server.key -out server.csr -subj /CN=server",
        f"x509 -req -in server.csr -out server.pem {sign}",
    ):
        subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True)


def _identities() -> list[dict[str, object]]:
    return [
        {
            "name": "writer",
            "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "Write", "List"],
        },
        {
            "name": "reader",
            "credentials": [{"accessKey": READER_ID, "secretKey": READER_SECRET}],
            "actions": [f"Read:{BUCKET}", f"List:{BUCKET}"],
        },
    ]


@contextmanager
def running_store(folder: Path) -> Iterator[RunningStore]:
    """Run a store, and let this process find it and obstore."""
    store = RunningStore(folder)
    names = store.variables
    previous = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    sys.path.append(str(packages()))
    try:
        store.start()
        yield store
    finally:
        store.stop()
        sys.path.remove(str(packages()))
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
