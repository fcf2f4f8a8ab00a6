"""The house rules, held by a test: sizes, names, headers, who may import whom, what no file says.

Each rule reads one module's syntax tree and yields (line, what is wrong); a second test plants a
breach for every rule, since a rule that sees nothing passes too. A file that may break a rule is
listed in EXCEPTIONS with its reason. What a linter can see is left to the linter.
"""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_CHARACTERS_MAX = 100
POSITIONAL_PARAMETERS_MAX = 6
HEADER_LINES = range(3, 7)

# (file, rule): reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("gpt/triton_kernels.py", "few_parameters"): "Triton's kernels have no keyword-only ones",
    ("gpt/triton_rows.py", "few_parameters"): "Triton's kernels have no keyword-only ones",
}

# Who may import whom. `planning` stands on top of all others, `bench` on that, nothing on both.
IMPORTS: dict[str, set[str]] = {
    "gpt": set(),
    "protos": set(),
    "clients": {"protos"},
    "serving": {"gpt", "protos"},
    "ptuning": {"gpt"},
    "checkpoints_tools": {"gpt"},
}
ALL = {*IMPORTS, "preamble"}
IMPORTS |= {"planning": ALL, "bench": {*ALL, "planning"}, "examples": ALL}
IMPORTS |= {"tests": {*IMPORTS, "preamble"}}
# The root module takes each folder's command line, and nothing deeper.
COMMAND_LINES = {f"{folder}.__main__" for folder in IMPORTS}

# Modules (or folders) that never name these packages.
WITHOUT: dict[str, set[str]] = {
    "gpt": {"grpc", "asyncio", "prometheus_client", "multiprocessing"},
    "gpt/config.py": {"torch"},
    "gpt/costs.py": {"torch"},
    "gpt/errors.py": {"torch"},
    "gpt/sampling.py": {"torch"},
    "gpt/sharding.py": {"torch"},
    "gpt/training_costs.py": {"torch"},
    "clients": {"torch"},
    "planning/calibration.py": {"torch", "grpc", "asyncio"},
    "planning/command_estimate.py": {"torch", "grpc", "asyncio"},
    "planning/command_serve.py": {"torch", "grpc", "asyncio"},
    "planning/command_train.py": {"torch", "grpc", "asyncio"},
    "planning/continuous.py": {"torch", "grpc", "asyncio"},
    "planning/efficiency.py": {"torch", "grpc", "asyncio"},
    "planning/faster_transformer.py": {"torch", "grpc", "asyncio"},
    "planning/pricing.py": {"torch", "grpc", "asyncio"},
    "planning/child.py": {"torch", "grpc", "asyncio"},
    "planning/limits.py": {"torch", "grpc", "asyncio"},
    "planning/measure.py": {"torch", "grpc", "asyncio"},
    "planning/presets.py": {"torch", "grpc", "asyncio"},
    "planning/training_plan.py": {"torch", "grpc", "asyncio"},
    "planning/serving_search.py": {"torch", "grpc", "asyncio"},
    "planning/serving_plan.py": {"torch", "grpc", "asyncio"},
    "planning/serving_wish.py": {"torch", "grpc", "asyncio"},
    "planning/simulation.py": {"torch", "grpc", "asyncio"},
    "planning/specification.py": {"torch", "grpc", "asyncio"},
    "planning/static_batch.py": {"torch", "grpc", "asyncio"},
    "planning/steps.py": {"torch", "grpc", "asyncio"},
    "planning/training.py": {"torch", "grpc", "asyncio"},
    "planning/training_memory.py": {"torch", "grpc", "asyncio"},
    "planning/training_time.py": {"torch", "grpc", "asyncio"},
    "planning/validate.py": {"torch", "grpc", "asyncio"},
    "planning/training_search.py": {"torch", "grpc", "asyncio"},
    "planning/training_words.py": {"torch", "grpc", "asyncio"},
    "planning/tuning.py": {"torch", "grpc", "asyncio"},
    "preamble.py": {"torch", "grpc"},
    "serving/admission.py": {"torch", "grpc", "asyncio"},
    "serving/ahead.py": {"torch", "grpc", "asyncio"},
    "serving/blocks.py": {"torch", "grpc", "asyncio"},
    "serving/deadlines.py": {"torch", "grpc", "asyncio"},
    "serving/draft.py": {"torch", "grpc", "asyncio"},
    "serving/engine.py": {"torch", "grpc"},
    "serving/guess.py": {"torch", "grpc", "asyncio"},
    "serving/messages.py": {"torch", "grpc", "asyncio"},
    "serving/pace.py": {"torch", "grpc", "asyncio"},
    "serving/prefix.py": {"torch", "grpc", "asyncio"},
    "serving/request.py": {"torch"},
    "serving/room.py": {"torch", "grpc", "asyncio"},
    "serving/rows.py": {"torch", "grpc", "asyncio"},
    "serving/runner.py": {"grpc", "asyncio"},
    "serving/scheduler.py": {"torch", "grpc", "asyncio"},
    "serving/sequences.py": {"torch", "grpc", "asyncio"},
    "serving/access.py": {"torch", "grpc", "asyncio"},
    "serving/front.py": {"torch", "grpc"},
    "serving/rpc.py": {"torch"},
    "serving/wires": {"torch"},
    "serving/stream.py": {"torch", "grpc"},
    "serving/waiting.py": {"torch", "grpc", "asyncio"},
}
# Importing these must not load torch, not even through others: planners and refusals are quick.
TORCH_FREE = (
    *("gpt.config", "gpt.costs", "gpt.errors", "gpt.sampling", "gpt.sharding"),
    *("preamble", "serving.scheduler", "planning.continuous"),
    *("planning.command_estimate", "planning.command_serve", "planning.command_train"),
    *("planning.files", "planning.telling"),
)

