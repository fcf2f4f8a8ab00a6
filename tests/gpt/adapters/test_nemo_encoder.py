"""Rows that NeMo never wrote down are made again by the encoder beside them, or refused."""

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
from tests.support.adapter_exchange import CONFIG_1, TABLE, TASK, V, nemo
from tests.support.models import lively
from tests.support.servers import CONFIG
from tests.support.trained_tokenizers import sentencepiece_model

HIDDEN = 6


def encoder_of(kind: str, rows: Tensor, width: int) -> tuple[dict[str, Tensor], Tensor]:
    """A lively network, named as NeMo names it, and what torch's modules make of the rows."""
    torch.manual_seed(2)
    source, modules = rows.shape[1], dict[str, nn.Module]()
    if kind == "tpmlp":
        first, second = nn.Linear(source, HIDDEN), nn.Linear(HIDDEN, width)
        modules = {"first": first, "second": second}
        made = second(F.gelu(first(rows), approximate="tanh"))
    elif kind == "lstm":
        lstm = nn.LSTM(source, HIDDEN, 2, bidirectional=True, batch_first=True)
        head = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, width))
        modules = {"lstm_head": lstm, "mlp_head": head}
        made = head(lstm(rows[None])[0])[0]
    else:
        linears = nn.Linear(source, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, width)
        head = nn.Sequential(linears[0], nn.ReLU(), linears[1], nn.ReLU(), linears[2])
        modules, made = {"mlp_head": head}, head(rows)
    tensors = {
        f"{name}.{leaf}": value.detach()
        for name, module in modules.items()
        for leaf, value in module.state_dict().items()
    }
    return tensors, made.detach()


