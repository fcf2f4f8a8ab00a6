"""Host limits: CPU cores and memory that this process may use, from the kernel and its cgroup.

A container limits its processes by a cgroup. torch and Python do not read the limits of a cgroup,
so this module does. It supports only version 2 of cgroups, at the usual mount point, and imports
only the standard library.
"""

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")


def usable_cores(*, within_quota: bool = True, cgroup: Path = CGROUP) -> int:
    """Return the number of CPU cores in this process's affinity mask.

    With `within_quota` the cgroup's CPU quota, rounded up to whole cores, is an upper limit.
    """
    cores = len(os.sched_getaffinity(0))
    if not within_quota:
        return cores
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, -(-int(quota) // int(period)))


def total_memory_bytes(*, within_limit: bool = True, cgroup: Path = CGROUP) -> int:
    """Return the host's physical memory in bytes.

    With `within_limit` the cgroup's memory limit is returned if it is smaller.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = _memory_limit(cgroup) if within_limit else None
    return total if limit is None else min(total, limit)


def available_memory_bytes(*, cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int:
    """Return the bytes that this process may still allocate; the page cache counts as free."""
    fields = dict(line.split(":") for line in meminfo.read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = _memory_limit(cgroup)
        if limit is not None:
            used = int((cgroup / "memory.current").read_text())
            # The kernel reclaims cached file pages, for example of a checkpoint, when memory is
            # needed.
            lines = (cgroup / "memory.stat").read_text().splitlines()
            used -= int(dict(line.split() for line in lines).get("inactive_file", 0))
            available = min(available, limit - used)
    except OSError:
        pass  # A file of the cgroup is missing, so only the host's memory counts.
    return max(0, available)


def _memory_limit(cgroup: Path) -> int | None:
    """Return the memory limit of the cgroup in bytes; None without a limit or with cgroups v1."""
    try:
        limit = (cgroup / "memory.max").read_text().strip()
    except OSError:
        return None
    return None if limit == "max" else int(limit)
