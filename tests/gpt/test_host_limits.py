"""Host limits: affinity, CPU quota, memory limit and page cache, from the files of a cgroup."""

import os
from pathlib import Path

import pytest

from gpt.host_limits import available_memory_bytes, total_memory_bytes, usable_cores

MIB = 1 << 20
CORES = len(os.sched_getaffinity(0))
TOTAL = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def cgroup_with(folder: Path, **files: str) -> Path:
    """A folder with the files of a cgroup; `memory_max` is memory.max."""
    for name, text in files.items():
        (folder / name.replace("_", ".", 1)).write_text(text)
    return folder


def meminfo_with(folder: Path, available_mib: int) -> Path:
    path = folder / "meminfo"
    path.write_text(
        f"MemTotal:        16384000 kB\nMemFree:          100000 kB\n"
        f"MemAvailable:   {available_mib * 1024} kB\nHugePages_Total:       0\n"
    )
    return path


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("max 100000\n", CORES),
        ("100000 100000\n", 1),
        ("50000 100000\n", 1),
        ("100001 100000\n", min(CORES, 2)),
        ("999900000 100000\n", CORES),
        ("damaged\n", CORES),
    ],
)
def test_a_cpu_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    cgroup = cgroup_with(tmp_path, cpu_max=quota)
    assert usable_cores(cgroup=cgroup) == cores
    assert usable_cores(within_quota=False, cgroup=cgroup) == CORES


def test_the_affinity_mask_limits_the_cores(tmp_path: Path) -> None:
    mask = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mask)})
    try:
        assert usable_cores(cgroup=tmp_path) == usable_cores(within_quota=False) == 1
    finally:
        os.sched_setaffinity(0, mask)
    assert usable_cores(cgroup=tmp_path) == CORES


@pytest.mark.parametrize(
    ("limit", "total"), [("max\n", TOTAL), (f"{MIB}\n", MIB), (f"{2 * TOTAL}\n", TOTAL)]
)
def test_a_memory_limit_below_the_physical_memory_counts(
    tmp_path: Path, limit: str, total: int
) -> None:
    cgroup = cgroup_with(tmp_path, memory_max=limit)
    assert total_memory_bytes(cgroup=cgroup) == total
    assert total_memory_bytes(within_limit=False, cgroup=cgroup) == TOTAL


def test_without_a_cgroup_the_host_is_the_only_limit(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    meminfo = meminfo_with(tmp_path, 500)
    assert usable_cores(cgroup=missing) == CORES
    assert total_memory_bytes(cgroup=missing) == TOTAL
    assert available_memory_bytes(cgroup=missing, meminfo=meminfo) == 500 * MIB


@pytest.mark.parametrize(
    ("limit_mib", "available_mib"),
    [
        (1000, 400),  # 700 MiB are used, and 100 MiB of them are page cache.
        (2000, 500),  # The host has less than the cgroup allows.
        (600, 0),
        (100, 0),
    ],
)
def test_available_memory_is_that_of_the_host_or_the_cgroup(
    tmp_path: Path, limit_mib: int, available_mib: int
) -> None:
    cgroup = cgroup_with(
        tmp_path,
        memory_max=f"{limit_mib * MIB}\n",
        memory_current=f"{700 * MIB}\n",
        memory_stat=f"anon {600 * MIB}\ninactive_file {100 * MIB}\nactive_file 0\n",
    )
    meminfo = meminfo_with(tmp_path, 500)
    available = available_memory_bytes(cgroup=cgroup, meminfo=meminfo)
    assert available == available_mib * MIB


def test_incomplete_cgroup_files_do_not_limit_the_memory(tmp_path: Path) -> None:
    cgroup = cgroup_with(tmp_path, memory_max=f"{MIB}\n", memory_current="0\n")
    meminfo = meminfo_with(tmp_path, 500)
    assert available_memory_bytes(cgroup=cgroup, meminfo=meminfo) == 500 * MIB


def test_this_host_has_cores_and_memory() -> None:
    assert 1 <= usable_cores() <= CORES
    assert 0 < available_memory_bytes() <= TOTAL and 0 < total_memory_bytes() <= TOTAL
