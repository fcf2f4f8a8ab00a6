"""Rules for names: the vocabulary of the field, in identifiers and in the docstrings of modules.

tests/support/code_counts.py defines the words and counts them. Each rule is also applied to a
module that breaks it, because a rule that detects nothing passes too. An exception is a name with
its reason. The rules apply to tests too, except for the name of a test, which is a sentence.
"""

import ast
from collections.abc import Callable

import pytest

from tests.support.code_counts import (
    EMPTY_WORDS,
    FIELD_TERMS,
    VAGUE_PARTICIPLES,
    begins_with_clause,
    classes_defined_twice,
    lacks_term,
    name_uses,
    product_trees,
    trees_of_tests,
    tuple_splats,
)
from tests.support.glossary import glossary

EXCEPTIONS = {
    "NOT_FOUND": "a gRPC status code",
    "ONE_SHOT_BYTES_MAX": "PyTorch calls this all-reduce one-shot",
    "one_shot_all_reduce": "PyTorch's function",
    "one_shot_all_reduce_copy": "PyTorch's function",
    "connection_made": "asyncio.Protocol's method",
    "most_common": "collections.Counter's method",
    "blocks_held": "a key of the flight recorder's file",
    "kv_blocks_held": "a field of preamble.v1",
    "made_tokens": "a key of the flight recorder's file",
    "known_prompts": "a key of `preamble tune --check --json`",
    "all_but_one_percent": "a key of `preamble tune --check --json`",
    "most": "a key of `preamble tune --check --json`",
    "given": "a key of `preamble inspect --json`",
}
EXCEPTIONS_IN_TESTS = {
    "one_of": "hypothesis's strategy",
    "held_out_records": "a function of examples/demo, where held-out data is the field's term",
}
CLASS_EXCEPTIONS: dict[str, str] = {}
Trees = dict[str, ast.Module]


def is_empty(name: str) -> bool:
    return not (EMPTY_WORDS | VAGUE_PARTICIPLES).isdisjoint(name.lower().split("_"))


def empty_names(trees: Trees) -> list[str]:
    return [
        f"{path}:{line}: {name} names nothing; use the noun of its content"
        for path, tree in trees.items()
        for line, name in name_uses(tree)
        if is_empty(name) and name not in EXCEPTIONS
    ]


def empty_names_in_tests(trees: Trees) -> list[str]:
    exceptions = EXCEPTIONS | EXCEPTIONS_IN_TESTS
    return [
        f"{path}:{line}: {name} names nothing; use the noun of its content"
        for path, tree in trees.items()
        for line, name in name_uses(tree)
        if is_empty(name) and name not in exceptions and not name.startswith("test_")
    ]


def repeated_classes(trees: Trees) -> list[str]:
    return [
        f"class {name} is defined in {' and '.join(paths)}"
        for name, paths in classes_defined_twice(trees).items()
        if name not in CLASS_EXCEPTIONS
    ]


def splats(trees: Trees) -> list[str]:
    return [
        f"{path}:{line}: a call unpacks a tuple written in place; write its elements as arguments"
        for path, tree in trees.items()
        for line in tuple_splats(tree)
    ]


def docstrings_without_term(trees: Trees) -> list[str]:
    """Breaches of first lines; test_tidy.py requires the docstring itself."""
    terms = [*FIELD_TERMS, *(term for term, _ in glossary())]
    breaches = []
    for path, tree in trees.items():
        line = (ast.get_docstring(tree) or "").partition("\n")[0]
        if line and begins_with_clause(line):
            breaches.append(f"{path}:1: {line!r} has a clause where a noun is needed")
        elif line and lacks_term(line, terms):
            breaches.append(f"{path}:1: {line!r} has no noun of the glossary or of FIELD_TERMS")
    return breaches


Rule = Callable[[Trees], list[str]]
# Maps each rule to modules that break it.
RULES: dict[Rule, dict[str, str]] = {
    empty_names: {"gpt/x.py": "def load(path):\n    found = path\n    return found"},
    repeated_classes: {"gpt/a/x.py": "class Plan: ...", "gpt/b/y.py": "class Plan: ..."},
    splats: {"gpt/x.py": "log(*(1, 2), 3)"},
    docstrings_without_term: {"gpt/x.py": '"""The likeliest of some rows, without the rest."""'},
}
# Maps each rule for tests to modules that break it.
RULES_OF_TESTS: dict[Rule, dict[str, str]] = {
    empty_names_in_tests: {"tests/gpt/adapters/x.py": "def test_load():\n    found = load()"},
    splats: {"tests/gpt/adapters/x.py": "log(*(1, 2), 3)"},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_product_follows_the_rule(rule: Rule) -> None:
    breaches = rule(product_trees())
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize("rule", RULES_OF_TESTS, ids=lambda rule: rule.__name__)
def test_the_tests_follow_the_rule(rule: Rule) -> None:
    breaches = rule(trees_of_tests())
    assert not breaches, "\n" + "\n".join(breaches)


@pytest.mark.parametrize("rule", RULES | RULES_OF_TESTS, ids=lambda rule: rule.__name__)
def test_the_rule_detects_a_planted_breach(rule: Rule) -> None:
    modules = (RULES | RULES_OF_TESTS)[rule]
    assert rule({path: ast.parse(text) for path, text in modules.items()})


@pytest.mark.parametrize(
    "line",
    [
        "What a server may count.",
        "Which tokens go on, before they are known.",
        "Adapter slots: which rows hold which adapter.",
        "The sum of several things, in one pass.",
    ],
)
def test_a_first_line_needs_a_noun_of_the_field(line: str) -> None:
    assert docstrings_without_term({"gpt/x.py": ast.parse(f'"""{line}"""')})


@pytest.mark.parametrize(
    "line",
    [
        "Sampler: logits to tokens.",
        "KV caches of one rank.",
        "Schedules of pipeline stages: 1F1B.",
        "`preamble tune` command: trains an adapter.",
    ],
)
def test_a_first_line_with_a_noun_of_the_field_is_accepted(line: str) -> None:
    assert not docstrings_without_term({"gpt/x.py": ast.parse(f'"""{line}"""')})


def test_every_exception_is_still_in_use() -> None:
    names = {name for tree in product_trees().values() for _, name in name_uses(tree)}
    assert set(EXCEPTIONS) <= names
    names = {name for tree in trees_of_tests().values() for _, name in name_uses(tree)}
    assert set(EXCEPTIONS_IN_TESTS) <= names
