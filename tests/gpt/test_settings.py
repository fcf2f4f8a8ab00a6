"""Settings files: YAML to a dataclass, and errors that name the wrong key or value."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import yaml

from gpt.errors import ConfigError
from gpt.settings import ComposedSettings, parse_settings, read_yaml


@dataclass(frozen=True)
class Cake:
    flour_g: int
    sugar_g: float = 100.0
    name: str | None = None
    iced: bool = False
    eggs: tuple[int, ...] = ()
    timer: Literal["on", "off"] = "on"
    oven: Literal["hot", "off"] = "off"


def test_a_file_becomes_the_dataclass(tmp_path: Path) -> None:
    file = tmp_path / "cake.yaml"
    file.write_text("flour_g: 300\nsugar_g: 1e2\nname: null\niced: true\neggs: [1, 2]\n")
    assert parse_settings(Cake, read_yaml(file), "cake") == Cake(300, 100.0, None, True, (1, 2))


@dataclass(frozen=True)
class Oven:
    degrees: int = 180


@dataclass(frozen=True, init=False)
class Recipe(ComposedSettings):
    cake: Cake
    oven: Oven


def test_flat_keys_become_the_parts() -> None:
    recipe = parse_settings(Recipe, {"flour_g": 300, "sugar_g": 50, "degrees": 200}, "recipe")
    assert (recipe.cake, recipe.oven) == (Cake(300, 50.0), Oven(200))
    assert Recipe(**recipe.to_dict()) == recipe
    assert recipe.with_fields(degrees=180).oven == Oven()
    with pytest.raises(ConfigError, match="recipe: unknown key 'degree'; did you mean 'degrees'"):
        parse_settings(Recipe, {"flour_g": 300, "degree": 200}, "recipe")
    with pytest.raises(ConfigError, match="recipe: 'flour_g' is missing"):
        parse_settings(Recipe, {}, "recipe")
    with pytest.raises(ConfigError, match="degrees is 'hot'; it must be a whole number"):
        parse_settings(Recipe, {"flour_g": 300, "degrees": "hot"}, "recipe")


def test_on_and_off_are_words_if_the_setting_has_them_as_values() -> None:
    values = yaml.safe_load("{flour_g: 1, timer: off}")
    assert values["timer"] is False
    assert parse_settings(Cake, values, "cake").timer == "off"
    assert parse_settings(Cake, {"flour_g": 1, "timer": True}, "cake").timer == "on"
    for key in ("name", "oven"):
        with pytest.raises(ConfigError, match=f"{key} is True; it must be a text"):
            parse_settings(Cake, {"flour_g": 1, key: True}, "cake")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"flower_g": 1}, "cake: unknown key 'flower_g'; did you mean 'flour_g'"),
        ({"salt": 1}, "unknown key 'salt'; choose one of: eggs, flour_g"),
        ({}, "'flour_g' is missing"),
        ({"flour_g": 1.5}, "flour_g is 1.5; it must be a whole number"),
        ({"flour_g": True}, "flour_g is True; it must be a whole number"),
        ({"flour_g": 1, "sugar_g": "much"}, "sugar_g is 'much'; it must be a number"),
        ({"flour_g": 1, "name": 3}, "name is 3; it must be a text"),
        ({"flour_g": 1, "iced": 1}, "iced is 1; it must be true or false"),
        ({"flour_g": 1, "eggs": 2}, "eggs is 2; it must be a list"),
        ({"flour_g": 1, "eggs": ["a"]}, "eggs is 'a'; it must be a whole number"),
        ({"flour_g": 2**63}, "it must fit into 64 bits"),
        ({"flour_g": 16**5000}, "flour_g is a value with too many digits; it must fit"),
        ({"flour_g": 1, "sugar_g": 10**400}, "it must be a number"),
        ({"flour_g": "x" * 10**6}, "it must be a whole number"),
        ({"x" * 10**6: 1}, "unknown key"),
    ],
)
def test_wrong_keys_and_values_are_named(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_settings(Cake, values, "cake")
    assert words in str(refused.value)
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [", "is not YAML"),
        ("- 1", "contains no settings"),
        ("\xff\xfe", "is not YAML"),
        ("[" * 5000, "is nested too deeply"),
        ("model: 2020-13-45", "has an invalid value .*; put quotes around the value"),
        ("seed: " + "9" * 5000, "has an invalid value"),
        ("seed: !!int ''", "has an invalid value"),
        ('model: "a\\0b"', "'model' has a text with a NUL character"),
        ('tasks: [{a: &a ["\\ud800", *a]}]', "'tasks' has a text with a NUL character or a lone"),
        ("# " + "x" * (1 << 20), "is over 1048576 bytes"),
    ],
)
def test_a_file_without_settings_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=words) as refused:
        read_yaml(file)
    assert "\n" not in str(refused.value)


def test_a_missing_and_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(tmp_path / "nothing.yaml")
    (tmp_path / "empty.yaml").touch()
    assert read_yaml(tmp_path / "empty.yaml") == {}


def test_merge_keys_that_multiply_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "cake.yaml"
    levels = [
        f"a{level}: &a{level} {{<<: [{', '.join([f'*a{level - 1}'] * 9)}]}}"
        for level in range(1, 30)
    ]
    file.write_text("\n".join(["a0: &a0 {flour_g: 1}", *levels]))
    with pytest.raises(ConfigError, match="merge keys"):
        read_yaml(file)
    file.write_text("a: &a {flour_g: 1}\nb: {<<: *a, iced: true}\n")
    assert read_yaml(file)["b"] == {"flour_g": 1, "iced": True}


def test_long_mappings_without_merge_keys_are_read(tmp_path: Path) -> None:
    file = tmp_path / "long.yaml"
    file.write_text("\n".join(f"key{index}: 1" for index in range(10_001)))
    assert len(read_yaml(file)) == 10_001
