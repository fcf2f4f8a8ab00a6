"""The commands of deploy/kubernetes/lws.yaml, in pods that are named as LeaderWorkerSet names them.

Each pod is a network namespace with the host name, the names of the other pods and the variables
that LeaderWorkerSet gives it. The containers' commands are those of the manifest; only the paths,
the device and the dtype differ.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

import serving
from serving.config import ServerConfig
from serving.request import Ask
from tests.support.manifests import container_command, manifest
from tests.support.pod_network import NETWORK, Pod, PodNetwork, unavailable_reason
from tests.support.servers import ROOT, WAIT_S, eventually

CHECKPOINT = "examples/demo/checkpoint"
READY_S = 240.0
METRICS_PORT = 9002
HTTP_PORT = 9001
PROMPT = "past: I walk ->"
TOKENS = 24
STREAM_TOKENS = 200
STARTS = 20
SETTINGS = {"insecure": True, "metrics_host": "0.0.0.0", "metrics_port": METRICS_PORT}


class Group:
    """The running pods of one group; the leader is the first."""

    def __init__(self, network: PodNetwork, agents: "list[subprocess.Popen[str]]") -> None:
        self._network = network
        self.agents = agents  # torchrun of each pod.

    @property
    def leader(self) -> Pod:
        return self._network.pods[0]

    def frontends(self) -> list[str]:
        """The names of the pods whose front end is ready."""
        return [pod.name for pod in self._network.pods if self._status(pod) == 200]

    def is_ready(self) -> bool:
        return bool(self.frontends())

    def complete(self) -> str:
        with self._network.joined(), self._request(TOKENS, stream=False) as response:
            text: str = json.load(response)["choices"][0]["text"]
        return text

    def stream(self, started: threading.Event) -> list[str]:
        """The events of a stream; `started` is set when the first one has arrived."""
        events = []
        with self._network.joined(), self._request(STREAM_TOKENS, stream=True) as response:
            for line in response:
                if line.startswith(b"data: "):
                    events.append(line.removeprefix(b"data: ").decode().strip())
                    started.set()
        return events

    def ranks(self, pod: int) -> list[int]:
        agent = self.agents[pod].pid
        children = Path(f"/proc/{agent}/task/{agent}/children").read_text()
        return [int(pid) for pid in children.split()]

    def _status(self, pod: Pod) -> int:
        url = f"http://{pod.address}:{METRICS_PORT}/health/ready"
        try:
            with self._network.joined(), urllib.request.urlopen(url, timeout=WAIT_S) as page:
                status: int = page.status
        except urllib.error.HTTPError as error:
            with error:
                return error.code
        except OSError:
            return 0
        return status

    def _request(self, tokens: int, *, stream: bool) -> Any:
        body = {"model": "preamble", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        body |= {"stream": stream, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://{self.leader.address}:{HTTP_PORT}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        return urllib.request.urlopen(request, timeout=WAIT_S)


@pytest.fixture(scope="module", autouse=True)
def namespaces() -> None:
    if (reason := unavailable_reason()) is not None:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def expected_text() -> str:
    """The answer of the same model in one process."""
    with serving.open_engine(ServerConfig(CHECKPOINT, dtype="float64")) as engine:
        ask = Ask(PROMPT, max_new_tokens=TOKENS, temperature=0.0, ignore_ends=True)
        (answer,) = engine.generate([ask])
    text: str = answer.text
    return text


@contextmanager
def running_group(folder: Path, *, rendezvous: str = "static") -> Iterator[Group]:
    """Start the pods of one group, and wait until a front end is ready.

    `rendezvous`: with c10d, torchrun itself orders the nodes.
    """
    lws = manifest("LeaderWorkerSet", "preamble-lws")
    template = lws["spec"]["leaderWorkerTemplate"]
    size = template["size"]
    leader = f"{lws['metadata']['name']}-0"
    names = [leader, *(f"{leader}-{index}" for index in range(1, size))]
    domain = f"{lws['metadata']['name']}.default"
    folder.mkdir()
    hosts = folder / "hosts"
    lines = [
        f"{NETWORK}{number + 2} {name}.{domain}.svc.cluster.local {name}.{domain} {name}"
        for number, name in enumerate(names)
    ]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    settings = folder / "settings.yaml"
    settings.write_text(yaml.safe_dump({**SETTINGS, "step_timeout_s": 60.0, "drain_s": 60.0}))
    with ExitStack() as resources:
        network = resources.enter_context(PodNetwork(names, hosts))
        group = Group(network, [])
        # Not in `folder`: the path of a socket has at most 107 characters.
        runtime = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="pods-")))
        resources.callback(_end, group)
        for index, pod in enumerate(network.pods):
            role = "leaderTemplate" if index == 0 else "workerTemplate"
            variables = {
                "LWS_LEADER_ADDRESS": f"{leader}.{domain}",
                "LWS_GROUP_SIZE": str(size),
                "LWS_WORKER_INDEX": str(index),
            }
            command = _local_command(template[role]["spec"], variables, settings)
            if rendezvous == "c10d":
                command = _with_c10d(command, variables["LWS_LEADER_ADDRESS"])
            (runtime / str(index)).mkdir()
            environment = {**os.environ, **variables, "XDG_RUNTIME_DIR": str(runtime / str(index))}
            environment.pop("GLOO_SOCKET_IFNAME", None)  # Other tests set it to the loopback.
            output = resources.enter_context((folder / f"{pod.name}.log").open("w"))
            group.agents.append(pod.start(command, environment, output, ROOT))
        try:
            eventually(
                lambda: group.is_ready() or any(agent.poll() is not None for agent in group.agents),
                within_s=READY_S,
            )
            assert group.is_ready()
        except AssertionError:
            for pod in network.pods:
                print((folder / f"{pod.name}.log").read_text()[-4000:])
            raise
        yield group


def _local_command(pod: Any, variables: dict[str, str], settings: Path) -> list[str]:
    (container,) = pod["containers"]
    torchrun, *words = container_command(container, variables)
    assert torchrun == "torchrun"
    replacements = {
        "/models/model": CHECKPOINT,
        "--config=/config/config.yaml": f"--config={settings}",
        "--device=cuda": "--device=cpu",
    }
    assert replacements.keys() <= set(words)
    words = [replacements.get(word, word) for word in words]
    return [
        *(sys.executable, "-m", "torch.distributed.run", *words),
        *("--dtype=float64", "--served-model-name=preamble"),
    ]


def _with_c10d(command: list[str], leader: str) -> list[str]:
    static_flags = ("--node-rank=", "--master-addr=", "--master-port=")
    words = [word for word in command if not word.startswith(static_flags)]
    words[3:3] = ["--rdzv-backend=c10d", f"--rdzv-endpoint={leader}:29400", "--rdzv-id=group"]
    return words


def _end(group: Group) -> None:
    for agent in group.agents:
        if agent.poll() is None:
            agent.terminate()
    for agent in group.agents:
        try:
            agent.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            agent.kill()
            agent.wait()


@pytest.mark.slow
def test_the_leaders_frontend_survives_the_loss_of_a_workers_rank_and_drains(
    tmp_path: Path, expected_text: str
) -> None:
    with running_group(tmp_path / "0") as group:
        assert group.frontends() == [group.leader.name]
        assert group.complete() == expected_text

        os.kill(group.ranks(pod=1)[0], signal.SIGKILL)
        killed_s = time.monotonic()
        eventually(lambda: not group.is_ready())
        eventually(group.is_ready, within_s=READY_S)
        print(f"serving again {time.monotonic() - killed_s:.1f} s after the loss of a rank")
        assert group.frontends() == [group.leader.name]
        assert [agent.poll() for agent in group.agents] == [None, None]
        assert group.complete() == expected_text

        # The pods of a group are deleted at the same time.
        started = threading.Event()
        events: list[str] = []
        caller = threading.Thread(target=lambda: events.extend(group.stream(started)))
        caller.start()
        assert started.wait(WAIT_S)
        for agent in group.agents:
            agent.terminate()
        caller.join(WAIT_S)
        assert events[-1] == "[DONE]"
        finishes = [json.loads(event)["choices"][0]["finish_reason"] for event in events[:-1]]
        assert finishes[-1] == "length"


def start_groups(folder: Path, starts: int) -> list[list[str]]:
    """Start a group several times; return the pods with a front end at each start."""
    frontends = []
    for number in range(starts):
        started_s = time.monotonic()
        with running_group(folder / str(number)) as group:
            frontends.append(group.frontends())
            print(f"start {number}: {time.monotonic() - started_s:.1f} s, {frontends[-1]}")
    return frontends


@pytest.mark.soak
def test_the_frontend_is_in_the_leaders_pod_at_twenty_starts(tmp_path: Path) -> None:
    assert start_groups(tmp_path, STARTS) == [["preamble-lws-0"]] * STARTS


@pytest.mark.soak
def test_torchruns_own_order_of_nodes_puts_the_frontend_into_a_workers_pod(tmp_path: Path) -> None:
    """The reason for the static rendezvous: '-' sorts before '.' in the pods' full names."""
    with running_group(tmp_path / "0", rendezvous="c10d") as group:
        assert group.frontends() == ["preamble-lws-0-1"]
