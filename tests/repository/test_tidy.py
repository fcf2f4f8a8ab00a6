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

ROOT = Path(__file__).resolve().parents[2]
FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
LINE_CHARACTERS_MAX = 100
POSITIONAL_PARAMETERS_MAX = 6
HEADER_LINES = range(3, 7)

# (file, rule): reason.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "tests/gpt/cpu/test_avx2.py",
        "shared_by_support",
    ): "it plays others' tests on another machine",
    (
        "gpt/attention/triton_kernels.py",
        "few_parameters",
    ): "Triton's kernels have no keyword-only ones",
    (
        "gpt/backends/triton_row_kernels.py",
        "few_parameters",
    ): "Triton's kernels have no keyword-only ones",
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

# A folder's packages by layer: a package imports what is in it and below it, nothing beside it.
# "." is the folder's own modules; a module that is named stands alone.
LAYERS: dict[str, tuple[str, ...]] = {
    "gpt": (
        *(".", "parallel cpu tokenizers", "checkpoint costs", "checkpoint/files attention"),
        *("formats/mappings", "formats/huggingface formats/megatron", "formats/nemo", "formats"),
        *("model", "generation", "backends adapters", "__init__.py"),
    ),
    "serving": (
        *(".", "scheduler adapters", "worker", "engine", "ranks admission", "service", "frontend"),
        "protocols/preamble protocols/openai protocols/kserve protocols/tgis",
        *("protocols", "server.py __init__.py", "__main__.py"),
    ),
    "ptuning": (
        *(".", "data", "prompt", "training", "evaluation", "run", "reporting", "__main__.py"),
    ),
    "planning": (
        *(".", "training inference", "published measurement output", "cli", "__main__.py"),
    ),
    "checkpoints_tools": (
        *(".", "layout", "writers", "conversion", "inspection adapters", "__main__.py"),
    ),
    "clients": (".", "load", "cli", "__main__.py"),
    "bench": ("harness", "suites", "peers", ".", "__main__.py"),
}
LAYER = {
    (folder, package): layer
    for folder, packages in LAYERS.items()
    for layer, some in enumerate(packages)
    for package in some.split()
}

# Packages, with what is in them, or modules that never name these packages.
LATE = {"torch", "grpc", "asyncio"}
WITHOUT: dict[str, set[str]] = {
    "gpt": {"grpc", "asyncio", "prometheus_client", "multiprocessing"},
    "gpt/config.py": {"torch"},
    "gpt/costs": {"torch"},
    "gpt/errors.py": {"torch"},
    "gpt/parallel/sharding.py": {"torch"},
    "gpt/sampling_params.py": {"torch"},
    "gpt/tokenizers": {"torch"},
    "clients": {"torch"},
    "planning": {"grpc", "asyncio"},
    "planning/cli": LATE,
    "planning/inference": LATE,
    "planning/measurement/child_command.py": LATE,
    "planning/measurement/rounds.py": LATE,
    "planning/model_presets.py": LATE,
    "planning/output": LATE,
    "planning/published": LATE,
    "planning/training": LATE,
    "preamble.py": {"torch", "grpc"},
    "serving/adapters": LATE,
    "serving/admission": {"torch", "grpc"},
    "serving/admission/admission.py": LATE,
    "serving/admission/auth.py": LATE,
    "serving/engine": {"torch", "grpc"},
    "serving/frontend": {"torch"},
    "serving/frontend/call.py": {"grpc"},
    "serving/messages.py": LATE,
    "serving/protocols": {"torch"},
    "serving/ranks": {"grpc", "asyncio"},
    "serving/request.py": {"torch"},
    "serving/scheduler": LATE,
    "serving/worker": {"grpc", "asyncio"},
}
# Importing these must not load torch, not even through others: planners and refusals are quick.
TORCH_FREE = (
    *(
        "gpt.config",
        "gpt.costs.inference",
        "gpt.errors",
        "gpt.sampling_params",
        "gpt.parallel.sharding",
    ),
    *("preamble", "serving.scheduler.scheduler", "planning.inference.estimate"),
    *("planning.cli.estimate", "planning.cli.serve", "planning.cli.train"),
    *("planning.output.files", "planning.output.terminal"),
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


def package_of(folder: str, path: str) -> str:
    """The package that has a module, by its path below its folder."""
    parts = path.removesuffix(".py").split("/")
    names = ["/".join(parts[:count]) for count in range(len(parts), 0, -1)]
    packages = [
        package for name in names for package in (f"{name}.py", name) if (folder, package) in LAYER
    ]
    return packages[0] if packages else "."


def upward_imports(module: Module) -> Iterator[Breach]:
    folder, _, path = module.path.partition("/")
    if folder not in LAYERS:
        return
    package, place = package_of(folder, path), path.rpartition("/")[0] or "."
    if package == "." != place or (folder, place) not in LAYER:
        yield 1, f"{folder}/{place} is a package that LAYERS does not know"
        return
    for line, name in imported(module):
        target, _, rest = name.partition(".")
        other = package_of(folder, rest.replace(".", "/"))
        if target == folder and other != package and LAYER[folder, other] >= LAYER[folder, package]:
            yield line, f"imports {name}; {folder}/{other} is not below {folder}/{package}"


def absent_packages(module: Module) -> Iterator[Breach]:
    parts = module.path.split("/")
    places = [module.folder, *("/".join(parts[:count]) for count in range(1, len(parts) + 1))]
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


def shared_by_support(module: Module) -> Iterator[Breach]:
    for line, name in imported(module):
        if name.startswith("tests.") and ".test_" in name:
            yield line, f"imports {name}; what tests share is in tests/support"


Rule = Callable[[Module], Iterator[Breach]]
# Every rule, with a module that breaks it.
RULES: dict[Rule, Module] = {
    short_file: Module("gpt/x.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    short_functions: Module("gpt/x.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    few_parameters: Module("gpt/x.py", "def f(self, a, b, c, d, e, f, g): ..."),
    short_lines: Module("gpt/x.py", "#" * (LINE_CHARACTERS_MAX + 1)),
    header: Module("gpt/x.py", '"""Too short."""'),
    directions: Module("ptuning/x.py", "def f():\n    from serving.engine.engine import Engine"),
    upward_imports: Module("serving/scheduler/x.py", "from serving.engine.engine import Engine"),
    absent_packages: Module("gpt/config.py", "import torch.distributed as dist"),
    shared_by_support: Module("tests/gpt/test_x.py", "from tests.gpt.test_y import case"),
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
        ("preamble.py", "from serving.engine.engine import Engine"),
        ("clients/x.py", "import gpt"),
        ("serving/x.py", "import ptuning.training.trainer"),
        ("gpt/x.py", "import planning"),
        ("bench/x.py", "from tests.support import ranks"),
        ("planning/x.py", "import_module('bench.load')"),
    ],
)
def test_an_import_against_the_direction_is_seen(path: str, line: str) -> None:
    assert list(directions(Module(path, line)))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("serving/worker/x.py", "from serving.ranks import rank"),
        ("serving/adapters/x.py", "from serving.scheduler.scheduler import Scheduler"),
        ("serving/config.py", "def f():\n    from serving.server import serve"),
        ("gpt/config.py", "import gpt.model.gpt_model"),
        ("gpt/attic/x.py", "import gpt.config"),
    ],
)
def test_an_import_of_a_package_that_is_not_below_is_seen(path: str, line: str) -> None:
    assert list(upward_imports(Module(path, line)))


def test_an_import_along_the_direction_is_not() -> None:
    assert not list(
        upward_imports(Module("serving/server.py", "from serving.ranks import launcher"))
    )
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
