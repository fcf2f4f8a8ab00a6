"""What an install has and a checkout lacks: the stubs of the protos, and the library in C.

All else stands in pyproject.toml. A wheel with the library is for one kind of machine, and says so
in its name; it serves every Python, as the library knows nothing of Python.
"""

import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


class Modules(build_py):
    """The step that collects the modules: stubs first, then the library beside what was copied."""

    def run(self) -> None:
        if _run("protos/build.py") != 0:
            sys.exit("the protos do not compile")
        super().run()
        folder = ROOT if self.editable_mode else Path(self.build_lib).resolve()
        _run("gpt/cpu/build.py", str(folder / "gpt" / "cpu"))


class Wheel(bdist_wheel):
    """The wheel, named after what was built."""

    def run(self) -> None:
        self.run_command("build")
        build = self.get_finalized_command("build_py")
        if any(Path(build.build_lib).glob("gpt/cpu/*.so")):
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        return (self.python_tag, "none", super().get_tag()[2])


def _run(*words: str) -> int:
    # Not imported: an isolated build does not find our folders, and must not load torch.
    return subprocess.run([sys.executable, ROOT / words[0], *words[1:]], check=False).returncode


setup(cmdclass={"build_py": Modules, "bdist_wheel": Wheel})
