"""ctypes declarations of the C library: structures and functions as the C source declares them."""

import ctypes
import re
from pathlib import Path

import pytest

from gpt.cpu import (
    exact_argmax,
    kernels,
    packed_experts,
    packed_linear,
    training_kernels,
    training_linear,
)
from gpt.cpu_inference import fused_decoder

ROOT = Path(__file__).resolve().parents[3]
SOURCES = sorted((ROOT / "gpt/cpu/src").glob("*.[ch]"))
MODULES = (
    fused_decoder,
    exact_argmax,
    kernels,
    packed_experts,
    packed_linear,
    training_kernels,
    training_linear,
)
STRUCTURES = sorted(
    {
        structure
        for module in MODULES
        for structure in vars(module).values()
        if isinstance(structure, type) and issubclass(structure, ctypes.Structure)
    },
    key=lambda structure: structure.__name__,
)
KINDS = {"int64_t": ctypes.c_int64, "int": ctypes.c_int, "double": ctypes.c_double}
# A type with an optional `const`, and the declared names with the asterisks of pointers.
DECLARATION = re.compile(r"(?:const )?(?:_Atomic )?(\w+) (\**\w+(?:, \**\w+)*)")
# Functions for which the defaults of ctypes are correct: at most one int argument, and an int or no
# return value.
UNDECLARED = {
    "preamble_abi",
    "preamble_isa_level",
    "preamble_set_isa_level",
}


def without_comments(text: str) -> str:
    return re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)


def fields_in_c(body: str) -> list[tuple[str, str]]:
    """Names and kinds of the fields of a struct; all pointers have the same kind."""
    fields = []
    for line in filter(None, map(str.strip, without_comments(body).split(";"))):
        declaration = DECLARATION.fullmatch(line)
        assert declaration is not None, line
        for name in declaration[2].split(", "):
            kind = "pointer" if name.startswith("*") else declaration[1]
            fields.append((name.lstrip("*"), kind))
    return fields


def fields_in_python(structure: type[ctypes.Structure]) -> list[tuple[str, str]]:
    kind_names = {kind: name for name, kind in KINDS.items()} | {ctypes.c_void_p: "pointer"}
    return [(name, kind_names.get(kind) or kind.__name__) for name, kind, *_ in structure._fields_]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda structure: structure.__name__)
def test_a_structure_has_the_fields_of_the_c_struct(structure: type[ctypes.Structure]) -> None:
    assert structure.__doc__ is not None
    source = re.search(r"gpt/cpu/src/\S+\.[ch]", structure.__doc__)
    assert source is not None, "the docstring does not name the C source"
    text = (ROOT / source[0]).read_text("utf-8")
    structs = re.findall(r"typedef struct \{([^{}]*)\} \w+;", text)
    in_python = fields_in_python(structure)
    same_names = [
        fields
        for fields in map(fields_in_c, (body for body in structs if "[" not in body))
        if {name for name, _ in fields} == {name for name, _ in in_python}
    ]
    assert same_names == [in_python]


def declared_return_type(name: str) -> str:
    if name in kernels._RETURN_INT64:
        return "int64_t"
    return "int" if name in kernels._RETURN_INT else "void"


def test_the_functions_have_the_types_of_the_c_functions() -> None:
    text = without_comments("\n".join(path.read_text("utf-8") for path in SOURCES))
    in_c = {}
    for return_type, name, arguments in re.findall(
        r"\b(void|int|int64_t) (preamble_\w+)\(([^)]*)\)\s*\{", text
    ):
        types = [argument for argument in arguments.split(",") if argument != "void"]
        kinds = ["p" if "*" in argument else "i" for argument in types]
        in_c[name] = ("".join(kinds), return_type)
    in_python = {
        name: (kinds.replace(" ", ""), declared_return_type(name))
        for name, kinds in kernels._ARGUMENT_KINDS.items()
    }
    assert in_python == {name: types for name, types in in_c.items() if name not in UNDECLARED}
