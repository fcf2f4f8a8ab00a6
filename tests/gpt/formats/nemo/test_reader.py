"""NeMo checkpoints: every layout and generation of names gives the original model."""

import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from gpt.checkpoint.digest import base_digest
from gpt.checkpoint.files.file_tree import file_span
from gpt.checkpoint.files.torch_zip import view_archive
from gpt.errors import CheckpointError
from gpt.formats.nemo.reader import open_nemo
from gpt.formats.registry import open_checkpoint
from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.checkpoints import nemo_writer
from tests.support.checkpoints.distcp_writer import Form
from tests.support.checkpoints.megatron_writer import DENSE, GATED, GROUPED, MIXED
from tests.support.checkpoints.nemo_writer import LEGACY_GATED, Nemo, saved
from tests.support.process_memory import PeakMemory, anonymous_bytes
from tests.support.trained_tokenizers import sentencepiece_model

GEGLU = LEGACY_GATED.with_fields(activation="gelu")
NORM_1P = DENSE.with_fields(layernorm_zero_centered_gamma=True, activation="relu2")
ALL_MOE = {"moe_layers": (True,) * 4}

LAYOUTS = {
    "one rank": (DENSE, Nemo()),
    "names of Megatron-Core": (GATED, Nemo(tp=2, pp=2)),
    "tensor ranks alone": (GATED, Nemo(tp=2)),
    "stages alone, without ./": (DENSE, Nemo(pp=2, dot="")),
    "compressed": (GATED, Nemo(tp=2, pp=2, pack="gz")),
    "unpacked": (GATED, Nemo(tp=2, pp=2, pack="dir")),
    "wrapped for half precision": (GATED, Nemo(tp=2, prefix="model.module.")),
    "compiled": (DENSE, Nemo(prefix="model._orig_mod.")),
    "experts": (MIXED, Nemo(tp=2, pp=2)),
    "older names, a tied head": (DENSE, Nemo(tp=2, pp=2, names="legacy")),
    "positions as a bare parameter": (DENSE, Nemo(tp=2, names="legacy", bare_positions=True)),
    "norms around one, squared ReLU": (NORM_1P, Nemo(tp=2, names="legacy")),
    "gates and ups in two matrices": (LEGACY_GATED, Nemo(tp=2, pp=2, names="legacy", pair=True)),
    "gates over ups on each rank": (LEGACY_GATED, Nemo(tp=2, pp=2, names="legacy")),
    "GeGLU in two matrices": (GEGLU, Nemo(tp=2, names="legacy", pair=True)),
    "imported from old Megatron": (DENSE, Nemo(tp=2, pp=2, names="imported")),
    "layers of Transformer Engine": (DENSE, Nemo(tp=2, pp=2, names="full te")),
    "distributed": (GATED, Nemo(form=Form(tp=2, prefix="model."))),
    "distributed, unpacked": (GATED, Nemo(form=Form(tp=2, prefix="model."), pack="dir")),
    "distributed, compressed": (DENSE, Nemo(form=Form(tp=2, prefix="model."), pack="gz")),
    "distributed, experts": (
        GROUPED.with_fields(**ALL_MOE),
        Nemo(form=Form(tp=2, prefix="model.", args=False)),
    ),
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "preamble"


@pytest.mark.parametrize("case", LAYOUTS)
def test_every_layout_is_joined_to_the_original_model(case: str, tmp_path: Path) -> None:
    config, nemo = LAYOUTS[case]
    source = saved(config, nemo, tmp_path)
    checkpoint = open_checkpoint(tmp_path / "gpt.nemo")
    assert checkpoint.config == source.config
    for name in source.tensors:
        assert torch.equal(checkpoint.read(name), source.read(name)), name
    assert base_digest(checkpoint) == base_digest(source)
    assert checkpoint.format == "nemo" and checkpoint.path == tmp_path / "gpt.nemo"
    assert all(file.is_file() for file in checkpoint.files) and checkpoint.files


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_weights_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    source = saved(GATED, Nemo(tp=2), tmp_path, dtype)
    checkpoint = open_nemo(tmp_path / "gpt.nemo")
    assert checkpoint.config.dtype == dtype
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize("form", [None, Form(prefix="model.")], ids=["rank", "distributed"])
def test_tars_are_read_in_place(form: Form | None, tmp_path: Path, cache: Path) -> None:
    wide_config = GATED.with_fields(hidden_size=512, ffn_hidden_size=2048)
    saved(wide_config, Nemo(form=form), tmp_path)
    memory_before = anonymous_bytes()
    with PeakMemory() as peak:
        checkpoint = open_nemo(tmp_path / "gpt.nemo")
        for logical in checkpoint.tensors.values():
            for piece in logical.slices:
                piece.source.tensor()
    assert peak.bytes - memory_before < 4 << 20
    assert checkpoint.files == (tmp_path / "gpt.nemo",) and not (cache / "unpacked").exists()


def test_compressed_archives_are_unpacked_once_per_change(tmp_path: Path, cache: Path) -> None:
    saved(DENSE, Nemo(pack="gz", artifacts={"notes.txt": b"x"}), tmp_path)
    opened = open_nemo(tmp_path / "gpt.nemo")
    assert "the archive is compressed, so it was unpacked to" in opened.notes[-1]
    (unpacked_folder,) = (cache / "unpacked").iterdir()
    assert sorted(file.name for file in unpacked_folder.iterdir()) == [
        "model_config.yaml",
        "model_weights.ckpt",
    ]
    inode = (unpacked_folder / "model_weights.ckpt").stat().st_ino
    open_nemo(tmp_path / "gpt.nemo")
    assert (unpacked_folder / "model_weights.ckpt").stat().st_ino == inode
    os.utime(tmp_path / "gpt.nemo", (1, 1))
    open_nemo(tmp_path / "gpt.nemo")
    assert len(list((cache / "unpacked").iterdir())) == 2


def test_compressed_archives_that_do_not_fit_the_disk_are_refused(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(DENSE, Nemo(pack="gz"), tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Full())
    with pytest.raises(
        CheckpointError, match=r"bytes are needed in .*, but 100 are free; free disk space"
    ):
        open_nemo(tmp_path / "gpt.nemo")
    assert not list((cache / "unpacked").iterdir())


class _Full:
    free = 100


def lightning(tmp_path: Path, nemo: Nemo, name: str = "last.ckpt", **changes: Any) -> Any:
    source, files = nemo_writer.ranks(DENSE, nemo, tmp_path / "work")
    config = nemo_writer.config_of(source.config, nemo)
    for folder, chunks in files.items():
        record: dict[str, Any] = {"hyper_parameters": {"cfg": config}, "epoch": 1, **changes}
        if len(chunks) > 1:
            record |= {f"model{v}": chunk for v, chunk in enumerate(chunks)} | {"state_dict": {}}
        else:
            record["state_dict"] = chunks[0]
        (tmp_path / "run" / folder).mkdir(parents=True, exist_ok=True)
        torch.save(record, tmp_path / "run" / folder / name)
    return source


@pytest.mark.parametrize(
    "nemo",
    [Nemo(), Nemo(tp=2, pp=2, names="legacy"), Nemo(tp=2, pp=2, vpp=2)],
    ids=["one rank", "older names", "virtual pipeline"],
)
def test_lightning_checkpoints_are_read(nemo: Nemo, tmp_path: Path) -> None:
    # OmegaConf's containers name types; the protocol of torch's pickles calls an int a long.
    source = lightning(tmp_path, nemo, types=[int, str, float, dict])
    checkpoint = open_checkpoint(tmp_path / "run")
    assert checkpoint.config == source.config
    assert base_digest(checkpoint) == base_digest(source)
    (first_file, *_) = sorted((tmp_path / "run").glob("*/last.ckpt"))
    assert base_digest(open_checkpoint(first_file)) == base_digest(source)


def test_runs_with_several_steps_need_a_file(tmp_path: Path) -> None:
    source = lightning(tmp_path, Nemo(tp=2))
    for folder in (tmp_path / "run").iterdir():
        (folder / "step=9.ckpt").write_bytes((folder / "last.ckpt").read_bytes())
    with pytest.raises(CheckpointError, match=r"has 2 checkpoints of a run \(last.ckpt, step=9"):
        open_checkpoint(tmp_path / "run")
    single_step = open_checkpoint(tmp_path / "run" / "mp_rank_01" / "step=9.ckpt")
    assert base_digest(single_step) == base_digest(source)


def test_hostile_and_undescribed_training_files_are_refused(
    tmp_path: Path,
) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[object, tuple[str, ...]]:
            return os.system, ("true",)

    lightning(tmp_path, Nemo(), callbacks=Hostile())
    with pytest.raises(CheckpointError, match=r"asks to run posix.system, which is not data"):
        open_checkpoint(tmp_path / "run")
    lightning(tmp_path / "b", Nemo(), hyper_parameters={"cfg": {"x": 1}})
    with pytest.raises(CheckpointError, match="no hyper_parameters that describe a GPT"):
        open_checkpoint(tmp_path / "b" / "run")


def test_distributed_training_checkpoints_use_hparams_of_the_parent(tmp_path: Path) -> None:
    nemo = Nemo(form=Form(tp=2, prefix="model.", args=False))
    source = saved(GATED, nemo, tmp_path)
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with tarfile.open(tmp_path / "gpt.nemo") as archive:
        archive.extractall(tmp_path / "plain2", filter="data")
    (tmp_path / "plain2" / "model_weights").rename(tmp_path / "run" / "checkpoints" / "last")
    text = yaml.safe_dump({"cfg": nemo_writer.config_of(source.config, nemo)})
    (tmp_path / "run" / "hparams.yaml").write_text(text)
    checkpoint = open_checkpoint(tmp_path / "run" / "checkpoints" / "last")
    assert checkpoint.config == source.config
    assert base_digest(checkpoint) == base_digest(source)


HEX = "0123456789abcdef" * 2
VOCAB = {chr(ord("!") + i): i for i in range(90)} | {"<|endoftext|>": 90}


def bpe(**changes: object) -> Nemo:
    tokenizer = {
        "library": "megatron",
        "type": "GPT2BPETokenizer",
        "vocab_file": f"nemo:{HEX}_vocab.json",
        "merge_file": f"nemo:{HEX}_merges.txt",
    }
    return Nemo(
        changes={"tokenizer": tokenizer, "override_vocab_size": None, **changes},
        artifacts={
            f"{HEX}_vocab.json": json.dumps(VOCAB).encode(),
            f"{HEX}_merges.txt": b"#version: 0.2\n",
        },
    )


@pytest.mark.parametrize("pack", ["tar", "gz", "dir"])
def test_the_tokenizer_inside_determines_vocab_size_if_it_fits(pack: str, tmp_path: Path) -> None:
    small = DENSE.with_fields(vocab_size=91)
    nemo = Nemo(**{**bpe().__dict__, "pack": pack})
    source = saved(small, nemo, tmp_path)
    checkpoint = open_nemo(tmp_path / "gpt.nemo")
    assert checkpoint.tokenizer is not None
    assert open_tokenizer(checkpoint.tokenizer).vocab_size == 91
    assert checkpoint.config.vocab_size == 91
    assert base_digest(checkpoint) == base_digest(source)


def test_tokenizer_that_does_not_fit_the_rows_is_ignored_for_vocab_size(tmp_path: Path) -> None:
    saved(DENSE, bpe(), tmp_path)
    checkpoint = open_nemo(tmp_path / "gpt.nemo")
    assert checkpoint.config.vocab_size == 104
    assert any(
        "vocab_size is 104, the number of embedding rows" in note for note in checkpoint.notes
    )
    assert open_nemo(tmp_path / "gpt.nemo", {"vocab_size": 101}).config.vocab_size == 101


@pytest.mark.parametrize("legacy", [False, True])
def test_sentencepiece_determines_vocab_size_unless_tokens_were_added(
    legacy: bool, tmp_path: Path
) -> None:
    text = sentencepiece_model()
    (tmp_path / "x.model").write_bytes(text)
    tokens = open_tokenizer(tmp_path / "x.model").vocab_size
    tokenizer = {
        "library": "sentencepiece",
        "model": f"nemo:{HEX}_llama",
        "sentencepiece_legacy": legacy,
    }
    changes = {"tokenizer": tokenizer, "override_vocab_size": None}
    nemo = Nemo(tp=2, changes=changes, artifacts={f"{HEX}_llama": text})
    saved(DENSE.with_fields(vocab_size=tokens), nemo, tmp_path)
    checkpoint = open_nemo(tmp_path / "gpt.nemo")
    assert checkpoint.tokenizer and open_tokenizer(checkpoint.tokenizer).kind == "sentencepiece"
    padded = -(-tokens // 16) * 16
    assert checkpoint.config.vocab_size == (padded if legacy else tokens)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "is not in the archive"), (b"", "cannot be read"), (b"x" * 9, "cannot be copied")],
)
def test_missing_broken_and_huge_tokenizers_give_a_note(
    text: bytes | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpt.formats.nemo.reader.TOKENIZER_BYTES_MAX", 8)
    name = f"{HEX}_tokenizer.model"
    tokenizer = {"library": "sentencepiece", "model": f"nemo:{name}"}
    artifacts = {} if text is None else {name: text}
    saved(DENSE, Nemo(changes={"tokenizer": tokenizer}, artifacts=artifacts), tmp_path)
    checkpoint = open_nemo(tmp_path / "gpt.nemo")
    assert checkpoint.tokenizer is None and message in checkpoint.notes[0]
    assert checkpoint.config == DENSE


def test_tokenizers_outside_the_archive_are_requested_in_a_note(tmp_path: Path) -> None:
    tokenizer = {"library": "huggingface", "type": "meta/x", "model": None}
    saved(DENSE, Nemo(changes={"tokenizer": tokenizer}), tmp_path)
    checkpoint = open_nemo(tmp_path / "gpt.nemo")
    assert checkpoint.tokenizer is None
    assert checkpoint.notes == (
        "the tokenizer (library huggingface, type meta/x) is not in the archive; give a tokenizer "
        "file or directory",
    )


@pytest.mark.parametrize("graph", [False, True], ids=["model.yaml", "io.json"])
@pytest.mark.parametrize(
    "config", [GATED, GROUPED.with_fields(**ALL_MOE)], ids=["dense", "experts"]
)
def test_nemo_2_config_comes_from_its_context(config: Any, graph: bool, tmp_path: Path) -> None:
    source = nemo_writer.nemo_2(config, tmp_path, Form(tp=2), graph=graph)
    (tmp_path / "context" / "nemo_tokenizer").mkdir()
    (tmp_path / "context" / "nemo_tokenizer" / "null.json").write_text('{"vocab_size": 103}')
    for path in (tmp_path, tmp_path / "weights", tmp_path / "context"):
        checkpoint = open_checkpoint(path)
        assert checkpoint.config == source.config
        assert checkpoint.format == "nemo"
    assert checkpoint.tokenizer == tmp_path / "context" / "nemo_tokenizer"
    assert base_digest(checkpoint) == base_digest(source)


@pytest.mark.parametrize("step", [100, torch.tensor(100, dtype=torch.int32), "lost"])
def test_megatron_bridge_config_comes_from_its_run_config(step: object, tmp_path: Path) -> None:
    source = nemo_writer.bridge(GATED, tmp_path, Form(tp=2), step)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config == source.config
    assert base_digest(checkpoint) == base_digest(source)
    newest = (
        "latest_train_state.pt names no step, so the newest iteration, iter_0000100, was read",
    )
    assert checkpoint.notes == (newest if step == "lost" else ())


def test_missing_iteration_of_the_bridge_tracker_is_named(tmp_path: Path) -> None:
    nemo_writer.bridge(GATED, tmp_path, Form(tp=2), 200)
    with pytest.raises(CheckpointError, match=r"names iter_0000200, .* found: iter_0000100"):
        open_checkpoint(tmp_path)


def test_transformer_engine_layers_of_one_rank_are_read(tmp_path: Path) -> None:
    source = nemo_writer.nemo_2(GATED, tmp_path, Form(lump=True))
    _rename_keys(tmp_path / "weights")
    assert base_digest(open_checkpoint(tmp_path)) == base_digest(source)
    nemo_writer.nemo_2(GATED, tmp_path / "cut", Form(tp=2))
    _rename_keys(tmp_path / "cut" / "weights")
    with pytest.raises(
        CheckpointError, match="saved by 4 tensor ranks, each with its gate rows above"
    ):
        open_checkpoint(tmp_path / "cut")


def _rename_keys(folder: Path) -> None:
    """As the full-TE spec names its layer's tensors."""
    import pickle

    index = pickle.loads((folder / ".metadata").read_bytes())

    def rename(key: str) -> str:
        for old_part, new_part in (
            ("self_attention.linear_qkv.", "self_attention.layernorm_qkv."),
            ("self_attention.linear_proj.", "self_attention.proj."),
            ("mlp.linear_fc1.layer_norm", "layernorm_mlp.layer_norm"),
            ("mlp.linear_fc1.", "layernorm_mlp.fc1_"),
            ("mlp.linear_fc2.", "layernorm_mlp.fc2_"),
        ):
            key = key.replace(old_part, new_part)
        return key

    index.state_dict_metadata = {rename(k): v for k, v in index.state_dict_metadata.items()}
    storage = {}
    for location, span in index.storage_data.items():
        fields = {**location.__dict__, "fqn": rename(location.fqn)}
        storage[type(location)(**fields)] = span
    index.storage_data = storage
    (folder / ".metadata").write_bytes(pickle.dumps(index))


def test_the_only_archive_of_a_directory_is_opened(tmp_path: Path) -> None:
    source = saved(DENSE, Nemo(), tmp_path)
    (tmp_path / "README.md").write_text("a model")
    checkpoint = open_checkpoint(tmp_path)
    assert base_digest(checkpoint) == base_digest(source)
    assert checkpoint.notes[0] == f"gpt.nemo was read, because it is the only archive in {tmp_path}"
    (tmp_path / "other.nemo").write_bytes((tmp_path / "gpt.nemo").read_bytes())
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        open_checkpoint(tmp_path)


def test_nested_archives_are_viewed_as_torch_loads_them(tmp_path: Path) -> None:
    weight = torch.randn(6, 4)
    record = {
        "a": torch.nn.Parameter(weight),
        "turned": weight.t(),
        "rows": weight[2:4],
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(5, dtype=torch.uint8),
        "number": torch.tensor(2.5, dtype=torch.float64),
        "inner": [{"again": weight}, (torch.float16, None, "text")],
    }
    torch.save(record, tmp_path / "x.pt")
    view = view_archive(file_span(tmp_path / "x.pt"))
    loaded = torch.load(tmp_path / "x.pt", weights_only=True)
    for name in ("a", "turned", "rows", "empty", "bytes", "number"):
        assert torch.equal(view[name], loaded[name]) and view[name].dtype == loaded[name].dtype
    assert torch.equal(view["inner"][0]["again"], weight)
    assert view["inner"][1] == (torch.float16, None, "text")
