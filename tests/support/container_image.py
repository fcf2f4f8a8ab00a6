"""The image of deploy/Containerfile as a folder: its instructions run in a chroot.

Base images may be out of reach, and a container engine may be missing. `debootstrap` makes a
folder with the packages of a minimal Debian and Debian's Python, which stands for the base image
`python:VERSION-slim`. All instructions of the stages then run in copies of this folder, as an
engine runs them. Processes run with the mounts of `tests.support.chroot_process`.
"""

import ast
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.support.chroot_process import (
    NAMESPACES,
    ChrootProcess,
    chroot_command,
    mounts_below,
    run_checked,
    unsupported_reason,
)
from tests.support.containerfile import (
    CONTAINERFILE,
    ContainerfileError,
    Stage,
    argument_value,
    assignments,
    expand,
    parse_stages,
)

ROOT = Path(__file__).resolve().parents[2]
IGNORE_FILE = CONTAINERFILE.with_name(f"{CONTAINERFILE.name}.containerignore")
DEBOOTSTRAP = ROOT / "build/tools/debootstrap"  # From tests/install_debootstrap.sh.
# By version of Python: the Debian release that has it.
DEBIAN_RELEASES = {"3.11": "bookworm", "3.13": "trixie"}
# Packages of Debian that the image of Python contains in another form.
BASE_PACKAGES = ("ca-certificates", "python-is-python3", "python3-venv")
BASE_ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"}
INSTRUCTION_S_MAX = 1200.0
BOOTSTRAP_S_MAX = 1200.0
PROCESS_S_MAX = 300.0


def unbuildable_reason() -> str | None:
    """Return why no image can be built on this machine; None if one can be built."""
    if reason := unsupported_reason():
        return reason
    return None if _debootstrap() else "debootstrap is not installed: make soak"


def _debootstrap() -> list[str]:
    """Return the command line of debootstrap, without its arguments; empty if there is none."""
    if program := shutil.which("debootstrap"):
        return [program]
    unpacked = DEBOOTSTRAP / "usr/sbin/debootstrap"
    if not unpacked.exists():
        return []
    return ["env", f"DEBOOTSTRAP_DIR={DEBOOTSTRAP / 'usr/share/debootstrap'}", str(unpacked)]


@contextmanager
def folder_without_mounts() -> Iterator[Path]:
    """Yield a temporary folder, and check at the end that nothing is mounted in it.

    A folder with a mount is not deleted, because that could delete files of the host.
    """
    folder = Path(tempfile.mkdtemp(prefix="container-"))
    try:
        yield folder
    finally:
        mounts = mounts_below(folder)
        if not mounts:
            shutil.rmtree(folder)
        assert not mounts, f"mounts are left: {mounts}"


@dataclass(frozen=True)
class Image:
    """A root folder, and the settings of its processes."""

    root: Path
    environment: dict[str, str]
    user: str = "root"
    folder: str = "/"
    volumes: tuple[str, ...] = ()
    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()  # Of CMD.
    stop_signal: int = signal.SIGTERM


@dataclass(frozen=True)
class Container:
    """An image with volumes. Its processes see the root read-only, and have the image's user."""

    image: Image
    volumes: dict[str, str]  # By path in the root: a folder of the host.
    read_only_volumes: dict[str, str] = field(default_factory=dict)

    def process(self, program: Sequence[str], **environment: str) -> ChrootProcess:
        """Return a process of the container; `environment` is added to the image's."""
        return ChrootProcess(
            str(self.image.root),
            list(program),
            self.image.environment | environment,
            user=self.image.user,
            folder=self.image.folder,
            volumes=self.volumes,
            read_only_volumes=self.read_only_volumes,
        )

    def command(self, arguments: Sequence[str], **environment: str) -> list[str]:
        """Return the command line that runs the image's program with `arguments` for CMD's."""
        return chroot_command(self.process([*self.image.entrypoint, *arguments], **environment))

    def run(self, *program: str, **environment: str) -> str:
        """Run a program; return its output."""
        return run_checked(self.process(program, **environment), PROCESS_S_MAX, _host_environment())


