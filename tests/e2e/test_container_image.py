"""The image of deploy/Containerfile, built in a chroot: it serves, compiles and drains.

The root is read-only, the user has no privileges, and the environment is the image's. Only the
volume and /tmp can be written. The device is the CPU; what Triton builds for a GPU is built without
one.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.client import Options
from tests.support.chroot_process import chroot_command, mounts_below, program_pid, user_ids
from tests.support.container_image import (
    DEBIAN_RELEASES,
    ROOT,
    Container,
    Image,
    ImageBuilder,
    create_container,
    folder_without_mounts,
    unbuildable_reason,
)
from tests.support.containerfile import CONTAINERFILE
from tests.support.servers import WAIT_S, eventually, server_process
from tests.support.triton_compiled import VERSIONS

pytestmark = pytest.mark.soak

DEMO = ROOT / "examples/demo/checkpoint"
MODEL = "/models/demo"  # The checkpoint, as in docs/operations.md.
PROMPT = "mood: the day was long"
NEW_TOKENS = 200
# The package index of the tests' torch may have no other version of Python.
TESTS_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
PYTHON = TESTS_PYTHON if TESTS_PYTHON in DEBIAN_RELEASES else max(DEBIAN_RELEASES)
# torch's build for CUDA requires this version of Triton (constraints.txt); a CPU build has none.
TRITON = f"triton=={max(VERSIONS)}"
DRIVER_LIBRARY = "libcuda.so.1"
DRIVER_SOURCE = "triton/backends/nvidia/driver.c"
# Prints the user of a process, and which folders it can write.
DESCRIBE = """
import json, os, sys
def writes(folder):
    try:
        with open(os.path.join(folder, "probe"), "w"):
            pass
    except OSError as error:
        return error.strerror
    return "yes"
