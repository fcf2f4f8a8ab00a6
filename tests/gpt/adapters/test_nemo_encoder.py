"""NeMo prompt encoders: rows that NeMo did not save are computed, or refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from checkpoints_tools.conversion.convert import write_native
from gpt.adapters.adapter_file import open_adapter
from gpt.errors import AdapterError
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.adapter_exchange import CONFIG_1, TABLE, TASK, V, write_nemo_adapter
from tests.support.models import lively
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

HIDDEN = 6


def encoder_of(kind: str, rows: Tensor, width: int) -> tuple[dict[str, Tensor], Tensor]:
    """A random network under NeMo's names, and its output by torch's modules."""
    torch.manual_seed(2)
    source = rows.shape[1]
    modules = dict[str, nn.Module]()
    if kind == "tpmlp":
        linear_in = nn.Linear(source, HIDDEN)
        linear_out = nn.Linear(HIDDEN, width)
        modules = {"first": linear_in, "second": linear_out}
        output = linear_out(F.gelu(linear_in(rows), approximate="tanh"))
    elif kind == "lstm":
        lstm = nn.LSTM(source, HIDDEN, 2, bidirectional=True, batch_first=True)
        head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, width))
        modules = {"lstm_head": lstm, "mlp_head": head}
        output = head(lstm(rows[None])[0])[0]
    else:
        linears = nn.Linear(source, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, width)
        head = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])
        modules = {"mlp_head": head}
        output = head(rows)
    tensors = {
        f"{name}.{leaf}": value.detach()
        for name, module in modules.items()
        for leaf, value in module.state_dict().items()
    }
    return tensors, output.detach()


def shard_network(network: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """A tensor-parallel network as each tensor rank saves it."""
    dimensions = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
    return [
        {
            name: tensor.chunk(count, dimensions[name])[rank].clone()
            if name in dimensions
            else tensor
            for name, tensor in network.items()
        }
        for rank in range(count)
    ]


def nest_network(network: dict[str, Tensor], kind: str, rows: Tensor) -> dict[str, Any]:
    """The layout from 1.17 on: a nested dict per module."""
    zeros = {"prompt_table.mood.prompt_embeddings.weight": rows * 0}
    state: dict[str, Any] = {"prompt_table": zeros, "embeddings": {"weight": rows}}
    for name, tensor in network.items():
        module, _, leaf = name.partition(".")
        nest, key = ("tpmlp", name) if kind == "tpmlp" else (module, leaf)
        state.setdefault(nest, {})[key] = tensor
    return state


def write_rank_files(
    folder: Path, states: list[Any], config: Any, form: str = "mp_rank_{:02d}"
) -> Path:
    """A directory with a file for each tensor rank."""
    for rank, state in enumerate(states):
        (folder / "p" / form.format(rank)).mkdir(parents=True)
        torch.save(state, folder / "p" / form.format(rank) / "model_weights.ckpt")
    (folder / "p" / "model_config.yaml").write_text(yaml.safe_dump(config))
    return folder / "p"


@pytest.mark.parametrize("kind", ["mlp", "lstm", "tpmlp", "tpmlp, split"])
def test_zero_rows_are_computed_by_the_encoder(tmp_path: Path, kind: str) -> None:
    rows = torch.randn(V, 4)
    kind = kind.split(",")[0]
    network, expected = encoder_of(kind, rows, 4)
    if "tpmlp" in kind:
        states = [nest_network(shard, kind, rows) for shard in shard_network(network, 3)]
        source = write_rank_files(tmp_path, states, CONFIG_1 | {"tensor_model_parallel_size": 3})
    else:
        source = write_nemo_adapter(tmp_path, nest_network(network, kind, rows))
    adapter = open_adapter(source)
    assert (adapter.table - expected).abs().max() < 1e-6
    assert any("computed by the encoder" in note for note in adapter.card.notes)
    assert adapter.card.template is not None and adapter.card.task == "mood"


def test_lstm_without_its_head_is_refused(tmp_path: Path) -> None:
    rows = torch.randn(V, 4)
    network = encoder_of("lstm", rows, 4)[0]
    network = {name: tensor for name, tensor in network.items() if name.startswith("lstm_head")}
    with pytest.raises(AdapterError, match="and its encoder is incomplete; give a file"):
        open_adapter(write_nemo_adapter(tmp_path, nest_network(network, "lstm", rows)))


def test_encoder_without_a_network_is_the_table(tmp_path: Path) -> None:
    state = nest_network({}, "embedding", TABLE)
    with_type = CONFIG_1 | {"p_tuning": {"encoder_type": "embedding"}}
    assert torch.equal(open_adapter(write_nemo_adapter(tmp_path, state, with_type)).table, TABLE)
    with pytest.raises(AdapterError, match="and its encoder is incomplete; give a file"):
        open_adapter(write_nemo_adapter(tmp_path / "b", state, CONFIG_1))


def test_encoder_inside_the_model_computes_unsaved_rows(tmp_path: Path) -> None:
    rows = torch.randn(V, 5)
    network, expected = encoder_of("tpmlp", rows, 4)
    leaf = "model.embedding.adapter_layer.ptuning_adapter"
    states = [
        {f"{leaf}.embedding.weight": rows, **{f"{leaf}.{name}": t for name, t in shard.items()}}
        for shard in shard_network(network, 2)
    ]
    config = {"position_embedding_type": "rope", "tensor_model_parallel_size": 2}
    source = write_rank_files(tmp_path, states, config, "tp_rank_{:02d}_pp_rank_000")
    assert (open_adapter(source).table - expected).abs().max() < 1e-6
    zeros = {f"{leaf}.inference_table": expected * 0}
    source = write_rank_files(tmp_path / "z", [state | zeros for state in states], config)
    assert (open_adapter(source).table - expected).abs().max() < 1e-6


def test_encoder_with_the_task_name_needs_the_base_model(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    write_native(lively(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    base = open_checkpoint(tmp_path / "model")
    name = open_tokenizer(tokenizer).encode("mood")
    embedding = base.read("embedding.word_embeddings.weight").float()
    rows = torch.randn(len(name) + 2, CONFIG.hidden_size)
    encoder_inputs = torch.cat([embedding[name], rows[len(name) :]])
    network, expected = encoder_of("mlp", encoder_inputs, CONFIG.hidden_size)
    encoder_state = {"embedding.weight": rows, "indices": torch.arange(len(rows)), **network}
    task = TASK | {"total_virtual_tokens": len(rows), "virtual_token_splits": [len(rows) - 1, 1]}
    config = {"task_templates": [task], "new_tasks": ["mood"]}
    source = write_nemo_adapter(
        tmp_path, {"prompt_table": {}, "prompt_encoder": encoder_state}, config
    )
    assert (open_adapter(source, base=base).table - expected).abs().max() < 1e-5
    with pytest.raises(
        AdapterError, match=r"also uses embeddings of the task's name, .* with --model"
    ):
        open_adapter(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[0].pop("second.bias"), "its encoder is incomplete"),
        (lambda parts: parts[1].pop("first.weight"), "its encoder is incomplete"),
        (lambda parts: parts.pop(), "its encoder has 2 shards, but the file has 1"),
        (lambda parts: parts[0].update({"first.bias": torch.ones(9)}), "is incomplete"),
        (lambda parts: parts[0].update({"first.bias": torch.tensor(1.0)}), "is incomplete"),
        (lambda parts: parts[1].update({"first.bias": torch.ones(3).long()}), "must be a dense"),
        (lambda parts: [part["first.bias"].fill_(torch.nan) for part in parts], "not finite"),
    ],
)
def test_incomplete_encoder_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    rows = torch.randn(V, 4)
    parts = shard_network(encoder_of("tpmlp", rows, 4)[0], 2)
    change(parts)
    states = [nest_network(part, "tpmlp", rows) for part in parts]
    with pytest.raises(AdapterError, match=message):
        open_adapter(
            write_rank_files(tmp_path, states, CONFIG_1 | {"tensor_model_parallel_size": 2})
        )
