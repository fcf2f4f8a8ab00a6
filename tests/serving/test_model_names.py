"""Model names: the name that a checkpoint's path gives, its aliases, and placeholders."""

from pathlib import Path

import pytest

from serving.model_names import PLACEHOLDER_NAMES, ModelNames

SNAPSHOT = "models--Org--chat-7b/snapshots/0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("folder", "name", "aliases"),
    [
        ("chat-7b", "chat-7b", ()),
        ("chat-7b/release", "chat-7b", ("release",)),
        ("chat-7b/iter_0000100", "chat-7b", ("iter_0000100",)),
        ("chat-7b/checkpoints/iter_0000100", "chat-7b", ("iter_0000100", "checkpoints")),
        ("chat-7b/hf", "chat-7b", ("hf",)),
        ("chat-7b/checkpoint-500", "chat-7b", ("checkpoint-500",)),
        (SNAPSHOT, "chat-7b", (SNAPSHOT.split("/")[2], "snapshots", "models--Org--chat-7b")),
        ("models--gpt2", "gpt2", ("models--gpt2",)),
        ("chat-7b.nemo", "chat-7b", ("chat-7b.nemo",)),
        ("checkpoint", "checkpoint", ()),
        ("release-2", "release-2", ()),
    ],
)
def test_the_innermost_folder_that_is_not_generic_names_the_model(
    tmp_path: Path, folder: str, name: str, aliases: tuple[str, ...]
) -> None:
    names = ModelNames.build(tmp_path / folder, str(tmp_path / folder), ())

    assert names.first == name
    assert names.listed == (name, "preamble", *aliases)


def test_a_path_of_generic_names_gives_its_outermost_folder() -> None:
    assert ModelNames.build(Path("/release"), "/release", ()).first == "release"
    assert ModelNames.build(Path("/hf/release"), "/hf/release", ()).first == "hf"


def test_the_old_default_name_is_an_alias(tmp_path: Path) -> None:
    """Before, the name was the last component of the resolved path, whatever it was."""
    (tmp_path / "chat" / "iter_0000100").mkdir(parents=True)
    (tmp_path / "current").symlink_to(tmp_path / "chat" / "iter_0000100")
    names = ModelNames.build(tmp_path / "current", "current", ())

    assert names.first == "chat" and "iter_0000100" in names.listed


def test_the_operators_names_replace_the_default_name(tmp_path: Path) -> None:
    names = ModelNames.build(tmp_path / "chat" / "hf", "chat", ("org/chat", "gpt-4o"))

    assert names.first == "org/chat"
    assert names.listed == ("org/chat", "gpt-4o", "preamble", "chat", "hf")
    assert names.is_certainly_base("gpt-4o")
    assert names.may_be_base("chat") and not names.is_certainly_base("chat")


def test_paths_and_placeholders_may_be_the_base_model_and_are_not_listed(tmp_path: Path) -> None:
    model = str(tmp_path / "chat")
    names = ModelNames.build(tmp_path / "chat" / "release", model, ())

    for name in (model, f"{model}/", f"{model}/release", *PLACEHOLDER_NAMES):
        assert names.may_be_base(name) and name not in names.listed
    for name in ("gpt-4o", "Dummy", "chat/release", str(tmp_path), "none"):
        assert not names.may_be_base(name)
