"""Counts of naming and duplication problems in the product's Python.

    python -m tests.support.code_counts [--checkout DIRECTORY] [--json]

Each count looks at the syntax trees of the product folders, so that two checkouts can be compared.
The rules of tests/repository that limit names use the same word lists and functions.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = (
    "gpt",
    "serving",
    "ptuning",
    "planning",
    "checkpoints_tools",
    "clients",
    "bench",
    "protos",
)
# Parts of a name, between underscores, that say nothing about a value: participles and pronouns,
# and nouns that fit any value.
EMPTY_WORDS = frozenset({"found", "made", "told", "one", "place", "here", "wanted"})
VAGUE_PARTICIPLES = frozenset({"said", "asked", "given", "kept", "held", "known", "whole", "most"})
VAGUE_NOUNS = frozenset({"result", "item", "value", "data", "info", "obj", "outcome", "thing"})
# Nouns of the field. The first line of a module's docstring contains one of them, or a term of the
# glossary in ARCHITECTURE.md. Groups: models and training; serving; formats and other systems;
# machines.
FIELD_TERMS = tuple(
    """
activation|argmax|attention|batch|cross entropy|dataset|dropout|dtype|embedding|epoch|evaluation
GEMM|GPT|GPTConfig|gradient|hyperparameter|initialization|linear|logits|loss|matmul|MLP
mixture-of-experts|model|norm|optimizer|pipeline stage|prompt|QKV|quantization|tensor|token
tokenizer|training|transformer|tuning|vocabulary|weights
authentication|benchmark|client|cost model|engine|histogram|latency|log|logging|metric|performance
plan|planning|protocol|queue|sampling|scheduling|server|serving|throughput|tracing
checkpoint|checksum|CRC-32|CSV|FasterTransformer|gRPC|HTML|HTTP|Hugging Face|JSON|KServe|manifest
Megatron|msgpack|NeMo|OpenAI|PEFT|pickle|PNG|proto|PyTorch|safetensors|SentencePiece|SVG|tar
TensorBoard|TGI|TGIS|TLS|torch_dist|Transformer Engine|Triton|YAML
atomic file|command|configuration|CPU|exception|garbage collection|GPU|kernel|memory|process
progress bar|regression|settings|terminal|thread
""".strip()
    .replace("\n", "|")
    .split("|")
)
# Words that begin a relative clause or stand for a noun.
CLAUSE_WORDS = frozenset(
    {"how", "what", "when", "where", "whether", "which", "who", "whoever", "why"}
)
PRONOUNS = frozenset({"it", "that", "these", "they", "this", "those"})
OS_RENAMES = frozenset({"replace", "rename", "renames", "link"})
PATH_RENAMES = frozenset({"replace", "rename", "hardlink_to"})


def tracked_files(checkout: Path, patterns: Iterable[str]) -> list[Path]:
    """The files that git tracks and that match one of the patterns."""
    listing = subprocess.run(
        ["git", "ls-files", "--", *patterns],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=True,
    )
    return [checkout / path for path in listing.stdout.split()]


def product_files(checkout: Path) -> list[Path]:
    """The tracked Python files of the product's folders."""
    return tracked_files(checkout, [*(f"{folder}/*.py" for folder in PRODUCT), "preamble.py"])


def name_uses(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each definition and use of a name in a module, keywords of calls too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.value.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.alias):
            yield node.lineno, node.asname or node.name.rpartition(".")[2]
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.lineno, node.name


def word_counts(trees: dict[str, ast.Module], words: frozenset[str]) -> Counter[str]:
    """How often each of the words is a part of a name between underscores."""
    return Counter(
        part
        for tree in trees.values()
        for _, name in name_uses(tree)
        for part in name.lower().split("_")
        if part in words
    )


