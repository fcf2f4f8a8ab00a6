"""Whatever shares its batch, and however it is cut, a request gets the tokens it gets alone.

Scenes drawn from seeds run on the whole engine below the front end: planner, scheduler, runner. The
oracle is `gpt.generation.generate` with a batch of one. In fp64 tokens are equal without exception;
in fp32 up to the first place where the two best logits are closer than rounding moves them.
"""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch

from gpt.backends.cpu_packing import Packed, pack
from gpt.cpu import kernels
from gpt.model.gpt_model import GPT
from gpt.model.layers import Linear
from tests.support.batch_runs import SIZES, Tally, check, run
from tests.support.engine_scenarios import (
    Scene,
    Shelf,
    drawn,
    lead,
    poisoned,
    squeezed,
    studied,
)
from tests.support.models import CONFIGS, build

SPLITS = [(2, 1), (1, 2), (2, 2)]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    """All networks of the tests are equally wide, so adapters fit all."""
    (width,) = {config.hidden_size for config in CONFIGS.values()}
    return Shelf.make(tmp_path_factory.mktemp("adapters"), width, SIZES)


def scenes(shelf: Shelf, seeds: range, dtype: str = "float64") -> list[Scene]:
    return [drawn(name, seed, shelf, dtype=dtype) for name in CONFIGS for seed in seeds]


def assert_hard(tally: Tally) -> None:
    """The scenes forced what engines do when they are short of something."""
    assert tally.preemptions > 0
    assert tally.cached > 0
    assert tally.chunked > 0
    assert tally.cancelled > 0
    assert tally.loads > 0


@pytest.mark.parametrize("name", ["classic", "experts"])
def test_short_of_memory_every_request_gets_what_it_gets_alone(
    name: str, shelf: Shelf, tmp_path: Path
) -> None:
    assert_hard(run([squeezed(name, shelf)], (1, 1), tmp_path, shelf))


@pytest.mark.parametrize("name", ["modern", "odd"])
def test_many_tasks_on_one_document_compute_it_once(
    name: str, shelf: Shelf, tmp_path: Path
) -> None:
    tally = run([studied(name, shelf)], (1, 1), tmp_path, shelf)
    # Each finds its three whole blocks, and some find the part of the fourth as well.
    assert tally.cached > 4 * 24


def test_on_one_rank_every_request_gets_what_it_gets_alone(shelf: Shelf, tmp_path: Path) -> None:
    assert_hard(run(scenes(shelf, range(1)), (1, 1), tmp_path, shelf))


# Two ranks either way; the long tests below have four.
@pytest.mark.parametrize("split", SPLITS[:2])
def test_on_any_split_every_request_gets_what_it_gets_alone(
    split: tuple[int, int], shelf: Shelf, tmp_path: Path
) -> None:
    # Every network on every split is among the slow scenes.
    names = {(2, 1): ["experts"], (1, 2): ["odd"], (2, 2): ["classic"]}[split]
    played = [squeezed("modern", shelf), *(drawn(name, 0, shelf) for name in names)]
    tally = run(played, split, tmp_path, shelf)
    assert_hard(tally)
    assert tally.in_flight == (split[1] if split[1] > 1 else 0)


@pytest.mark.parametrize("split", [(1, 1)])
def test_in_fp32_only_what_rounding_decides_may_differ(
    split: tuple[int, int], shelf: Shelf, tmp_path: Path
) -> None:
    names = ["modern"] if split == (2, 2) else ["classic", "odd", "experts"]
    played = [drawn(name, 0, shelf, dtype="float32") for name in names]
    tally = run(played, split, tmp_path, shelf)
    assert tally.ties <= tally.requests // 10


def forced(backend: str, name: str, patch: pytest.MonkeyPatch) -> GPT:
    """A model in fp32 that answers by this alone, whatever this machine would take by itself."""
    model = build(CONFIGS[name], dtype=torch.float32)
    if backend == "torch":
        patch.setattr(kernels, "library", lambda: None)
    elif backend == "packed":
        pack(model)
        assert any(isinstance(one, Packed) for one in products_of(model))
    else:
        kernels.choose_machine(backend)
        if kernels.machine() != backend:
            pytest.skip(f"this machine is less than {backend}, or the library was not built")
    return model


