"""deploy/Containerfile: its stages, their instructions, and the commands that they run.

An instruction or an option that this module does not know is an error, so that no test passes
without it.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import NamedTuple

CONTAINERFILE = Path(__file__).resolve().parents[2] / "deploy/Containerfile"
# Commands of the final stage that need root or a network.
PRIVILEGED_COMMANDS = ("apt-get", "install", "rm", "useradd")
# Instructions of a stage; FROM begins a stage.
INSTRUCTIONS = frozenset(
    {"ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "RUN", "STOPSIGNAL", "USER", "VOLUME"}
    | {"WORKDIR"}
)


class ContainerfileError(Exception):
    """An instruction that the module does not know."""


class Instruction(NamedTuple):
    """An instruction, with one space between its arguments."""

    name: str
    arguments: str


@dataclass(frozen=True)
class Stage:
    """A stage of the file: its base image and its instructions, in order."""

    image: str
    name: str  # Empty if the stage has none.
    instructions: tuple[Instruction, ...]

    def arguments(self, instruction: str) -> list[str]:
        """Return the arguments of each instruction with this name."""
        return [arguments for name, arguments in self.instructions if name == instruction]

    def environment(self, device: str, base: dict[str, str]) -> dict[str, str]:
        """Return the environment of the server in an image that is built for `device`.

        `base`: the environment of the base image.
        """
        environment = dict(base)
        for arguments in self.arguments("ENV"):
            environment |= assignments(arguments, environment | {"DEVICE": device})
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


def final_stage() -> Stage:
    return parse_stages(CONTAINERFILE.read_text(), {})[-1]


def parse_stages(text: str, build_arguments: Mapping[str, str]) -> list[Stage]:
    """Return the stages of a file.

    `build_arguments`: values of ARG instructions, by name, in place of their defaults.
    """
    variables: dict[str, str] = {}  # Arguments before the first FROM.
    stages: list[Stage] = []
    for name, arguments in _parse_instructions(text):
        if name == "FROM":
            words = expand(arguments, variables).split()
            if not (len(words) == 1 or (len(words) == 3 and words[1].upper() == "AS")):
                raise ContainerfileError(
                    f"FROM {arguments}: write FROM IMAGE or FROM IMAGE AS NAME"
                )
            stages.append(Stage(words[0], words[2] if len(words) == 3 else "", ()))
        elif stages:
            stage = stages[-1]
            instructions = (*stage.instructions, Instruction(name, arguments))
            stages[-1] = Stage(stage.image, stage.name, instructions)
        elif name == "ARG":
            variables |= argument_value(arguments, build_arguments)
        else:
            raise ContainerfileError(f"{name} before the first FROM")
    return stages


def _parse_instructions(text: str) -> list[Instruction]:
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    instructions = []
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        match = re.fullmatch(r"([A-Za-z]+) +(.+)", line)
        name = match[1].upper() if match else ""
        if match is None or name not in INSTRUCTIONS | {"FROM"}:
            raise ContainerfileError(f"unknown instruction: {line}")
        instructions.append(Instruction(name, " ".join(match[2].split())))
    return instructions


def argument_value(arguments: str, build_arguments: Mapping[str, str]) -> dict[str, str]:
    """Return the variable that an ARG instruction sets; without a value, it sets none."""
    name, separator, default = arguments.partition("=")
    if name in build_arguments:
        return {name: build_arguments[name]}
    return {name: default} if separator else {}


def assignments(arguments: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of an ENV instruction. It expands only variables that are set before."""
    pairs = [word.partition("=") for word in shlex.split(arguments)]
    return {name: expand(value, variables) for name, _, value in pairs}


def expand(text: str, variables: Mapping[str, str]) -> str:
    """Replace $NAME and ${NAME}; an unknown name, or ${NAME:-OTHER}, is an error."""
    return Template(text).substitute(variables)
