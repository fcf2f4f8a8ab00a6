"""The final stage of deploy/Containerfile: its instructions, and the commands that they run."""

import os
import re
import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path
from string import Template

CONTAINERFILE = Path(__file__).resolve().parents[2] / "deploy/Containerfile"
# Commands of the final stage that need root or a network.
PRIVILEGED_COMMANDS = ("apt-get", "install", "rm", "useradd")


@dataclass(frozen=True)
class FinalStage:
    """The instructions of the final stage, in order."""

    instructions: tuple[tuple[str, str], ...]  # Name and arguments.

    @classmethod
    def read(cls) -> "FinalStage":
        """Read the instructions after the last FROM."""
        lines = [
            line for line in CONTAINERFILE.read_text().splitlines() if not line.startswith("#")
        ]
        text = "\n".join(lines).replace("\\\n", " ")
        instructions = re.findall(r"^([A-Z]+) +(.+)$", text.rsplit("\nFROM ", 1)[1], flags=re.M)
        return cls(tuple((name, " ".join(arguments.split())) for name, arguments in instructions))

    def arguments(self, instruction: str) -> list[str]:
        """Return the arguments of each instruction with this name."""
        return [arguments for name, arguments in self.instructions if name == instruction]

    def environment(self, device: str, base: dict[str, str]) -> dict[str, str]:
        """Return the environment of the server in an image that is built for `device`.

        `base`: the environment of the base image.
        """
        environment = dict(base)
        for arguments in self.arguments("ENV"):
            for assignment in shlex.split(arguments):
                name, value = assignment.split("=", 1)
                variables = environment | {"DEVICE": device}
                environment[name] = Template(value).substitute(variables)
        return environment

    def commands(self, device: str, folder: Path) -> list[list[str]]:
        """Run the RUN instructions with stand-ins for PRIVILEGED_COMMANDS.

        Return the words of each call of a stand-in. `folder`: an empty folder for the stand-ins.
        """
        log = folder / "calls"
        log.touch()
        for name in PRIVILEGED_COMMANDS:
            stand_in = folder / name
            stand_in.write_text(f'#!/bin/sh\necho {name} "$@" >>{log}\n')
            stand_in.chmod(0o755)
        for script in self.arguments("RUN"):
            environment = os.environ | {"DEVICE": device, "PATH": str(folder)}
            subprocess.run(["/bin/sh", "-ec", script], env=environment, check=True)
        return [shlex.split(line) for line in log.read_text().splitlines()]

    def packages(self, device: str, folder: Path) -> set[str]:
        """Return the Debian packages that the stage installs in an image for `device`."""
        installs = [
            words for words in self.commands(device, folder) if words[:2] == ["apt-get", "install"]
        ]
        return {word for words in installs for word in words[2:] if not word.startswith("-")}
