"""A process in a root file system of its own, with the mounts of a container.

`chroot_command` returns a command that starts this module in new mount and PID namespaces. There it
mounts the file systems of the container, changes the root and the user, and executes the program,
which has PID 1. The mounts exist only in the namespace: the kernel removes them when its last
process has ended, and no other process sees them. If the process that started the command ends, the
kernel kills the processes in the namespaces too. Only root can run the command.
"""

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.support.containerfile import ContainerfileError

PR_SET_PDEATHSIG = 1
# Devices of the host that a container has.
DEVICES = ("full", "null", "random", "urandom", "zero")
# Files of the host that a container engine mounts, so that host names resolve.
NETWORK_FILES = ("/etc/hosts", "/etc/resolv.conf")
NAMESPACES = ("--mount", "--propagation", "private", "--pid", "--fork", "--kill-child")


@dataclass(frozen=True)
class ChrootProcess:
    """A program and what it sees. Paths of the program are paths in the new root."""

    root: str
    program: list[str]
    environment: dict[str, str]
    user: str = "root"  # A name or a number.
    folder: str = "/"
    # By path in the root: a file or a folder of the host.
    volumes: dict[str, str] = field(default_factory=dict)
    read_only_volumes: dict[str, str] = field(default_factory=dict)
    has_read_only_root: bool = True


def unsupported_reason() -> str | None:
    """Return why `chroot_command` does not work on this machine; None if it works."""
    if os.geteuid() != 0:
        return "chroot needs root"
    for program in ("unshare", "setpriv", "mount"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    # A mount and a change of the root directory, as the process does them.
    script = "mount -t tmpfs tmpfs /mnt && chroot / true"
    trial = subprocess.run(
        ["unshare", *NAMESPACES, "sh", "-c", script], capture_output=True, text=True, check=False
    )
    if trial.returncode:
        return f"mounts and chroot are not allowed: {trial.stderr.strip()}"
    return None


def chroot_command(process: ChrootProcess) -> list[str]:
    """Return the command line. Run it with `tests` on the module path."""
    # setpriv: unshare ends with its parent, and --kill-child then ends the program.
    parent_ends = ["setpriv", "--pdeathsig", "KILL", "unshare", *NAMESPACES]
    module = [sys.executable, "-m", "tests.support.chroot_process"]
    return [*parent_ends, *module, json.dumps(asdict(process))]


def program_pid(command_pid: int) -> int:
    """Return the PID of the program, as this process sees it. `command_pid`: the command's PID."""
    (child,) = Path(f"/proc/{command_pid}/task/{command_pid}/children").read_text().split()
    return int(child)


def mounts_below(folder: Path) -> list[str]:
    """Return the mount points in a folder that this process sees."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return [point for point in points if Path(point).is_relative_to(folder.resolve())]


def user_ids(root: Path, user: str) -> tuple[int, int, str]:
    """Return the user id, the group id and the home folder of a user.

    `user`: a name in the root's passwd file, or a number.
    """
    for line in (root / "etc/passwd").read_text().splitlines():
        name, _, uid, gid, _, home, _ = line.split(":")
        if user in (name, uid):
            return int(uid), int(gid), home
    if not user.isdecimal():
        raise ContainerfileError(
            f"USER {user}: neither a name in the image's /etc/passwd nor a number; a group after "
            "the user is not supported"
        )
    return int(user), 0, "/"


def run(process: ChrootProcess) -> None:
    """Mount, change the root and the user, and execute the program."""
    root, prctl = Path(process.root), ctypes.CDLL(None).prctl
    uid, gid, home = user_ids(root, process.user)
    _mount("--bind", root, root)
    for target in NETWORK_FILES:
        _bind(Path(target), root / target.lstrip("/"), is_read_only=True)
    _mount("-t", "proc", "proc", root / "proc")
    _mount("-t", "sysfs", "-o", "ro", "sysfs", root / "sys")
    _mount_devices(root / "dev")
    if process.has_read_only_root:
        _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", root / "tmp")
    # A volume can be in one of the mounts above, and none of them may hide it.
    for volumes, is_read_only in ((process.volumes, False), (process.read_only_volumes, True)):
        for target, source in volumes.items():
            _bind(Path(source), root / target.lstrip("/"), is_read_only=is_read_only)
    if process.has_read_only_root:
        _mount("-o", "remount,bind,ro", root)
    os.chroot(root)
    os.chdir(process.folder)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    # The kernel has cleared the signal that --kill-child had set, because the user has changed.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    environment = {"HOME": home} | process.environment
    os.execvpe(process.program[0], process.program, environment)


def _mount_devices(folder: Path) -> None:
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for name in DEVICES:
        (folder / name).touch()
        _mount("--bind", f"/dev/{name}", folder / name)
    (folder / "fd").symlink_to("/proc/self/fd")
    (folder / "shm").mkdir()
    _mount("-t", "tmpfs", "-o", "mode=1777", "tmpfs", folder / "shm")


def _bind(source: Path, target: Path, *, is_read_only: bool) -> None:
    """Mount a file or a folder of the host. A missing mount point is created, as by an engine."""
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    _mount("--bind", source, target)
    if is_read_only:
        _mount("-o", "remount,bind,ro", target)


def _mount(*words: str | Path) -> None:
    subprocess.run(["mount", *map(str, words)], check=True)


def run_checked(process: ChrootProcess, timeout_s: float, environment: Mapping[str, str]) -> str:
    """Run the program, which must end with exit code 0; return its output.

    `environment`: of this module's process. The program gets only its own environment.
    """
    completed = subprocess.run(
        chroot_command(process),
        env=dict(environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert completed.returncode == 0, f"{process.program}\n{completed.stdout}"
    return completed.stdout


def main(argv: Sequence[str]) -> None:
    (text,) = argv
    run(ChrootProcess(**json.loads(text)))


if __name__ == "__main__":
    main(sys.argv[1:])
