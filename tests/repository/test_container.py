"""The image contains what Triton and FlashInfer need at run time: a C compiler and a cache."""

import os
from pathlib import Path

import pytest
import yaml

from tests.support.chroot_process import (
    ChrootProcess,
    mounts_below,
    run_checked,
    unsupported_reason,
    user_ids,
)
from tests.support.containerfile import (
    CONTAINERFILE,
    ContainerfileError,
    final_stage,
    parse_stages,
)

TEMPORARY = "/tmp"
BASE = {"PATH": "/usr/local/bin:/usr/bin:/bin"}
# The variables that move the caches of libraries out of the home folder.
CACHE_VARIABLES = (
    "TRITON_CACHE_DIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "FLASHINFER_WORKSPACE_BASE",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)
COMPILER = {"gcc", "libc6-dev"}  # On Debian, gcc provides `cc`, and libc6-dev the C headers.


@pytest.mark.parametrize(("device", "needs_compiler"), [("cpu", False), ("cuda", True)])
def test_an_image_for_a_gpu_contains_a_c_compiler(
    device: str, needs_compiler: bool, tmp_path: Path
) -> None:
    packages = final_stage().packages(device, tmp_path)
    assert "libgomp1" in packages
    assert packages & COMPILER == (COMPILER if needs_compiler else set())


def test_the_caches_are_on_a_volume_that_belongs_to_the_user(tmp_path: Path) -> None:
    stage = final_stage()
    environment = stage.environment("cuda", BASE)
    (volume,) = stage.arguments("VOLUME")
    for name in CACHE_VARIABLES:
        is_temporary = environment[name] == "/tmp"
        assert is_temporary or Path(environment[name]).is_relative_to(volume), name
    commands = stage.commands("cuda", tmp_path)
    assert ["install", "-d", "-o", "preamble", volume] in commands
    assert [
        "useradd",
        "--uid",
        *stage.arguments("USER"),
        "--no-create-home",
        "preamble",
    ] in commands


def test_the_pod_mounts_a_writable_volume_for_each_cache() -> None:
    environment = final_stage().environment("cuda", BASE)
    manifest = CONTAINERFILE.parent / "kubernetes/preamble.yaml"
    (deployment,) = [
        document
        for document in yaml.safe_load_all(manifest.read_text())
        if document["kind"] == "Deployment"
    ]
    pod = deployment["spec"]["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    (container,) = pod["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    writable = [
        mount["mountPath"]
        for mount in container["volumeMounts"]
        if not mount.get("readOnly") and volumes[mount["name"]].get("emptyDir") == {}
    ]
    for name in CACHE_VARIABLES:
        assert any(Path(environment[name]).is_relative_to(folder) for folder in writable), name


def test_the_environment_expands_variables_of_earlier_instructions() -> None:
    environment = final_stage().environment("cuda", BASE)
    assert environment["PATH"] == f"/preamble/bin:{BASE['PATH']}"
    assert environment["PREAMBLE_DEVICE"] == "cuda"


def test_stages_have_the_images_and_names_of_their_from_instructions() -> None:
    stages = parse_stages(CONTAINERFILE.read_text(), {"PYTHON": "3.11"})
    assert [(stage.image.rpartition("/")[2], stage.name) for stage in stages] == [
        ("python:3.11-slim", "build"),
        ("python:3.11-slim", ""),
    ]
    assert stages[-1].arguments("COPY") == ["--from=build /preamble /preamble"]
    assert stages[-1].arguments("RUN") == final_stage().arguments("RUN")


@pytest.mark.parametrize(
    "text",
    [
        "FROM debian\nHEALTHCHECK NONE",
        "FROM debian\nRUN true\nSHELL",
        "FROM --platform=linux/arm64 debian",
        "RUN true\nFROM debian",
        "FROM debian\nRUN apt-get install \\\n  gcc\n    libc6-dev",
    ],
)
def test_an_instruction_that_the_parser_does_not_know_is_an_error(text: str) -> None:
    with pytest.raises(ContainerfileError):
        parse_stages(text, {})


@pytest.fixture
def chroot_folder(tmp_path: Path) -> Path:
    """A root without programs."""
    root = tmp_path / "root"
    for name in ("dev", "etc", "proc", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    return root


def test_a_user_without_an_id_is_an_error(chroot_folder: Path) -> None:
    assert user_ids(chroot_folder, "root") == (0, 0, "/root")
    assert user_ids(chroot_folder, "10001") == (10001, 0, "/")
    for user in ("10001:0", "nobody"):
        with pytest.raises(ContainerfileError, match=f"^USER {user}: .*; a group .* not supported"):
            user_ids(chroot_folder, user)


def test_a_temporary_file_system_hides_no_volume(chroot_folder: Path, tmp_path: Path) -> None:
    if reason := unsupported_reason():
        pytest.skip(reason)
    for name in ("bin", "lib", "lib64"):
        (chroot_folder / name).symlink_to(f"usr/{name}")
    volume = tmp_path / "volume"
    volume.mkdir()
    process = ChrootProcess(
        str(chroot_folder),
        ["touch", f"{TEMPORARY}/volume/file", f"{TEMPORARY}/other"],
        {"PATH": "/usr/bin"},
        volumes={f"{TEMPORARY}/volume": str(volume)},
        read_only_volumes={"/usr": "/usr"},
    )
    run_checked(process, 60.0, os.environ)
    assert [path.name for path in volume.iterdir()] == ["file"]
    assert list((chroot_folder / "tmp").iterdir()) == []
    assert mounts_below(tmp_path) == []
