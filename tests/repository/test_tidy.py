"""Repository rules: module docstrings, import directions, banned file names and texts.

Each rule reads one module's syntax tree and yields (line, message). A second test applies every
rule to a module that breaks it, because a rule that detects nothing passes too. EXCEPTIONS lists
the files that may break a rule, with the reason. Linters check everything else.
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
POSITIONAL_PARAMETERS_MAX = 6

# The keys are (file, rule), the values are reasons.
EXCEPTIONS: dict[tuple[str, str], str] = {
    (
        "gpt/attention/triton_kernels.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
    (
        "gpt/linear/triton_matmul_kernels.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
    (
        "gpt/linear/triton_low_rank_kernels.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
    (
        "gpt/linear/triton_expert_kernels.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
    (
        "gpt/linear/triton_row_kernels.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
    (
        "serving/worker/triton_sampling_kernels.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
    (
        "tests/support/launched_kernel.py",
        "positional_parameters",
    ): "Triton kernels cannot have keyword-only parameters",
}

# Maps a folder to the folders that it may import. `planning` may import all folders of the product,
# and `bench` may also import `planning`; no folder of the product imports these two.
IMPORTS: dict[str, set[str]] = {
    "gpt": set(),
    "protos": set(),
    "clients": {"protos"},
    "serving": {"gpt", "protos"},
    "ptuning": {"gpt"},
    "checkpoints_tools": {"gpt"},
}
PRODUCT = {*IMPORTS, "preamble"}
IMPORTS |= {"planning": PRODUCT, "bench": {*PRODUCT, "planning"}, "examples": PRODUCT}
IMPORTS |= {"tests": {*IMPORTS, "preamble"}}
# Imports of single modules that IMPORTS does not allow. The keys are (importing file, imported
# module), the values are reasons.
MODULE_IMPORTS: dict[tuple[str, str], str] = {
    (
        "serving/__main__.py",
        "clients.cli.generate",
    ): "`preamble generate` has the same flags and output with a server and in process. The module "
    "imports only the standard library. A folder for this one module would be a further top-level "
    "name of the wheel, and in `protos` or `preamble.py` it would be beside unrelated code",
}
# The root module preamble.py may import only the `__main__` modules of the folders.
COMMAND_LINES = {f"{folder}.__main__" for folder in IMPORTS}

# The packages of each folder by layer, lowest first. A package may import its own modules and lower
# layers, but no other package of its layer. "." means the folder's own modules; a module that is
# listed by its file name counts as a package.
LAYERS: dict[str, tuple[str, ...]] = {
    "gpt": (
        ".",
        "files object_store triton_runtime",
        "parallel cpu tokenizers",
        "checkpoint costs",
        "checkpoint/files attention",
        "formats/mappings",
        "formats/huggingface/families",
        "formats/huggingface formats/megatron",
        "formats/nemo",
        "formats",
        "model",
        "generation reference_logits",
        "linear adapters",
        "cpu_inference",
        "__init__.py __main__.py",
    ),
    "serving": (
        ".",
        "scheduler adapters",
        "worker",
        "engine_core",
        "engine",
        "ranks admission",
        "service",
        "frontend",
        "protocols/preamble protocols/openai protocols/kserve protocols/tgi protocols/tgis",
        "protocols",
        "server.py __init__.py",
        "ray",
        "__main__.py",
    ),
    "ptuning": (
        ".",
        "data",
        "prompt",
        "linears",
        "training",
        "evaluation",
        "run",
        "reporting",
        "__main__.py",
    ),
    "planning": (
        ".",
        "training inference",
        "published measurement output",
        "cli",
        "__main__.py",
    ),
    "checkpoints_tools": (
        ".",
        "layout",
        "writers",
        "conversion",
        "inspection adapters",
        "__main__.py",
    ),
    "clients": (".", "load", "cli", "__main__.py"),
    "bench": ("harness", "suites", "regression", "peers gpu_proof", ".", "__main__.py"),
}
LAYER = {
    (folder, package): layer
    for folder, packages in LAYERS.items()
    for layer, names in enumerate(packages)
    for package in names.split()
}

# Maps a folder, package or module to the third-party packages that it must not import.
TORCH_AND_IO = {"torch", "grpc", "asyncio"}
WITHOUT: dict[str, set[str]] = {
    "gpt": {"grpc", "asyncio", "prometheus_client", "multiprocessing"},
    "gpt/adapters/change_log.py": {"torch"},
    "gpt/child_processes.py": {"torch"},
    "gpt/config.py": {"torch"},
    "gpt/costs": {"torch"},
    "gpt/errors.py": {"torch"},
    "gpt/host_limits.py": {"torch"},
    "gpt/files": {"torch"},
    "gpt/parallel/pipeline_stages.py": {"torch"},
    "gpt/parallel/vocabulary_padding.py": {"torch"},
    "gpt/parallel/weight_sharding.py": {"torch"},
    "gpt/sampling_params.py": {"torch"},
    "gpt/software_versions.py": {"torch"},
    "gpt/tokenizers": {"torch"},
    "clients": {"torch"},
    "planning": {"grpc", "asyncio"},
    "planning/cli": TORCH_AND_IO,
    "planning/inference": TORCH_AND_IO,
    "planning/measurement/child_command.py": TORCH_AND_IO,
    "planning/measurement/rounds.py": TORCH_AND_IO,
    "planning/model_presets.py": TORCH_AND_IO,
    "planning/output": TORCH_AND_IO,
    "planning/published": TORCH_AND_IO,
    "planning/training": TORCH_AND_IO,
    "preamble.py": {"torch", "grpc"},
    "serving/adapters": TORCH_AND_IO,
    "serving/admission": {"torch", "grpc"},
    "serving/admission/admission.py": TORCH_AND_IO,
    "serving/admission/auth.py": TORCH_AND_IO,
    "serving/engine": {"torch", "grpc"},
    "serving/engine_core": TORCH_AND_IO,
    "serving/frontend": {"torch"},
    "serving/frontend/call.py": {"grpc"},
    "serving/memory_budget.py": TORCH_AND_IO,
    "serving/messages.py": TORCH_AND_IO,
    "serving/protocols": {"torch"},
    "serving/ranks": {"grpc", "asyncio"},
    "serving/request.py": {"torch"},
    "serving/scheduler": TORCH_AND_IO,
    "serving/worker": {"grpc", "asyncio"},
}
# Importing these modules must not load torch, not even indirectly, because planning and the refusal
# of invalid settings must be quick. The import of torch takes seconds and starts threads. Before it
# a rank's process asks the kernel to end it with its parent, and a torchrun worker blocks signals.
TORCH_FREE = (
    "checkpoints_tools.adapters.changes",
    "gpt.config",
    "gpt.costs.inference",
    "gpt.costs.linear_adapter",
    "gpt.errors",
    "gpt.sampling_params",
    "gpt.software_versions",
    "gpt.parallel.weight_sharding",
    "preamble",
    "serving.scheduler.scheduler",
    "serving.memory_budget",
    "serving.ranks.launcher",
    "serving.ranks.rank_process",
    "serving.ranks.torchrun_worker",
    "serving.ray.command",
    "serving.ray.grpc_services",
    "planning.inference.estimate",
    "planning.inference.reference_simulator",
    "planning.cli.estimate",
    "planning.cli.serve",
    "planning.cli.train",
    "planning.output.plan_writer",
    "planning.output.terminal",
)

GENERATED = re.compile(r"build|dist|__pycache__|.*\.egg-info")
BANNED_STEMS = re.compile(r"(test_)?(utils?|base|managers?|helpers?|common|core|misc)")
FORBIDDEN_TEXTS = {
    re.compile(r"(?<![\w.])/(work|tmp|home|root|opt|Users)/\w"): "a path of one machine",
    re.compile(r"\b(pypi\.org|pythonhosted\.org|download\.pytorch\.org)"): "a package registry",
    re.compile(r"\bTOD[O]\b(?!\(#\d+\))|\bFIXM[E]\b|\bXX[X]\b"): "a note without an issue number",
}
TEXT_SUFFIXES = {".py", ".md", ".toml", ".txt", ".proto", ".yaml", ".yml", ".sh", ""}


@cache  # Each rule needs the tree of each module.
def parse(text: str) -> ast.Module:
    return ast.parse(text)


@cache
def nodes_of(text: str) -> list[ast.AST]:
    return list(ast.walk(parse(text)))


class Module(NamedTuple):
    path: str  # Relative to the repository root, with slashes.
    text: str

    @property
    def tree(self) -> ast.Module:
        return parse(self.text)

    @property
    def nodes(self) -> list[ast.AST]:
        return nodes_of(self.text)

    @property
    def folder(self) -> str:
        return self.path.split("/")[0].removesuffix(".py")


Breach = tuple[int, str]


def handwritten_files(folder: Path = ROOT) -> Iterator[Path]:
    """Yield every file that is written by hand; files that tools generate are skipped."""
    for path in sorted(folder.iterdir()):
        hidden = path.name.startswith(".") and path.name != ".ci"
        if hidden or "_pb2" in path.name or GENERATED.fullmatch(path.name):
            continue
        if path.is_dir():
            yield from handwritten_files(path)
        else:
            yield path


@cache
def modules() -> list[Module]:
    paths = [path for path in handwritten_files() if path.suffix == ".py"]
    return [Module(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in paths]


def positional_parameters(module: Module) -> Iterator[Breach]:
    for node in module.nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names = [argument.arg for argument in node.args.posonlyargs + node.args.args]
            count = len([name for name in names if name not in ("self", "cls")])
            if count > POSITIONAL_PARAMETERS_MAX:
                limit = f"at most {POSITIONAL_PARAMETERS_MAX}, then keyword-only"
                yield node.lineno, f"{node.name}: {count} positional parameters, {limit}"


def module_docstring(module: Module) -> Iterator[Breach]:
    if module.text and not ast.get_docstring(module.tree):  # An empty __init__.py needs none.
        yield 1, "no module docstring; the first line says what the module is"


def imports(module: Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of every import, also in functions, and of import_module("...")."""
    for node in module.nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{name.name}") for name in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            literal = [arg for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, str(arg.value)) for arg in literal)