def create_container(image: Image, folder: Path, read_only: Mapping[str, Path]) -> Container:
    """Return a container with an empty volume for each VOLUME, in `folder`.

    As an engine does, a new volume gets the owner and the mode of the folder in the image.
    `read_only`: files and folders of the host by path in the root.
    """
    volumes = {}
    for target in image.volumes:
        volume = folder / target.strip("/").replace("/", "-")
        subprocess.run(["cp", "-a", _inside(image.root, target), volume], check=True)
        volumes[target] = str(volume)
    return Container(image, volumes, {target: str(source) for target, source in read_only.items()})


class ImageBuilder:
    """Builds the stages of a file in chroots below `folder`."""

    def __init__(self, folder: Path, build_arguments: Mapping[str, str]) -> None:
        self._folder = folder
        self._build_arguments = build_arguments
        self._images: dict[str, Image] = {}  # Of the named stages that are built.
        self._pip = PipSettings.read()
        self._bases: dict[str, Path] = {}

    def build(self, text: str) -> Image:
        """Build all stages; return the image of the last one."""
        image = None
        for number, stage in enumerate(parse_stages(text, self._build_arguments)):
            image = self._build_stage(stage, self._folder / f"stage-{number}")
            if stage.name:
                self._images[stage.name] = image
        assert image is not None, "the file has no stage"
        return image

    def stage(self, name: str) -> Image:
        """Return the image of a named stage, after `build`."""
        return self._images[name]

    def run_as_root(self, image: Image, *program: str) -> str:
        """Run a program that may change the image; return its output."""
        return self._run(replace(image, user="root"), list(program), {})

    def _build_stage(self, stage: Stage, root: Path) -> Image:
        subprocess.run(["cp", "-a", self._base_root(stage.image), root], check=True)
        image, variables = Image(root, dict(BASE_ENVIRONMENT)), dict[str, str]()
        for name, arguments in stage.instructions:
            variables |= image.environment
            match name:
                case "ARG":
                    variables |= argument_value(arguments, self._build_arguments)
                case "CMD":
                    image = replace(image, arguments=tuple(json.loads(arguments)))
                case "COPY":
                    self._copy(image, shlex.split(expand(arguments, variables)))
                case "ENTRYPOINT":
                    image = replace(image, entrypoint=tuple(json.loads(arguments)))
                case "ENV":
                    environment = image.environment | assignments(arguments, variables)
                    image = replace(image, environment=environment)
                case "EXPOSE":
                    pass  # It documents the ports.
                case "RUN":
                    self._run(image, ["/bin/sh", "-c", arguments], variables)
                case "STOPSIGNAL":
                    image = replace(image, stop_signal=signal.Signals[arguments])
                case "USER":
                    image = replace(image, user=expand(arguments, variables))
                case "VOLUME":
                    volumes = (*image.volumes, *shlex.split(expand(arguments, variables)))
                    image = replace(image, volumes=volumes)
                case "WORKDIR":
                    image = replace(image, folder=expand(arguments, variables))
                    _inside(root, image.folder).mkdir(parents=True, exist_ok=True)
                case _:
                    raise ContainerfileError(f"the instruction {name} cannot be applied")
        return image

    def _run(self, image: Image, program: list[str], variables: Mapping[str, str]) -> str:
        """Run a program in the image's root, which it may change, with pip's settings."""
        process = ChrootProcess(
            str(image.root),
            program,
            {**image.environment, **variables, **self._pip.environment},
            user=image.user,
            folder=image.folder,
            read_only_volumes={path: path for path in self._pip.paths},
            has_read_only_root=False,
        )
        return run_checked(process, INSTRUCTION_S_MAX, _host_environment())

    def _copy(self, image: Image, words: list[str]) -> None:
        options = [word for word in words if word.startswith("--")]
        *sources, target = [word for word in words if not word.startswith("--")]
        stages = [option.removeprefix("--from=") for option in options]
        if len(sources) != 1 or len(stages) > 1 or any(name not in self._images for name in stages):
            raise ContainerfileError(f"COPY {' '.join(words)}: one source, and --from=STAGE only")
        if stages:
            source = _inside(self._images[stages[0]].root, sources[0])
        else:
            source = _copy_context(self._folder / "context") / sources[0]
        destination = _inside(image.root, str(Path(image.folder) / target))
        if source.is_dir():  # Its content is copied.
            destination.mkdir(parents=True, exist_ok=True)
        content = f"{source}/." if source.is_dir() else str(source)
        # An engine gives the copies to root.
        copy = ["cp", "-a", "--no-preserve=ownership"]
        subprocess.run([*copy, content, destination], check=True)

    def _base_root(self, image: str) -> Path:
        """Return a folder with the content that stands for a base image."""
        if image not in self._bases:
            match = re.fullmatch(r"(?:.*/)?python:(\d+\.\d+)-slim", image)
            if match is None or match[1] not in DEBIAN_RELEASES:
                raise ContainerfileError(f"FROM {image}: no Debian release stands for this image")
            self._bases[image] = self._bootstrap(match[1])
        return self._bases[image]

    def _bootstrap(self, python: str) -> Path:
        root = self._folder / f"base-{python}"
        command = ["unshare", *NAMESPACES, *_debootstrap(), "--variant=minbase"]
        command += [f"--include={','.join(BASE_PACKAGES)}", DEBIAN_RELEASES[python], str(root)]
        bootstrap = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BOOTSTRAP_S_MAX,
            check=False,
        )
        assert bootstrap.returncode == 0, bootstrap.stdout[-2000:]
        # The image of Python has Python's headers, but not the C library's: so the package is
        # unpacked without its dependencies.
        headers = f"libpython{python}-dev"
        script = f"apt-get update && apt-get download {headers} && dpkg -x {headers}_*.deb /"
        self._run(Image(root, dict(BASE_ENVIRONMENT), folder="/tmp"), ["sh", "-ec", script], {})
        return root