def products_of(model: GPT) -> list[object]:
    return [module.product for module in model.modules() if isinstance(module, Linear)]


def answered_by(
    backend: str, names: list[str], seeds: range, shelf: Shelf, patch: pytest.MonkeyPatch
) -> Tally:
    tally = Tally()
    try:
        for name in names:
            model = forced(backend, name, patch)
            for seed in seeds:
                scene = drawn(name, seed, shelf, dtype="float32")
                check(scene, lead(model, scene), shelf, tally)
    finally:
        kernels.choose_machine(None)
    assert tally.ties <= tally.requests // 10
    return tally


BACKENDS = ["torch", *kernels.MACHINES, "packed"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_by_every_backend_a_request_gets_what_it_gets_alone(
    backend: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered_by(backend, ["modern"], range(1), shelf, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_many_scenes_by_every_backend(
    backend: str, shelf: Shelf, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_hard(answered_by(backend, list(CONFIGS), range(400, 404), shelf, monkeypatch))


@pytest.mark.parametrize("split", [(1, 1), (2, 1), (1, 2)])
def test_numbers_that_overflow_are_nobody_elses_trouble(
    split: tuple[int, int], shelf: Shelf, tmp_path: Path
) -> None:
    tally = run([poisoned("classic", shelf)], split, tmp_path, shelf)
    assert tally.faults == 3


def guessing(scene: Scene, **settings: object) -> Scene:
    """The same with prompts of a few tokens, which models like these go on with for long."""
    vocabulary = CONFIGS[scene.name].vocab_size
    asks = []
    for at, one in scene.asks:
        prompt = [token if token >= vocabulary else token % 4 for token in one.prompt]
        asks.append((at, msgspec.structs.replace(one, prompt=prompt)))
    more = {"speculate_tokens_max": 3, "speculate_rows_max": 12, **settings}
    return replace(scene, asks=asks, settings=scene.settings | more)


def guessed(names: list[str], shelf: Shelf, seeds: range) -> list[Scene]:
    scenes = [guessing(drawn(name, seed, shelf)) for name in names for seed in seeds]
    for number, name in enumerate(names):
        scenes.append(guessing(squeezed(name, shelf)))
        scenes.append(
            guessing(squeezed(name, shelf), prefix_cache=False, speculate_tokens_max=1 + number)
        )
    return scenes


def assert_guessed(tally: Tally) -> None:
    assert tally.preemptions > 0
    assert tally.cached > 0
    assert 0 < tally.accepted < tally.drafted


def test_who_is_guessed_gets_what_it_gets_alone(shelf: Shelf, tmp_path: Path) -> None:
    assert_guessed(run(guessed(["classic", "modern"], shelf, range(1)), (1, 1), tmp_path, shelf))


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1, 1), *SPLITS])
def test_many_scenes_with_guesses_on_any_split(
    split: tuple[int, int], shelf: Shelf, tmp_path: Path
) -> None:
    count = 8 if split == (1, 1) else 2
    played = guessed(list(CONFIGS), shelf, range(300, 300 + count))
    assert_guessed(run(played, split, tmp_path, shelf, 600))


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1, 1), (2, 2)])
def test_many_scenes_in_fp32(split: tuple[int, int], shelf: Shelf, tmp_path: Path) -> None:
    count = 5 if split == (1, 1) else 1
    tally = run(scenes(shelf, range(200, 200 + count), "float32"), split, tmp_path, shelf, 600)
    assert tally.ties <= tally.requests // 10


@pytest.mark.slow
@pytest.mark.parametrize("split", [(1, 1), *SPLITS])
def test_many_scenes_on_any_split(split: tuple[int, int], shelf: Shelf, tmp_path: Path) -> None:
    count = 15 if split == (1, 1) else 3
    assert_hard(run(scenes(shelf, range(100, 100 + count)), split, tmp_path, shelf, 600))
