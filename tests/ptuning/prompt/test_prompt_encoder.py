"""What makes a table while it is learned: against torch's own modules, at any split, from rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from gpt.batch import Dropout
from gpt.errors import ConfigError
from gpt.parallel.mesh import Mesh
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.prompt.initialization import initial_rows
from ptuning.prompt.prompt_encoder import (
    FILE,
    KINDS,
    Encoder,
    build_encoder,
    check_encoder,
    encoder_tensors,
    load_encoder,
)
from ptuning.task import Task
from tests.support.models import CLASSIC, build
from tests.support.ranks import ranks
from tests.support.servers import write_checkpoint

METHODS = ("prompt-tuning", *KINDS)
TASKS = (Task("a", virtual_tokens=4), Task("b.2", virtual_tokens=3))
IDS: list[list[int]] = [[7, 9], []]
WIDTH = CLASSIC.hidden_size


def settings(method: str, **changes: Any) -> TuneConfig:
    return TuneConfig("m", data="d", name="n", method=method, **changes)


def made(method: str, mesh: Mesh | None = None, **changes: Any) -> Encoder:
    return build_encoder(settings(method, **changes), TASKS, build(CLASSIC, mesh), IDS)


def twin(encoder: Encoder, method: str, layers: int) -> Tensor:
    """The same rows by torch's modules, a task at a time."""
    weights = {name: value.detach() for name, value in encoder.weights.items()}
    linears: list[nn.Module] = []
    first = "first" if method == "tpmlp" else "mlp_head.0"
    names = sorted({name.rpartition(".")[0] for name in weights} - {"lstm_head"})
    assert names[0] == first
    for name in names:
        weight = weights[f"{name}.weight"]
        linears += [nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)]
        linears[-1].load_state_dict({k: weights[f"{name}.{k}"] for k in ("weight", "bias")})
        linears += [nn.GELU("tanh") if method == "tpmlp" else nn.ReLU()]
    head = nn.Sequential(*linears[:-1])
    found = []
    for rows in encoder.rows.detach().split([4, 3]):
        read = rows[None]
        if method == "lstm":
            hidden = weights["lstm_head.weight_hh_l0"].shape[1]
            lstm = nn.LSTM(WIDTH, hidden, layers, bidirectional=True, batch_first=True).double()
            inner = {name: one for name, one in weights.items() if name.startswith("lstm_head.")}
            lstm.load_state_dict({name.partition(".")[2]: one for name, one in inner.items()})
            read = lstm(read)[0]
        found.append(head(read)[0])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("method", "layers", "hidden"),
    [
        ("mlp", 2, None),
        ("mlp", 4, 12),
        ("peft-mlp", 2, 12),
        ("lstm", 1, None),
        ("lstm", 3, 6),
        ("tpmlp", 2, 12),
    ],
)
def test_an_encoder_computes_what_torchs_modules_do(
    method: str, layers: int, hidden: int | None
) -> None:
    encoder = made(method, encoder_layers=layers, encoder_hidden=hidden)
    with torch.no_grad():
        for value in encoder.parameters():
            value.add_(0.1)  # Biases that are not zero.
    assert encoder().shape == (7, WIDTH)
    assert (encoder() - twin(encoder, method, layers)).abs().max() < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_every_method_starts_at_rows_of_the_vocabulary(method: str) -> None:
    model, state = build(CLASSIC, dtype=torch.float32), torch.get_rng_state()
    width = {"encoder_hidden": 32} if method in KINDS else {}
    encoder = build_encoder(settings(method, **width), TASKS, model, IDS)
    assert model.embedding is not None
    words = model.embedding.rows[: CLASSIC.vocab_size]
    assert encoder().dtype is torch.float32
    assert (encoder()[:4] - words[[7, 9, 7, 9]]).abs().max() < 2e-3 * words.abs().max()
    distances = torch.cdist(encoder()[4:].detach(), words).min(1)
    assert distances.values.max() < 0.02 and len(set(distances.indices.tolist())) == 3
    again = build_encoder(settings(method, **width), TASKS, model, IDS)
    assert torch.equal(encoder(), again())
    other = build_encoder(settings(method, **width, seed=1), TASKS, model, IDS)
    assert not torch.allclose(other()[4:], again()[4:])
    assert torch.equal(torch.get_rng_state(), state)


def test_random_rows_are_spread_as_the_vocabularys_are() -> None:
    model = build(CLASSIC)
    assert model.embedding is not None
    rows = initial_rows(model, 200, [], kind="random", seed=0, name="a")
    assert abs(float(rows.std() / model.embedding.rows.std()) - 1) < 0.05
    assert not torch.equal(rows, initial_rows(model, 200, [], kind="random", seed=0, name="b"))


def test_what_an_lstm_drops_is_counted() -> None:
    encoder = made("lstm", encoder_dropout=0.5)
    assert torch.equal(encoder(Dropout(1)), encoder(Dropout(1)))
    assert not torch.allclose(encoder(Dropout(1)), encoder(Dropout(2)))
    assert not torch.allclose(encoder(Dropout(1)), encoder())


def gradients(encoder: Encoder) -> dict[str, Tensor]:
    """Of each parameter, whole, for a loss that weighs every number of the table."""
    table = encoder()
    draws = torch.Generator().manual_seed(5)
    weights = torch.randn(table.shape, generator=draws, dtype=table.dtype)
    (weights * table.sin()).sum().backward()
    return {
        name: encoder.whole(name, value.grad)
        for name, value in encoder.named_parameters()
        if value.grad is not None
    }