BUILT = re.compile(r"build|dist|__pycache__|.*\.egg-info")
BANNED_STEMS = re.compile(r"(test_)?(utils?|base|managers?|helpers?|common|core|misc)")
UNSAID = {
    re.compile(r"(?<![\w.])/(work|tmp|home|root|opt|Users)/\w"): "a path of one machine",
    re.compile(r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org)"): "a package registry",
    re.compile(r"\bTOD[O]\b(?!\(#\d+\))|\bFIXM[E]\b|\bXX[X]\b"): "a wish without an issue's number",
}
SPOKEN = {".py", ".md", ".toml", ".txt", ".proto", ".yaml", ".yml", ".sh", ""}


class Module(NamedTuple):
    path: str  # From the root, with slashes.
    text: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def folder(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


Breach = tuple[int, str]


def files(folder: Path = ROOT) -> Iterator[Path]:
    """Every file that is written by hand, without what tools have put beside it."""
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name != ".ci"
        if hidden or "_pb2" in path.name or BUILT.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from files(path)
        else:
            yield path


@cache
def modules() -> list[Module]:
    paths = [path for path in files() if path.suffix == ".py"]
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths]


def short_file(module: Module) -> Iterator[Breach]:
    lines = len(module.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield lines, f"{lines} lines, at most {FILE_LINES_MAX}; give its second subject a file"


def short_functions(module: Module) -> Iterator[Breach]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES_MAX:
                yield node.lineno, f"{node.name}: {lines} lines, at most {FUNCTION_LINES_MAX}"


def few_parameters(module: Module) -> Iterator[Breach]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [one.arg for one in node.args.posonlyargs + node.args.args]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > POSITIONAL_PARAMETERS_MAX:
                most = f"at most {POSITIONAL_PARAMETERS_MAX}, then keyword-only"
                yield node.lineno, f"{node.name}: {count} positional parameters, {most}"


def short_lines(module: Module) -> Iterator[Breach]:
    for number, line in enumerate(module.text.splitlines(), 1):
        if len(line) > LINE_CHARACTERS_MAX:
            yield number, f"{len(line)} characters, at most {LINE_CHARACTERS_MAX}"


def header(module: Module) -> Iterator[Breach]:
    if not module.text:
        return  # An empty __init__.py says all it has to.
    lines = len((ast.get_docstring(module.tree) or "").splitlines())
    fewest = 1 if module.folder == "tests" or module.path.endswith("__init__.py") else 3
    if not fewest <= lines < HEADER_LINES.stop:
        yield 1, f"a header of {lines} lines; need {fewest} to {HEADER_LINES[-1]}: what, how, not"


def imported(module: Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import, wherever it stands, and of import_module("...")."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            literal = [arg for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(arg.value)) for arg in literal)


def directions(module: Module) -> Iterator[Breach]:
    for line, name in imported(module):
        target = name.split(".")[0]
        if target not in {*IMPORTS, "preamble"} or target == module.folder:
            continue
        if module.folder == "preamble":
            if not any(f"{name}.".startswith(f"{main}.") for main in COMMAND_LINES):
                yield line, f"imports {name}; the root module takes only a folder's __main__"
        elif target not in IMPORTS[module.folder]:
            allowed = ", ".join(sorted(IMPORTS[module.folder])) or "nothing of ours"
            yield line, f"imports {name}; {module.folder} may import {allowed}"


def absent_packages(module: Module) -> Iterator[Breach]:
    places = (module.path, module.folder, module.path.rpartition("/")[0])
    unwanted = set[str]().union(*(WITHOUT.get(place, set()) for place in places))
    for line, name in imported(module):
        if name.split(".")[0] in unwanted:
            yield line, f"imports {name}, which is not its business"


def quick_to_collect(module: Module) -> Iterator[Breach]:
    """Those two take seconds to import: a test imports them where it needs them."""
    if module.folder == "tests":
        heads = ast.Module(
            [one for one in module.tree.body if isinstance(one, ast.Import | ast.ImportFrom)], []
        )
        for line, name in imported(Module(module.path, ast.unparse(heads))):
            if name.split(".")[0] in ("transformers", "peft"):
                yield line, f"imports {name} at its head; import it in the function that needs it"


Rule = Callable[[Module], Iterator[Breach]]
# Every rule, with a module that breaks it.
RULES: dict[Rule, Module] = {
    short_file: Module("gpt/x.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    short_functions: Module("gpt/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    few_parameters: Module("gpt/x.py", "def f(self, a, b, c, d, e, f, g): ..."),
    short_lines: Module("gpt/x.py", "#" * (LINE_CHARACTERS_MAX + 1)),
    header: Module("gpt/x.py", '"""Too short."""'),
    directions: Module("ptuning/x.py", "def f():\n    from serving.engine import Engine"),
    absent_packages: Module("gpt/config.py", "import torch.distributed as dist"),
    quick_to_collect: Module("tests/test_x.py", "from transformers import GPT2Config"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps_the_rule(rule: Rule) -> None:
    found = [
        f"{module.path}:{line}: {what}"
        for module in modules()
        if (module.path, rule.__name__) not in EXCEPTIONS
        for line, what in rule(module)
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_sees_a_breach(rule: Rule) -> None:
    assert list(rule(RULES[rule]))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("preamble.py", "from serving.engine import Engine"),
        ("clients/x.py", "import gpt"),
        ("serving/x.py", "import ptuning.train"),
        ("gpt/x.py", "import planning"),
        ("bench/x.py", "from tests import ranks"),
        ("planning/x.py", "import_module('bench.load')"),
    ],
)
def test_an_import_against_the_direction_is_seen(path: str, line: str) -> None:
    assert list(directions(Module(path, line)))


def test_an_import_along_the_direction_is_not() -> None:
    assert not list(directions(Module("preamble.py", "from serving.__main__ import main")))
    assert not list(directions(Module("serving/x.py", "from protos.preamble.v1 import admin_pb2")))


def test_every_exception_is_still_needed() -> None:
    by_path = {module.path: module for module in modules()}
    by_name = {rule.__name__: rule for rule in RULES}
    for path, rule in EXCEPTIONS:
        assert list(by_name[rule](by_path[path])), f"{path} keeps the rule {rule} now"


def test_no_file_or_folder_has_a_name_that_says_nothing() -> None:
    paths = [path.relative_to(ROOT) for path in files()]
    found = [
        str(path)
        for path in paths
        for part in (*path.parts[:-1], path.stem)
        if BANNED_STEMS.fullmatch(part)
    ]
    assert not found, f"{found}: name it after what it does"


def test_no_file_names_a_machine_a_registry_or_an_unnumbered_wish() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}: {what}: {match.group()}"
        for path in files()
        if path.suffix in SPOKEN
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        for pattern, what in UNSAID.items()
        if (match := pattern.search(line))
    ]
    assert not found, "\n" + "\n".join(found)


def test_torch_is_not_loaded_by_what_must_be_quick() -> None:
    program = "import sys, {0}; sys.exit('torch' in sys.modules)"
    for module in TORCH_FREE:
        done = subprocess.run([sys.executable, "-c", program.format(module)], cwd=ROOT, check=False)
        assert done.returncode == 0, f"importing {module} fails, or loads torch"


def test_the_wheel_lists_every_folder_that_is_shipped() -> None:
    folders = {
        path.relative_to(ROOT).parent.as_posix().replace("/", ".")
        for path in files()
        if path.suffix in (".py", ".proto") and path.parent != ROOT
    }
    kept = {folder for folder in folders if folder.split(".")[0] not in ("tests", "examples")}
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == kept