def classes_defined_twice(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Class names that two modules of one top folder define, with the modules."""
    modules: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                modules[path.split("/")[0], node.name].append(path)
    return {
        f"{folder}: {name}": paths
        for (folder, name), paths in sorted(modules.items())
        if len(set(paths)) > 1
    }


def tuple_splats(tree: ast.Module) -> Iterator[int]:
    """Lines of calls that unpack a tuple or list written in place: `f(*(a, b))`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            for argument in node.args:
                if isinstance(argument, ast.Starred) and isinstance(
                    argument.value, ast.Tuple | ast.List
                ):
                    yield argument.lineno


def lacks_term(line: str, terms: Iterable[str]) -> bool:
    """Whether a line contains none of the terms, in the singular or the plural."""
    return not re.search(rf"(?<!\w)(?:{'|'.join(map(re.escape, terms))})(?:e?s)?(?!\w)", line, re.I)


def begins_with_clause(line: str) -> bool:
    """Whether a line, or a part of it after a colon, begins with a clause or a pronoun."""
    first_words = {words[0].lower() for part in line.split(": ") if (words := part.split())}
    return not first_words.isdisjoint(CLAUSE_WORDS | PRONOUNS)


def rename_sites(tree: ast.Module) -> Iterator[int]:
    """Lines that rename or link a file, with a function of `os` or a method of `Path`.

    A method with one argument belongs to Path: the `replace` of a string has two, and that of a
    dataclass or of a struct has keywords.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_os = isinstance(node.func.value, ast.Name) and node.func.value.id == "os"
            of_path = len(node.args) == 1 and not node.keywords
            if (of_os and node.func.attr in OS_RENAMES) or (
                of_path and node.func.attr in PATH_RENAMES
            ):
                yield node.lineno


def popen_sites(tree: ast.Module) -> Iterator[int]:
    """Lines that start a child process which the caller then watches, or derive from Popen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            callables = [node.func]
        elif isinstance(node, ast.ClassDef):
            callables = node.bases
        else:
            continue
        if any(ast.unparse(name).startswith("subprocess.Popen") for name in callables):
            yield node.lineno


def syntax_trees(checkout: Path, files: Iterable[Path]) -> dict[str, ast.Module]:
    """The syntax tree of each file, by its path from the root."""
    return {
        path.relative_to(checkout).as_posix(): ast.parse(path.read_text("utf-8")) for path in files
    }


@cache
def product_trees(checkout: Path = ROOT) -> dict[str, ast.Module]:
    """The syntax tree of each module of the product, by its path from the root."""
    return syntax_trees(checkout, product_files(checkout))


@cache
def trees_of_tests(checkout: Path = ROOT) -> dict[str, ast.Module]:
    """The syntax tree of each module of the tests, by its path from the root."""
    return syntax_trees(checkout, tracked_files(checkout, ["tests/*.py"]))


def counts(checkout: Path) -> dict[str, int]:
    texts = [path.read_text("utf-8") for path in product_files(checkout)]
    trees = product_trees(checkout)
    return {
        "lines of Python": sum(len(text.splitlines()) for text in texts),
        "names of empty words": word_counts(trees, EMPTY_WORDS).total(),
        "names of participles": word_counts(trees, VAGUE_PARTICIPLES).total(),
        "names of vague nouns": word_counts(trees, VAGUE_NOUNS).total(),
        "class names defined twice in a top folder": len(classes_defined_twice(trees)),
        "tuple splats in calls": sum(len(list(tuple_splats(tree))) for tree in trees.values()),
        "fmt: skip comments": sum(text.count("# fmt: skip") for text in texts),
        "sites that rename a file": sum(len(list(rename_sites(tree))) for tree in trees.values()),
        "sites that start a process": sum(len(list(popen_sites(tree))) for tree in trees.values()),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, default=ROOT, help="default: this checkout")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    arguments = parser.parse_args()
    totals = counts(arguments.checkout)
    if arguments.json:
        print(json.dumps(totals, indent=2))
    else:
        for name, count in totals.items():
            print(f"{count:8,}  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