def folder_imports(module: Module) -> Iterator[Breach]:
    for line, name in imports(module):
        target = name.split(".")[0]
        if target not in {*IMPORTS, "preamble"} or target == module.folder:
            continue
        if module.folder == "preamble":
            if not any(f"{name}.".startswith(f"{main}.") for main in COMMAND_LINES):
                yield line, f"imports {name}; the root module takes only a folder's __main__"
        elif (module.path, name.rpartition(".")[0]) in MODULE_IMPORTS:
            continue
        elif target not in IMPORTS[module.folder]:
            allowed = ", ".join(sorted(IMPORTS[module.folder])) or "no other folder"
            yield line, f"imports {name}; {module.folder} may import {allowed}"


def package_of(folder: str, path: str) -> str:
    """Return the package of a module from the module's path below its folder."""
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
    package = package_of(folder, path)
    directory = path.rpartition("/")[0] or "."
    if package == "." != directory or (folder, directory) not in LAYER:
        yield 1, f"{folder}/{directory} is a package that LAYERS does not list; add it"
        return
    for line, name in imports(module):
        target, _, rest = name.partition(".")
        other = package_of(folder, rest.replace(".", "/"))
        if target == folder and other != package and LAYER[folder, other] >= LAYER[folder, package]:
            yield line, f"imports {name}; {folder}/{other} is not below {folder}/{package}"


