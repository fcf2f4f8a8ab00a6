"""The recorded signatures of third-party wheels: calls, stand-ins, and the wheels themselves."""

import tomllib
from pathlib import Path

import pytest

from tests.support import te_stub
from tests.support.wheel_signatures import (
    PACKAGES,
    RECORD,
    bind_call,
    changed_signatures,
    parse_signature,
    read_record,
    record_package,
    recorded_schemas,
    recorded_signatures,
    stub_difference,
    torch_operator_schemas,
)

TRANSFORMER_ENGINE = next(p for p in PACKAGES if p.name == "transformer-engine")
PYPROJECT = Path(RECORD).parents[2] / "pyproject.toml"


def test_the_stub_of_transformer_engine_accepts_only_what_the_wheel_accepts() -> None:
    stubs = {function.__name__: function for function in te_stub.FUNCTIONS}
    for kind in (te_stub.Linear, te_stub.LayerNormLinear):
        stubs[f"{kind.__name__}.__init__"] = kind.__init__
        stubs[f"{kind.__name__}.forward"] = kind.forward
    recipes = {
        recipe.__name__ for recipe in te_stub.RECIPES if recipe is not te_stub.DelayedScaling
    }
    assert {*stubs, *recipes} == set(TRANSFORMER_ENGINE.functions)
    for name, stub in stubs.items():
        for version, signature in recorded_signatures("transformer-engine", name).items():
            assert stub_difference(stub, signature) is None, (name, version)
    for name in recipes:
        bind_call("transformer-engine", name)


def test_transformer_engine_has_the_rules_that_its_stub_follows() -> None:
    for wheel in read_record()["transformer-engine"].values():
        assert wheel["reads_is_grad_enabled"] == dict.fromkeys(
            TRANSFORMER_ENGINE.gradient_rules, True
        )


def test_torch_has_the_recorded_symmetric_memory_operators() -> None:
    assert torch_operator_schemas() == recorded_schemas()


def test_the_lowest_recorded_versions_are_those_of_pyproject() -> None:
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    requirements = [requirement for extra in extras.values() for requirement in extra]
    for package in PACKAGES:
        (bound,) = [
            requirement.partition(">=")[2]
            for requirement in requirements
            if requirement.partition(">=")[0].partition("[")[0] == package.name
        ]
        assert package.lowest_version == f"{bound}.0"
        assert read_record()[package.name]["lowest"]["version"] == package.lowest_version


@pytest.mark.parametrize(
    ("real", "difference"),
    [
        ("(self, a, b=..., *, c=...)", None),
        ("(self, a, b=..., d=..., *, c=..., e=..., **options)", None),
        ("(self, a, c=..., b=...)", "the positional parameters"),
        ("(self, a, b=...)", "no parameter c"),
        ("(self, a, b=..., *, c)", "c has no default"),
        ("(self, a=..., b=..., *, c=...)", "a has a default"),
        ("(self, a, b=..., *, c=..., d)", "requires d"),
    ],
)
def test_a_stub_that_accepts_more_than_the_wheel_is_reported(
    real: str, difference: str | None
) -> None:
    def stub(self: object, a: int, b: int = 0, *, c: int = 0) -> None: ...

    reason = stub_difference(stub, parse_signature(real))
    assert reason is None if difference is None else difference in str(reason)
    assert stub_difference(lambda *a: None, parse_signature("(*a)")) is not None


def test_calls_that_a_version_does_not_accept_are_errors() -> None:
    decode = "BatchDecodeWithPagedKVCacheWrapper"
    assert bind_call("flashinfer-python", f"{decode}.run", 0, "q", "kv", k_scale=2.0) == {
        "self": 0,
        "q": "q",
        "paged_kv_cache": "kv",
        "k_scale": 2.0,
    }
    with pytest.raises(TypeError, match="key_scale"):
        bind_call("flashinfer-python", f"{decode}.run", 0, "q", "kv", key_scale=2.0)


@pytest.mark.soak
def test_the_record_equals_the_wheels_on_pypi() -> None:
    """A difference is repaired by `python -m tests.support.wheel_signatures --write`."""
    record = {package.name: record_package(package) for package in PACKAGES}
    assert changed_signatures(record) == []
