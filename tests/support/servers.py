"""Real servers for tests: a tiny checkpoint, a separate server process, and free ports.

A server's addresses come from the line that it prints when it is ready. Every wait has a time-out,
and a process that outlives its test is ended by its pid.
"""

import json
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

import yaml

from checkpoints_tools.conversion.convert import write_native
from clients.client import Client, Retries
from gpt.adapters.adapter_file import Card, build_adapter, save_adapter
from gpt.adapters.prompt_template import PromptTemplate
from gpt.checkpoint.digest import identify
from gpt.config import GPTConfig
from gpt.formats.registry import open_checkpoint
from tests.support.models import lively
from tests.support.trained_tokenizers import sentencepiece_model

ROOT = Path(__file__).resolve().parents[2]
# Time-outs against hangs, far above the usual time.
START_S = 240.0
WAIT_S = 60.0

# Rotary, so that a completion can be long enough to be interrupted. Stored in fp32, as adapters
# are, and served in fp64, where tokens do not depend on the batch.
CONFIG = GPTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    vocab_size=640,
    max_position_embeddings=4096,
    position_embedding_type="rope",
    normalization="RMSNorm",
    activation="silu",
    gated=True,
    untie_embeddings_and_output_weights=True,
    dtype="float32",
)


def write_checkpoint(folder: Path, *, tokenizer: bool = True) -> Path:
    """A random model; without a tokenizer its texts are numbers, and no token ends them early."""
    folder.mkdir(parents=True, exist_ok=True)
    source = None
    if tokenizer:
        source = folder / "tokenizer.model"
        source.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    write_native(lively(CONFIG), folder / "checkpoint", tokenizer=source)
    return folder / "checkpoint"


def write_adapter(
    path: Path,
    checkpoint: Path,
    token_ids: list[int],
    *,
    template: PromptTemplate | None = None,
    base: str | None = None,
) -> None:
    """An adapter equal to a prompt: the embeddings of these tokens. `base`: a false base digest."""
    opened = open_checkpoint(checkpoint)
    embedding = opened.read("embedding.word_embeddings.weight")
    digest = base or identify(opened).digest
    card = Card("instruction", base_digest=digest, template=template, method="instruction")
    save_adapter(build_adapter(card, embedding[token_ids]), path)


def without_model_name(text: str) -> str:
    """A scrape, or a part of it, without the label `model_name`."""
    label = 'model_name="[^"]*"'
    return re.sub(rf"\{{{label}\}}|,{label}|(?<=\{{){label},", "", text)


@dataclass
class Server:
    """`preamble serve`, running."""

    process: "subprocess.Popen[str]"
    ready: str  # The line it printed.

    @property
    def address(self) -> str:
        return self.ready_field("grpc")

    @property
    def http_address(self) -> str:
        return self.ready_field("http")

    def client(self, timeout_s: float = WAIT_S) -> Client:
        """A client that raises every refusal, and does not retry by itself."""
        return Client(self.address, timeout_s, retries=Retries(attempts_max=1))

    def get(self, path: str, token: str | None = None) -> tuple[int, str]:
        """Status and body of a page on the HTTP port."""
        return self.request(path, token=token)

    def request(
        self, path: str, body: object = None, *, token: str | None = None
    ) -> tuple[int, str]:
        """Status and body of a call on the HTTP port: a POST of JSON, or without a body a GET."""
        request = urllib.request.Request(f"http://{self.ready_field('http')}{path}")
        if token is not None:
            request.add_header("Authorization", f"Bearer {token}")
        if body is not None:
            request.add_header("Content-Type", "application/json")
            request.data = json.dumps(body).encode()
        try:
            with urllib.request.urlopen(request, timeout=WAIT_S) as page:
                return page.status, page.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def metric(self, series: str) -> float:
        """A series of the scrape by its name, with its labels if it has some; 0 if absent.

        The label `model_name`, which all series have, is ignored.
        """
        for line in self.get("/metrics")[1].splitlines():
            name, _, value = line.rpartition(" ")
            if without_model_name(name) == series:
                return float(value)
        return 0.0

    @property
    def ranks(self) -> list[int]:
        """The processes that the server has started, from any thread."""
        pids: list[int] = []
        for children in Path(f"/proc/{self.process.pid}/task").glob("*/children"):
            with suppress(OSError):  # The thread has ended.
                pids += map(int, children.read_text().split())
        return pids  # In the order of their start: one thread starts them, and numbers wrap.

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def ready_field(self, key: str) -> str:
        match = re.search(rf"\b{key}=(\S+)", self.ready)
        assert match is not None, self.ready
        return match[1]


def is_idle(server: Server) -> bool:
    """Whether no call is open, and no request is running, waiting or using KV blocks."""
    gauges = ("requests_in_flight", "scheduler_running_requests", "scheduler_waiting_requests")
    return all(server.metric(f"preamble_{name}") == 0 for name in (*gauges, "kv_blocks_held"))


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "preamble", *map(str, words)]


@contextmanager
def serving(
    model: Path | str,
    settings: Path | None = None,
    log: Path | None = None,
    *,
    dtype: object = "float64",
    **limits: object,
) -> Iterator[Server]:
    """A separate server on free ports; `limits` are settings, written to the file `settings`.

    Its step time-outs are far above those of a busy machine, unless a setting changes them.
    """
    limits = {"step_timeout_s": 60.0, **limits}
    arguments: list[str | Path] = ["serve", model, "--port", "0", "--http-port", "0"]
    arguments += ["--dtype", str(dtype)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with ExitStack() as resources:
        if settings is None:
            settings = Path(resources.enter_context(TemporaryDirectory())) / "settings.yaml"
        settings.write_text(yaml.safe_dump(limits))
        arguments = [*command(*arguments), "--config", settings]
        yield resources.enter_context(server_process(arguments, ROOT, environment, log))


@contextmanager
def server_process(
    arguments: Sequence[str | Path], folder: Path, environment: dict[str, str], log: Path | None
) -> Iterator[Server]:
    """Start the command line of a server in `folder`, and wait until the server is ready."""
    with ExitStack() as resources:
        stderr = resources.enter_context(open(log, "w")) if log else None
        process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        resources.callback(_exited, process)
        yield Server(process, _first_line(process))


def _exited(process: "subprocess.Popen[str]") -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


def _first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        assert selector.select(START_S), f"no line within {START_S} s"
    line: str = process.stdout.readline()
    assert line.startswith("ready "), f"said {line!r}, exit code {process.poll()}"
    return line


def free_port() -> int:
    """Return a port that the kernel gives to no other process; each process begins elsewhere."""
    return free_ports(1)[0]


def free_ports(count: int) -> list[int]:
    """Return different ports as `free_port` does."""
    ports: list[int] = []
    with ExitStack() as probes:
        for number in range(20_000 + os.getpid() * 7 % 10_000, 32_000):
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", number))
                ports.append(number)
                if len(ports) == count:
                    return ports
    raise AssertionError("no port is free")


class Stalls:
    """Seconds in which the machine did not run this process; they do not count against limits."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        previous = time.monotonic()
        while not self._over.wait(0.01):
            now = time.monotonic()
            self.seconds += max(0.0, now - previous - 0.05)
            previous = now

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Suspend a process during the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def eventually(holds: Callable[[], bool], within_s: float = WAIT_S) -> None:
    """Wait until the condition holds; fail after the time limit."""
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"still not so after {within_s} s"
        time.sleep(0.02)