@dataclass(frozen=True)
class PipSettings:
    """The settings of the host's pip, for pip in a chroot."""

    environment: dict[str, str]
    paths: tuple[str, ...]  # Files and folders that the settings name.

    @classmethod
    def read(cls) -> "PipSettings":
        command = [sys.executable, "-m", "pip", "config", "list"]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        environment = {}
        for line in listing.splitlines():
            name, _, literal = line.partition("=")
            variable = name.rpartition(".")[2].replace("-", "_").upper()
            environment[f"PIP_{variable}"] = " ".join(str(ast.literal_eval(literal)).split())
        paths = {
            # A folder of packages can refer to a folder beside it.
            str(path.parent if word.startswith("file:") else path)
            for value in environment.values()
            for word in value.split()
            if (path := Path(word.removeprefix("file://"))).is_absolute() and path.exists()
        }
        return cls(environment, tuple(sorted(paths)))


def _copy_context(target: Path) -> Path:
    """Copy the checkout, without the files that the ignore file names; return the copy."""
    if target.exists():
        return target
    patterns = [_ignore_pattern(line) for line in IGNORE_FILE.read_text().splitlines() if line]

    def ignored(folder: str, names: list[str]) -> list[str]:
        paths = {name: (Path(folder) / name).relative_to(ROOT).as_posix() for name in names}
        return [
            name
            for name, path in paths.items()
            if any(pattern.fullmatch(path) for pattern in patterns)
        ]

    return Path(shutil.copytree(ROOT, target, symlinks=True, ignore=ignored))


def _ignore_pattern(line: str) -> re.Pattern[str]:
    """Return the pattern of a line of the ignore file. Its only wildcards are **/ and *."""
    if re.search(r"[?!\[#]", line):
        raise ContainerfileError(f"{IGNORE_FILE.name}: {line!r} has an unknown wildcard")
    words = re.split(r"(\*\*/|\*)", line)
    wildcards = {"**/": "(?:.*/)?", "*": "[^/]*"}
    return re.compile("".join(wildcards.get(word, re.escape(word)) for word in words))


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")


def _host_environment() -> dict[str, str]:
    """Return an environment in which a process can import the module that mounts."""
    return os.environ | {"PYTHONPATH": str(ROOT)}