def forbidden_packages(module: Module) -> Iterator[Breach]:
    parts = module.path.split("/")
    paths = [module.folder, *("/".join(parts[:count]) for count in range(1, len(parts) + 1))]
    forbidden = set[str]().union(*(WITHOUT.get(path, set()) for path in paths))
    for line, name in imports(module):
        if name.split(".")[0] in forbidden:
            yield line, f"imports {name}, which WITHOUT forbids in this module"


def slow_imports_of_tests(module: Module) -> Iterator[Breach]:
    """Reject module-level imports of transformers and peft in tests, because they take seconds."""
    if module.folder == "tests":
        statements: list[ast.stmt] = [
            node for node in module.tree.body if isinstance(node, ast.Import | ast.ImportFrom)
        ]
        text = ast.unparse(ast.Module(statements, []))
        for line, name in imports(Module(module.path, text)):
            if name.split(".")[0] in ("transformers", "peft"):
                yield line, f"imports {name} at module level; import it in the test that needs it"


def imports_of_test_modules(module: Module) -> Iterator[Breach]:
    for line, name in imports(module):
        if name.startswith("tests.") and ".test_" in name:
            yield line, f"imports {name}; move code that tests share to tests/support"


Rule = Callable[[Module], Iterator[Breach]]
# Maps each rule to a module that breaks it.
RULES: dict[Rule, Module] = {
    positional_parameters: Module("gpt/x.py", "def f(self, a, b, c, d, e, f, g): ..."),
    module_docstring: Module("gpt/x.py", "x = 1"),
    folder_imports: Module(
        "ptuning/x.py", "def f():\n    from serving.engine.engine import Engine"
    ),
    upward_imports: Module("serving/scheduler/x.py", "from serving.engine.engine import Engine"),
    forbidden_packages: Module("gpt/config.py", "import torch.distributed as dist"),
    imports_of_test_modules: Module("tests/gpt/test_x.py", "from tests.gpt.test_y import case"),
    slow_imports_of_tests: Module("tests/test_x.py", "from transformers import GPT2Config"),
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_module_follows_the_rule(rule: Rule) -> None:
    breaches = [
        f"{module.path}:{line}: {message}"
        for module in modules()
        if (module.path, rule.__name__) not in EXCEPTIONS
        for line, message in rule(module)
    ]
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_rule_detects_a_planted_breach(rule: Rule) -> None:
    assert list(rule(RULES[rule]))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("preamble.py", "from serving.engine.engine import Engine"),
        ("clients/x.py", "import gpt"),
        ("serving/__main__.py", "from clients.client import Client"),
        ("serving/server.py", "from clients.cli.generate import add_prompt_flags"),
        ("serving/x.py", "import ptuning.training.trainer"),
        ("gpt/x.py", "import planning"),
        ("bench/x.py", "from tests.support import ranks"),
        ("planning/x.py", "import_module('bench.load')"),
    ],
)
def test_an_import_that_the_folder_table_forbids_is_detected(path: str, line: str) -> None:
    assert list(folder_imports(Module(path, line)))


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("serving/worker/x.py", "from serving.engine_core.engine_loop import EngineLoop"),
        ("serving/engine_core/x.py", "from serving.ranks import rank"),
        ("serving/adapters/x.py", "from serving.scheduler.scheduler import Scheduler"),
        ("serving/config.py", "def f():\n    from serving.server import serve"),
        ("gpt/config.py", "import gpt.model.gpt_model"),
        ("gpt/attic/x.py", "import gpt.config"),
    ],
)
def test_an_import_of_a_package_in_a_higher_layer_is_detected(path: str, line: str) -> None:
    assert list(upward_imports(Module(path, line)))