def shards(network: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """A split network as each tensor rank saves it."""
    dimensions = {"first.weight": 0, "first.bias": 0, "second.weight": 1}
    return [
        {
            name: one.chunk(count, dimensions[name])[rank].clone() if name in dimensions else one
            for name, one in network.items()
        }
        for rank in range(count)
    ]


def nested(network: dict[str, Tensor], kind: str, rows: Tensor) -> dict[str, Any]:
    """From 1.17 on: a nest for each module."""
    zeros = {"prompt_table.mood.prompt_embeddings.weight": rows * 0}
    state: dict[str, Any] = {"prompt_table": zeros, "embeddings": {"weight": rows}}
    for name, one in network.items():
        module, _, leaf = name.partition(".")
        nest, key = ("tpmlp", name) if kind == "tpmlp" else (module, leaf)
        state.setdefault(nest, {})[key] = one
    return state


def ranked(folder: Path, states: list[Any], config: Any, form: str = "mp_rank_{:02d}") -> Path:
    """A directory with a file for each tensor rank."""
    for rank, state in enumerate(states):
        (folder / "p" / form.format(rank)).mkdir(parents=True)
        torch.save(state, folder / "p" / form.format(rank) / "model_weights.ckpt")
    (folder / "p" / "model_config.yaml").write_text(yaml.safe_dump(config))
    return folder / "p"


@pytest.mark.parametrize("kind", ["mlp", "lstm", "tpmlp", "tpmlp, split"])
def test_rows_that_nemo_left_at_zero_are_made_again_by_its_encoder(
    tmp_path: Path, kind: str
) -> None:
    rows, kind = torch.randn(V, 4), kind.split(",")[0]
    network, wanted = encoder_of(kind, rows, 4)
    if "tpmlp" in kind:
        states = [nested(one, kind, rows) for one in shards(network, 3)]
        source = ranked(tmp_path, states, CONFIG_1 | {"tensor_model_parallel_size": 3})
    else:
        source = nemo(tmp_path, nested(network, kind, rows))
    adapter = open_adapter(source)
    assert (adapter.table - wanted).abs().max() < 1e-6
    assert any("made again by the encoder" in note for note in adapter.card.notes)
    assert adapter.card.template is not None and adapter.card.task == "mood"


def test_an_lstm_without_its_head_makes_nothing(tmp_path: Path) -> None:
    rows = torch.randn(V, 4)
    network = encoder_of("lstm", rows, 4)[0]
    network = {name: one for name, one in network.items() if name.startswith("lstm_head")}
    with pytest.raises(AdapterError, match="and its encoder is not whole; take a save"):
        open_adapter(nemo(tmp_path, nested(network, "lstm", rows)))


def test_an_encoder_that_is_a_table_is_the_table(tmp_path: Path) -> None:
    state = nested({}, "embedding", TABLE)
    with_type = CONFIG_1 | {"p_tuning": {"encoder_type": "embedding"}}
    assert torch.equal(open_adapter(nemo(tmp_path, state, with_type)).table, TABLE)
    with pytest.raises(AdapterError, match="and its encoder is not whole; take a save"):
        open_adapter(nemo(tmp_path / "b", state, CONFIG_1))


def test_an_encoder_inside_nemos_model_makes_the_rows_that_were_not_saved(tmp_path: Path) -> None:
    rows = torch.randn(V, 5)
    network, wanted = encoder_of("tpmlp", rows, 4)
    leaf = "model.embedding.adapter_layer.ptuning_adapter"
    states = [
        {f"{leaf}.embedding.weight": rows, **{f"{leaf}.{name}": t for name, t in one.items()}}
        for one in shards(network, 2)
    ]
    config = {"position_embedding_type": "rope", "tensor_model_parallel_size": 2}
    source = ranked(tmp_path, states, config, "tp_rank_{:02d}_pp_rank_000")
    assert (open_adapter(source).table - wanted).abs().max() < 1e-6
    zeros = {f"{leaf}.inference_table": wanted * 0}
    source = ranked(tmp_path / "z", [one | zeros for one in states], config)
    assert (open_adapter(source).table - wanted).abs().max() < 1e-6


def test_an_encoder_that_read_the_tasks_name_needs_the_model(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.model"
    tokenizer.write_bytes(sentencepiece_model(model_type="bpe", byte_fallback=True))
    write_native(lively(CONFIG), tmp_path / "model", tokenizer=tokenizer)
    base = open_checkpoint(tmp_path / "model")
    name = open_tokenizer(tokenizer).encode("mood")
    words = base.read("embedding.word_embeddings.weight").float()
    rows = torch.randn(len(name) + 2, CONFIG.hidden_size)
    read = torch.cat([words[name], rows[len(name) :]])
    network, wanted = encoder_of("mlp", read, CONFIG.hidden_size)
    inner = {"embedding.weight": rows, "indices": torch.arange(len(rows)), **network}
    task = TASK | {"total_virtual_tokens": len(rows), "virtual_token_splits": [len(rows) - 1, 1]}
    config = {"task_templates": [task], "new_tasks": ["mood"]}
    source = nemo(tmp_path, {"prompt_table": {}, "prompt_encoder": inner}, config)
    assert (open_adapter(source, base=base).table - wanted).abs().max() < 1e-5
    with pytest.raises(AdapterError, match=r"also read the task's name .* give it with --model"):
        open_adapter(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda parts: parts[0].pop("second.bias"), "its encoder is not whole"),
        (lambda parts: parts[1].pop("first.weight"), "its encoder is not whole"),
        (lambda parts: parts.pop(), "its encoder is in 2 parts, of which 1 lie here"),
        (lambda parts: parts[0].update({"first.bias": torch.ones(9)}), "is not whole"),
        (lambda parts: parts[0].update({"first.bias": torch.tensor(1.0)}), "is not whole"),
        (lambda parts: parts[1].update({"first.bias": torch.ones(3).long()}), "must be a dense"),
        (lambda parts: [part["first.bias"].fill_(torch.nan) for part in parts], "not finite"),
    ],
)
def test_an_encoder_that_is_not_whole_makes_nothing(
    tmp_path: Path, change: Any, message: str
) -> None:
    rows = torch.randn(V, 4)
    parts = shards(encoder_of("tpmlp", rows, 4)[0], 2)
    change(parts)
    states = [nested(one, "tpmlp", rows) for one in parts]
    with pytest.raises(AdapterError, match=message):
        open_adapter(ranked(tmp_path, states, CONFIG_1 | {"tensor_model_parallel_size": 2}))
