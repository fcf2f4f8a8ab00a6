"""Build steps beyond pyproject.toml: gRPC stubs, CPU kernels and the commit of a wheel.

A wheel with the compiled library has a platform tag. It works with every supported Python version,
since the library does not use Python's C API.
"""

import runpy
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class BuildModules(build_py):
    """Generates the stubs, copies the modules, then compiles the kernels.

    The library is written into the copy; an editable installation has no copy, so the library is
    written into the source folder.
    """

    def run(self) -> None:
        if _run_script("protos/build.py") != 0:
            sys.exit("protos/build.py failed; correct the errors that it printed")
        super().run()
        package_root = ROOT if self.editable_mode else Path(self.build_lib).resolve()
        # A failure is not an error: without the library, torch runs the same operations.
        _run_script("gpt/cpu/build.py", str(package_root / "gpt" / "cpu"))
        if not self.editable_mode:  # A checkout reads its git history instead.
            # Run by its path, because an isolated build cannot import the package `gpt`.
            describe_commit = runpy.run_path(str(ROOT / "gpt/software_versions.py"))[
                "describe_commit"
            ]
            (package_root / "gpt" / "commit.txt").write_text(describe_commit(ROOT) or "")


class PlatformWheel(bdist_wheel):
    """Builds a platform wheel if the kernels were compiled, else a pure Python wheel."""

    def run(self) -> None:
        self.run_command("build")
        build = self.get_finalized_command("build_py")
        if any(Path(build.build_lib).glob("gpt/cpu/*.so")):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return (self.python_tag, "none", super().get_tag()[2])


def _run_script(script: str, *arguments: str) -> int:
    # A child process, because an isolated build cannot import the packages `protos` and `gpt`.
    return subprocess.run([sys.executable, ROOT / script, *arguments], check=False).returncode


setup(cmdclass={"build_py": BuildModules, "bdist_wheel": PlatformWheel})
