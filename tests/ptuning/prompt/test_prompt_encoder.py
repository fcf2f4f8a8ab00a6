"""Prompt encoder: compared with PyTorch modules, for every split, and its initial rows."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import yaml
from torch import Tensor, nn

from gpt.dropout import Dropout
from gpt.errors import ConfigError
from gpt.model.gpt_model import GPT
from gpt.parallel.mesh import Mesh
from ptuning.__main__ import main
from ptuning.config import TuneConfig
from ptuning.prompt.initialization import initial_rows
from ptuning.prompt.prompt_encoder import (
    ENCODER_FILE,
    ENCODER_KINDS,
    PromptEncoder,
    build_encoder,
    check_encoder,
    encoder_tensors,
    load_encoder,
)
from ptuning.task import Task
from tests.support.models import CLASSIC, build
from tests.support.ranks import ranks
from tests.support.servers import write_checkpoint

METHODS = ("prompt-tuning", *ENCODER_KINDS)
TASKS = (Task("a", virtual_tokens=4), Task("b.2", virtual_tokens=3))
IDS: list[list[int]] = [[7, 9], []]
WIDTH = CLASSIC.hidden_size


def settings(method: str, **changes: Any) -> TuneConfig:
    return TuneConfig("m", data="d", name="n", method=method, **changes)


def build_with(
    config: TuneConfig, model: GPT, tasks: Sequence[Task] = TASKS, ids: list[list[int]] = IDS
) -> PromptEncoder:
    seed = config.training_config.seed
    return build_encoder(config.method_config, tasks, model, ids, seed=seed)


def build_test_encoder(method: str, mesh: Mesh | None = None, **changes: Any) -> PromptEncoder:
    return build_with(settings(method, **changes), build(CLASSIC, mesh))


def check(config: TuneConfig) -> None:
    tasks, tp = config.data_config.resolved_tasks, config.parallel_config.tp
    check_encoder(config.method_config, tasks, WIDTH, tp=tp)


def torch_reference(encoder: PromptEncoder, method: str, layers: int) -> Tensor:
    """The same rows computed by PyTorch modules, one task at a time."""
    weights = {name: value.detach() for name, value in encoder.weights.items()}
    linears: list[nn.Module] = []
    first_layer = "first" if method == "tpmlp" else "mlp_head.0"
    names = sorted({name.rpartition(".")[0] for name in weights} - {"lstm_head"})
    assert names[0] == first_layer
    for name in names:
        weight = weights[f"{name}.weight"]
        linears += [nn.Linear(weight.shape[1], weight.shape[0], dtype=weight.dtype)]
        linears[-1].load_state_dict({k: weights[f"{name}.{k}"] for k in ("weight", "bias")})
        linears += [nn.GELU("tanh") if method == "tpmlp" else nn.ReLU()]
    head = nn.Sequential(*linears[:-1])
    tables = []
    for rows in encoder.rows.detach().split([4, 3]):
        activations = rows[None]
        if method == "lstm":
            hidden = weights["lstm_head.weight_hh_l0"].shape[1]
            lstm = nn.LSTM(WIDTH, hidden, layers, bidirectional=True, batch_first=True).double()
            lstm_state = {
                name: weight for name, weight in weights.items() if name.startswith("lstm_head.")
            }
            lstm.load_state_dict(
                {name.partition(".")[2]: tensor for name, tensor in lstm_state.items()}
            )
            activations = lstm(activations)[0]
        tables.append(head(activations)[0])
    return torch.cat(tables)


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
def test_encoder_equals_torch_modules(method: str, layers: int, hidden: int | None) -> None:
    encoder = build_test_encoder(method, encoder_layers=layers, encoder_hidden=hidden)
    with torch.no_grad():
        for value in encoder.parameters():
            value.add_(0.1)  # Non-zero biases.
    assert encoder().shape == (7, WIDTH)
    assert (encoder() - torch_reference(encoder, method, layers)).abs().max() < 1e-12


@pytest.mark.parametrize("method", METHODS)
def test_every_method_starts_at_embedding_rows(method: str) -> None:
    model = build(CLASSIC, dtype=torch.float32)
    state = torch.get_rng_state()
    width = {"encoder_hidden": 32} if method in ENCODER_KINDS else {}
    encoder = build_with(settings(method, **width), model)
    assert model.embedding is not None
    embedding = model.embedding.weight_shard[: CLASSIC.vocab_size]
    assert encoder().dtype is torch.float32
    assert (encoder()[:4] - embedding[[7, 9, 7, 9]]).abs().max() < 2e-3 * embedding.abs().max()
    distances = torch.cdist(encoder()[4:].detach(), embedding).min(1)
    assert distances.values.max() < 0.02 and len(set(distances.indices.tolist())) == 3
    same_seed = build_with(settings(method, **width), model)
    assert torch.equal(encoder(), same_seed())
    other_seed = build_with(settings(method, **width, seed=1), model)
    assert not torch.allclose(other_seed()[4:], same_seed()[4:])
    assert torch.equal(torch.get_rng_state(), state)


def test_random_rows_have_the_embeddings_deviation() -> None:
    model = build(CLASSIC)
    assert model.embedding is not None
    rows = initial_rows(model, 200, [], kind="random", seed=0, name="a")
    assert abs(float(rows.std() / model.embedding.weight_shard.std()) - 1) < 0.05
    assert not torch.equal(rows, initial_rows(model, 200, [], kind="random", seed=0, name="b"))


def test_lstm_dropout_is_drawn_by_counting() -> None:
    encoder = build_test_encoder("lstm", encoder_dropout=0.5)
    assert torch.equal(encoder(Dropout(1)), encoder(Dropout(1)))
    assert not torch.allclose(encoder(Dropout(1)), encoder(Dropout(2)))
    assert not torch.allclose(encoder(Dropout(1)), encoder())


def gradients(encoder: PromptEncoder) -> dict[str, Tensor]:
    """Full gradients of all parameters, for a loss that depends on every table entry."""
    table = encoder()
    draws = torch.Generator().manual_seed(5)
    weights = torch.randn(table.shape, generator=draws, dtype=table.dtype)
    (weights * table.sin()).sum().backward()
    return {
        name: encoder.gather(name, value.grad)
        for name, value in encoder.named_parameters()
        if value.grad is not None
    }


def rank(_: int, tp: int, method: str) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    encoder = build_test_encoder(method, Mesh.create(tp, 1, sequence_parallel=True), tp=tp)
    parameter_count = sum(value.numel() for value in encoder.parameters())
    return encoder_tensors(encoder), gradients(encoder), parameter_count


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tp"), [("tpmlp", 4), ("lstm", 2)])
def test_encoder_values_and_gradients_are_equal_for_every_split(method: str, tp: int) -> None:
    single_rank = build_test_encoder(method)
    expected_grads = gradients(single_rank)
    tensors = encoder_tensors(single_rank)
    for table, grads, parameter_count in ranks(tp, rank, tp, method):
        assert table.keys() == tensors.keys() == grads.keys() == expected_grads.keys()
        for name in tensors:
            assert torch.equal(table[name], tensors[name])
            assert (grads[name] - expected_grads[name]).abs().max() < 1e-12
        names = ("first.weight", "first.bias", "second.weight") if method == "tpmlp" else ()
        shared_count = sum(tensors[f"network.{name}"].numel() for name in names)
        assert (
            parameter_count
            == sum(tensor.numel() for tensor in tensors.values())
            - shared_count
            + shared_count // tp
        )


@pytest.mark.parametrize("method", ENCODER_KINDS)
def test_encoder_from_loads_the_network_but_not_the_rows(tmp_path: Path, method: str) -> None:
    earlier = build_test_encoder(method, seed=3)
    (tmp_path / "2").mkdir()
    safetensors.torch.save_file(encoder_tensors(earlier), tmp_path / "2" / ENCODER_FILE)
    new_tasks = (Task("c", virtual_tokens=5),)
    config = settings(method, encoder_from=str(tmp_path))
    check(config)
    encoder = build_with(config, build(CLASSIC), new_tasks, [[]])
    for name, value in encoder.weights.items():
        assert torch.equal(value, earlier.weights[name])
    fresh = build_with(config.with_fields(encoder_from=None), build(CLASSIC), new_tasks, [[]])
    assert torch.equal(encoder.rows, fresh.rows) and encoder().shape == (5, WIDTH)


def test_encoder_of_other_sizes_is_refused(tmp_path: Path) -> None:
    tensors = encoder_tensors(build_test_encoder("mlp"))
    with pytest.raises(
        ConfigError, match=r"it has network\.mlp_head\.0\.weight of \(32, 32\), but"
    ):
        load_encoder(build_test_encoder("mlp", encoder_hidden=12), tensors, "it")
    safetensors.torch.save_file(tensors, tmp_path / ENCODER_FILE)
    for method, message in (
        ("lstm", r"has network\.mlp_head\.0\.bias of \(32,\)|has no network\.lstm_head"),
        ("peft-mlp", r"has no network\.mlp_head\.4\.weight, but .* has .* of \(32, 32\); set the"),
        ("prompt-tuning", "prompt-tuning has no encoder; remove encoder_from"),
    ):
        with pytest.raises(ConfigError, match=message):
            check(settings(method, encoder_from=str(tmp_path)))
    (tmp_path / ENCODER_FILE).write_bytes(b"nothing")
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(
            ConfigError, match=r"encoder_from: .* set encoder_from to the directory of a fin"
        ):
            check(settings("mlp", encoder_from=str(folder)))


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        ("mlp", {"encoder_layers": 1}, "encoder_layers is 1, but method mlp needs at least 2"),
        ("tpmlp", {"encoder_hidden": 9, "tp": 2}, "encoder_hidden is 9, but it is sharded over 2"),
        ("mlp", {"encoder_dropout": 0.1}, "between the layers of an lstm, but method is mlp"),
        (
            "lstm",
            {"encoder_dropout": 0.1, "encoder_layers": 1},
            "method is lstm with encoder_layers 1",
        ),
        (
            "mlp",
            {"encoder_from": "x", "initial_text": "a"},
            "initial_text and encoder_from are both set",
        ),
    ],
)
def test_unsupported_encoder_settings_are_refused(
    method: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(settings(method, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mlp", "lstm"])
def test_task_added_later_does_not_change_earlier_tasks(tmp_path: Path, method: str) -> None:
    model = write_checkpoint(tmp_path / "model")

    def tune(run: str, names: list[str], **changes: str) -> bytes:
        tasks = [{"name": name, "virtual_tokens": 3} for name in names]
        record = {"prompt": "the quick brown", "completion": " fox"}
        records = [json.dumps({**record, "taskname": name}) for name in names * 4]
        (tmp_path / "r.jsonl").write_text("\n".join(records))
        common = {"model": str(model), "data": str(tmp_path / "r.jsonl"), "method": method}
        places = {"output": str(tmp_path / "adapters"), "run": str(tmp_path / run)}
        settings = {**common, **places, "tasks": tasks, "steps": 3, "encoder_hidden": 8, **changes}
        (tmp_path / "tune.yaml").write_text(yaml.safe_dump(settings))
        assert main(["tune", str(tmp_path / "tune.yaml")]) == 0
        return next((tmp_path / run).rglob(ENCODER_FILE)).read_bytes()

    first_encoder = tune("first", ["a", "b"])
    adapters_before = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    second_encoder = tune("second", ["c"], encoder_from=str(tmp_path / "first"))
    adapters_after = {path.name: path.read_bytes() for path in (tmp_path / "adapters").iterdir()}
    assert sorted(adapters_after) == ["a@1.safetensors", "b@1.safetensors", "c@1.safetensors"]
    assert {name: adapters_after[name] for name in adapters_before} == adapters_before and len(
        adapters_before
    ) == 2
    assert first_encoder == next((tmp_path / "first").rglob(ENCODER_FILE)).read_bytes()
    weights_of_first = safetensors.torch.load(first_encoder)
    two = safetensors.torch.load(second_encoder)
    # Three small steps from the state of the first run, and not from another one.
    assert all(
        (weights_of_first[name] - two[name]).abs().max() < 2e-3
        for name in weights_of_first
        if name != "rows"
    )
    assert weights_of_first["rows"].shape[0] == 6 and two["rows"].shape[0] == 3