def test_imports_of_lower_layers_are_allowed() -> None:
    assert not list(
        upward_imports(Module("serving/server.py", "from serving.ranks import launcher"))
    )
    assert not list(folder_imports(Module("preamble.py", "from serving.__main__ import main")))
    assert not list(
        folder_imports(Module("serving/x.py", "from protos.preamble.v1 import admin_pb2"))
    )


def test_every_exception_is_still_in_use() -> None:
    by_path = {module.path: module for module in modules()}
    by_name = {rule.__name__: rule for rule in RULES}
    for path, rule in EXCEPTIONS:
        assert list(by_name[rule](by_path[path])), (
            f"{path} follows the rule {rule}; delete its exception"
        )


def test_names_of_files_and_folders_state_their_content() -> None:
    paths = [path.relative_to(ROOT) for path in handwritten_files()]
    banned = [
        str(path)
        for path in paths
        for part in (*path.parts[:-1], path.stem)
        if BANNED_STEMS.fullmatch(part)
    ]
    assert not banned, f"{banned}: give each file and folder a name that states its content"


def test_no_file_contains_machine_paths_registries_or_notes_without_issue_number() -> None:
    matches = [
        f"{path.relative_to(ROOT)}:{number}: {meaning}: {match.group()}"
        for path in handwritten_files()
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text("utf-8", "replace").splitlines(), 1)
        for pattern, meaning in FORBIDDEN_TEXTS.items()
        if (match := pattern.search(line))
    ]
    assert not matches, "\n" + "\n".join(matches)


def test_torch_free_modules_do_not_load_torch() -> None:
    program = "import sys, {0}; sys.exit('torch' in sys.modules)"
    for module in TORCH_FREE:
        command = [sys.executable, "-c", program.format(module)]
        process = subprocess.run(command, cwd=ROOT, check=False)
        assert process.returncode == 0, f"importing {module} fails, or loads torch"


def test_the_wheel_lists_every_package() -> None:
    folders = {
        path.relative_to(ROOT).parent.as_posix().replace("/", ".")
        for path in handwritten_files()
        if path.suffix in (".py", ".proto") and path.parent != ROOT
    }
    product_folders = {
        folder for folder in folders if folder.split(".")[0] not in ("tests", "examples")
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == product_folders
