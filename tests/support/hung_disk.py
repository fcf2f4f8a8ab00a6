"""A disk that does not answer: a library, loaded into a process, blocks its accesses to a folder.

The library replaces functions of the C library. As long as a flag file exists, a call with a path
below the folder does not return, as on a network file system whose server is unreachable.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = r"""
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static void wait_for_disk(const char *path) {
    const char *folder = getenv("HUNG_FOLDER"), *flag = getenv("HUNG_FLAG");
    if (!path || !folder || !flag || strncmp(path, folder, strlen(folder)))
        return;
    const struct timespec pause = {0, 20000000};
    while (syscall(SYS_faccessat, AT_FDCWD, flag, F_OK) == 0)
        nanosleep(&pause, NULL);
}

static mode_t mode_argument(int flags, va_list arguments) {
    return flags & (O_CREAT | O_TMPFILE) ? va_arg(arguments, mode_t) : 0;
}

#define OPEN(name)                                                     \
    int name(const char *path, int flags, ...) {                       \
        va_list arguments;                                             \
        va_start(arguments, flags);                                    \
        mode_t mode = mode_argument(flags, arguments);                 \
        va_end(arguments);                                             \
        wait_for_disk(path);                                           \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name); \
        return real(path, flags, mode);                                \
    }
OPEN(open)
OPEN(open64)

#define STAT(name, type)                                                  \
    int name(const char *restrict path, struct type *restrict status) {   \
        wait_for_disk(path);                                              \
        int (*real)(const char *, struct type *) = dlsym(RTLD_NEXT, #name); \
        return real(path, status);                                        \
    }
STAT(stat, stat)
STAT(stat64, stat64)
STAT(lstat, stat)
STAT(lstat64, stat64)

#define FSTATAT(name, type)                                                           \
    int name(int folder, const char *restrict path, struct type *restrict s, int flags) { \
        wait_for_disk(path);                                                          \
        int (*real)(int, const char *, struct type *, int) = dlsym(RTLD_NEXT, #name); \
        return real(folder, path, s, flags);                                          \
    }
FSTATAT(fstatat, stat)
FSTATAT(fstatat64, stat64)

DIR *opendir(const char *path) {
    wait_for_disk(path);
    DIR *(*real)(const char *) = dlsym(RTLD_NEXT, "opendir");
    return real(path);
}

int rename(const char *old, const char *new) {
    wait_for_disk(new);
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "rename");
    return real(old, new);
}
"""


class HungDisk:
    """Blocks the accesses to `folder` in processes that are started with `environment`."""

    def __init__(self, folder: Path, build: Path) -> None:
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler is available")
        library = build / "hung_disk.so"
        command = [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
        subprocess.run(command, input=SOURCE, text=True, check=True)
        self._flag = build / "hung"
        self.environment = {
            "LD_PRELOAD": str(library),
            "HUNG_FOLDER": str(folder),
            "HUNG_FLAG": str(self._flag),
        }

    def stop(self) -> None:
        """Answer no accesses."""
        self._flag.touch()

    def resume(self) -> None:
        self._flag.unlink()