print(json.dumps({
    "ids": [os.getuid(), os.getgid(), os.getgroups()],
    "writes": {folder: writes(folder) for folder in sys.argv[1:]},
}))
"""
# Triton's own code, which builds and loads its module for the CUDA driver.
BUILD_DRIVER_MODULE = """
from triton.backends.nvidia.driver import CudaUtils
print(sorted(name for name in vars(CudaUtils()) if name == "load_binary"))
"""
# Starts a command, and prints its PID.
START_COMMAND = """
import json, subprocess, sys
process = subprocess.Popen(json.loads(sys.argv[1]))
print(process.pid, flush=True)
process.wait()
"""
LOAD_KERNELS = "from gpt.cpu.kernels import library; print(library() is not None)"


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    if reason := unbuildable_reason():
        pytest.skip(f"no image can be built here: {reason}")
    with folder_without_mounts() as folder:
        yield folder


@pytest.fixture(scope="module")
def image(folder: Path) -> Image:
    builder = ImageBuilder(folder, {"PYTHON": PYTHON, "DEVICE": "cuda"})
    image = builder.build(CONTAINERFILE.read_text())
    builder.run_as_root(image, "pip", "install", "-q", "--no-deps", TRITON)
    _install_driver_stand_in(builder, image)
    return image


def _install_driver_stand_in(builder: ImageBuilder, image: Image) -> None:
    """Put a library where NVIDIA's container toolkit puts libcuda; its functions do nothing.

    Triton links the module for the driver with this library.
    """
    (source,) = image.root.glob(f"preamble/lib/python*/site-packages/{DRIVER_SOURCE}")
    functions = sorted(set(re.findall(r"\bcu[A-Z]\w*(?=\()", source.read_text())))
    assert "cuDeviceGet" in functions
    build = builder.stage("build")
    folder = build.root / build.folder.lstrip("/")  # Where programs of the stage run.
    (folder / "driver.c").write_text(
        "".join(f"int {name}(void) {{ return 100; }}\n" for name in functions)
    )
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{DRIVER_LIBRARY}", "-o", DRIVER_LIBRARY]
    builder.run_as_root(build, "gcc", *flags, "driver.c")
    shutil.copy(folder / DRIVER_LIBRARY, image.root / "usr/local/lib")
    builder.run_as_root(image, "ldconfig")


@pytest.fixture
def container(image: Image, tmp_path: Path) -> Iterator[Container]:
    yield create_container(image, tmp_path, {MODEL: DEMO})
    assert mounts_below(image.root) == []


def test_only_the_volume_and_the_temporary_folder_can_be_written(container: Container) -> None:
    image = container.image
    folders = ["/", "/etc", "/preamble", "/usr/local/lib", MODEL, *image.volumes, "/tmp"]
    state = json.loads(container.run("python", "-c", DESCRIBE, *folders))
    uid, gid, home = user_ids(image.root, image.user)
    assert state["ids"] == [uid, gid, []] and uid != 0
    environment = dict(line.split("=", 1) for line in container.run("env").splitlines())
    assert environment == image.environment | {"HOME": home}
    assert not (image.root / home.lstrip("/")).exists()
    writable = {*image.volumes, "/tmp"}
    assert state["writes"] == {
        folder: "yes" if folder in writable else "Read-only file system" for folder in folders
    }


def test_the_server_answers_and_drains(container: Container, tmp_path: Path) -> None:
    log = tmp_path / "log"
    arguments = [MODEL, "--port", "0", "--http-port", "0"]
    command = container.command(arguments, PREAMBLE_DEVICE="cpu")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    greedy = Options(max_new_tokens=8, temperature=0.0)
    with server_process(command, ROOT, environment, log) as server, server.client() as client:
        answer = client.generate(PROMPT, greedy)
        assert len(answer.token_ids) > 0
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 8, "temperature": 0}
        status, text = server.request("/v1/completions", body)
        assert status == 200, text
        assert json.loads(text)["choices"][0]["text"] == answer.text
        stream = client.stream(PROMPT, Options(max_new_tokens=NEW_TOKENS, ignore_ends=True))
        pieces = [next(stream)]
        os.kill(program_pid(server.process.pid), container.image.stop_signal)
        pieces += list(stream)
        assert sum(len(piece.token_ids) for piece in pieces) == NEW_TOKENS
        assert server.process.wait(WAIT_S) == 0
    assert "event=stopped drained=True" in log.read_text(), log.read_text()


def test_the_cpu_kernels_are_in_the_image_with_their_libraries(container: Container) -> None:
    assert container.run("python", "-c", LOAD_KERNELS).strip() == "True"


def test_triton_builds_its_driver_module_on_the_volume(container: Container) -> None:
    (volume,) = container.volumes.values()
    output = container.run("python", "-c", BUILD_DRIVER_MODULE)
    assert "load_binary" in output
    (module,) = Path(volume).glob("triton/*/cuda_utils*.so")
    assert module.stat().st_uid == user_ids(container.image.root, container.image.user)[0]
    # A restarted container finds the module, and needs no compiler.
    output = container.run("python", "-c", BUILD_DRIVER_MODULE, CC="false")
    assert "load_binary" in output


def test_processes_and_mounts_end_if_their_parent_is_killed(container: Container) -> None:
    command = chroot_command(container.process(["sh", "-c", "echo begun; sleep 600; true"]))
    parent = subprocess.Popen(
        [sys.executable, "-c", START_COMMAND, json.dumps(command)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    command_pid = int(parent.stdout.readline())
    assert parent.stdout.readline() == "begun\n"
    pid = program_pid(command_pid)
    # The mounts exist in the namespace of the process only.
    assert str(container.image.root) in Path(f"/proc/{pid}/mountinfo").read_text()
    parent.kill()
    parent.communicate()
    eventually(lambda: has_ended(command_pid) and has_ended(pid), WAIT_S)


def has_ended(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return not status.exists() or "State:\tZ" in status.read_text()