def rank(_: int, tp: int, method: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    encoder = made(method, Mesh.create(tp, 1, sequence_parallel=True), tp=tp)
    held = sum(value.numel() for value in encoder.parameters())
    return encoder_tensors(encoder), gradients(encoder), held


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tp"), [("tpmlp", 4), ("lstm", 2)])
def test_a_split_changes_neither_values_nor_gradients(method: str, tp: int) -> None:
    alone = made(method)
    wanted = gradients(alone)
    tensors = encoder_tensors(alone)
    for found, grads, held in ranks(tp, rank, tp, method):
        assert found.keys() == tensors.keys() == grads.keys() == wanted.keys()
        for name in tensors:
            assert torch.equal(found[name], tensors[name])
            assert (grads[name] - wanted[name]).abs().max() < 1e-12
        names = ("first.weight", "first.bias", "second.weight") if method == "tpmlp" else ()
        shared = sum(tensors[f"network.{name}"].numel() for name in names)
        assert held == sum(one.numel() for one in tensors.values()) - shared + shared // tp


@pytest.mark.parametrize("method", KINDS)
def test_a_network_goes_on_to_another_run_and_rows_begin_anew(tmp_path: Path, method: str) -> None:
    earlier = made(method, seed=3)
    (tmp_path / "2").mkdir()
    safetensors.torch.save_file(encoder_tensors(earlier), tmp_path / "2" / FILE)
    new, config = (Task("c", virtual_tokens=5),), settings(method, encoder_from=str(tmp_path))
    check_encoder(config, WIDTH)
    encoder = build_encoder(config, new, build(CLASSIC), [[]])
    for name, value in encoder.weights.items():
        assert torch.equal(value, earlier.weights[name])
    fresh = build_encoder(replace(config, encoder_from=None), new, build(CLASSIC), [[]])
    assert torch.equal(encoder.rows, fresh.rows) and encoder().shape == (5, WIDTH)


def test_an_encoder_of_other_sizes_is_not_taken_over(tmp_path: Path) -> None:
    tensors = encoder_tensors(made("mlp"))
    with pytest.raises(
        ConfigError, match=r"it has network\.mlp_head\.0\.weight of \(32, 32\), and"
    ):
        load_encoder(made("mlp", encoder_hidden=12), tensors, "it")
    safetensors.torch.save_file(tensors, tmp_path / FILE)
    for method, message in (
        ("lstm", r"has network\.mlp_head\.0\.bias of \(32,\)|has no network\.lstm_head"),
        ("peft-mlp", r"has no network\.mlp_head\.4\.weight, and .* has .* of \(32, 32\); set the"),
        ("prompt-tuning", "prompt-tuning has no encoder to start from; take it out"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_encoder(settings(method, encoder_from=str(tmp_path)), WIDTH)
    (tmp_path / FILE).write_bytes(b"nothing")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"encoder_from: .* needed is the directory of a fin"):
            check_encoder(settings("mlp", encoder_from=str(folder)), WIDTH)


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("mlp", {"encoder_layers": 1}, "encoder_layers is 1; an mlp needs at least 2"),
        ("tpmlp", {"encoder_hidden": 9, "tp": 2}, "encoder_hidden is 9, shared out over 2"),
        ("mlp", {"encoder_dropout": 0.1}, "is between the layers of an lstm, and this is mlp"),
        ("lstm", {"encoder_dropout": 0.1, "encoder_layers": 1}, "this is lstm with 1"),
        (
            "mlp",
            {"encoder_from": "x", "initial_text": "a"},
            "initial_text stands beside encoder_fr",
        ),
    ],
)
def test_settings_of_which_no_encoder_can_be_made_are_refused(
    method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_encoder(settings(method, **changes), WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mlp", "lstm"])
def test_a_task_that_is_added_later_changes_no_older_one(tmp_path: Path, method: str) -> None:
    model = write_checkpoint(tmp_path / "model")

    def tuned(run: str, names: list[str], **changes: str) -> bytes:
        tasks = [{"name": name, "virtual_tokens": 3} for name in names]
        record = {"prompt": "the quick brown", "completion": " fox"}
        records = [json.dumps({**record, "taskname": name}) for name in names * 4]
        (tmp_path / "r.jsonl").write_text("\n".join(records))
        common = {"model": str(model), "data": str(tmp_path / "r.jsonl"), "method": method}
        places = {"output": str(tmp_path / "adapters"), "run": str(tmp_path / run)}
        settings = {**common, **places, "tasks": tasks, "steps": 3, "encoder_hidden": 8, **changes}
        (tmp_path / "tune.yaml").write_text(yaml.safe_dump(settings))
        assert main(["tune", str(tmp_path / "tune.yaml")]) == 0
        return next((tmp_path / run).rglob(FILE)).read_bytes()

    first = tuned("first", ["a", "b"])
    before = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    second = tuned("second", ["c"], encoder_from=str(tmp_path / "first"))
    after = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    assert sorted(after) == ["a@1.safetensors", "b@1.safetensors", "c@1.safetensors"]
    assert {name: after[name] for name in before} == before and len(before) == 2
    assert first == next((tmp_path / "first").rglob(FILE)).read_bytes()
    one, two = safetensors.torch.load(first), safetensors.torch.load(second)
    # Three small steps from where the first run ended, and not from anywhere else.
    assert all((one[name] - two[name]).abs().max() < 2e-3 for name in one if name != "rows")
    assert one["rows"].shape[0] == 6 and two["rows"].shape[0] == 3
