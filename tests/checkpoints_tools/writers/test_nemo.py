"""`.nemo` archives: our reader finds the same model, and tar and torch read the members."""

import os
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tokenizers
import torch
import yaml

import preamble
from checkpoints_tools.conversion import copy_engine
from checkpoints_tools.conversion.convert import convert, plan
from checkpoints_tools.layout.layout import Layout, ParallelSplit, stored_vocab_rows
from checkpoints_tools.writers.nemo import plan_layout
from checkpoints_tools.writers.registry import UNSPLIT, ConversionOptions
from gpt.checkpoint.digest import base_digest, functional_config
from gpt.checkpoint.files.torch_file import read_torch_span
from gpt.checkpoint.logical_tensor import Checkpoint, checkpoint_from_tensors
from gpt.config import RopeScaling
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.nemo.archive import open_nemo_archive
from gpt.formats.registry import open_checkpoint
from gpt.parallel.weight_sharding import parameter_specs
from gpt.tokenizers.tokenizer import open_tokenizer
from tests.support.checkpoints.megatron_expressible import SPARSE
from tests.support.checkpoints.plain_writer import file_bytes
from tests.support.models import CLASSIC, EXPERTS, MODERN, SIGMOID_EXPERTS, lively
from tests.support.trained_tokenizers import byte_level, gpt2_case, json_case, sentencepiece_model

GEGLU = EXPERTS.with_fields(
    num_experts=4,
    proj_bias=False,
    mlp_bias=False,
    moe_layers=(True,) * 4,
    moe_shared_expert_gate=False,
)
STRETCHED = MODERN.with_fields(
    normalization="LayerNorm",
    layernorm_zero_centered_gamma=True,
    activation="relu2",
    gated=False,
    rotary_interleaved=True,
    rope_scaling=RopeScaling("llama3", 4.0, 2.0, 8.0, 4096),
)
SIGMOID = SIGMOID_EXPERTS.with_fields(
    num_experts=6, activation="gelu", gated=False, proj_bias=False, moe_shared_expert_gate=False
)
MODELS = {
    "classic": CLASSIC,
    "erf": CLASSIC.with_fields(activation="gelu", position_embedding_type="none"),
    "modern": MODERN,
    "stretched": STRETCHED,
    "mixed experts": SPARSE,
    "gated by GELU": GEGLU,
    "chosen by sigmoid": SIGMOID,
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_and_reopen(
    source: Checkpoint, target: Path, split: ParallelSplit = UNSPLIT
) -> Checkpoint:
    convert(plan(source, target, ConversionOptions("nemo", split=split, vocabulary_multiple=8)))
    return open_checkpoint(target)


def read_config(target: Path) -> dict[str, Any]:
    tree, _ = open_nemo_archive(target)
    record: dict[str, Any] = yaml.safe_load(tree.spans["model_config.yaml"].read(1 << 20))
    return record


def load_member(target: Path, name: str) -> dict[str, Any]:
    """A member loaded by torch, after its CRCs were checked."""
    with tarfile.open(target) as archive:
        member = archive.extractfile(name)
        assert member is not None and zipfile.ZipFile(member).testzip() is None
        member.seek(0)
        loaded_member: dict[str, Any] = torch.load(member, weights_only=True)
    return loaded_member


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_round_trip_is_bit_exact(tp: int, pp: int, tmp_path: Path) -> None:
    main_models = ("classic", "modern")  # The diagonal splits cover all fields of the others.
    for name, config in MODELS.items():
        if name not in main_models and (tp, pp) not in ((1, 1), (2, 2), (4, 3)):
            continue
        if tp == 4 and name == "chosen by sigmoid":
            config = config.with_fields(num_experts=4)
        source = lively(config)
        reopened = write_and_reopen(source, tmp_path / f"{name}.nemo", ParallelSplit(tp, pp))
        assert reopened.format == "nemo" and reopened.path == tmp_path / f"{name}.nemo"
        assert (
            functional_config(reopened.config) == functional_config(source.config)
            and reopened.config.dtype == "float32"
        )
        assert reopened.split == {"tp": tp, "pp": pp, "vpp": 1, "ep": 1}
        assert reopened.tensors.keys() == source.tensors.keys()
        for tensor in source.tensors:
            assert torch.equal(reopened.read(tensor), source.read(tensor)), (name, tensor)
        assert base_digest(reopened) == base_digest(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_weights_keep_their_dtype_except_the_expert_bias(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = lively(SIGMOID).in_dtype(dtype)
    reopened = write_and_reopen(source, tmp_path / "x.nemo", ParallelSplit(2))
    assert reopened.config.dtype == source.config.dtype
    assert (
        read_config(tmp_path / "x.nemo")["precision"]
        == {"bfloat16": "bf16", "float16": 16}[reopened.config.dtype]
    )
    for name in source.tensors:
        assert torch.equal(reopened.read(name), source.read(name)), name
        assert (reopened.tensors[name].dtype is dtype) != name.endswith("expert_bias"), name


RANKS = {
    ParallelSplit(): ["./model_weights.ckpt"],
    ParallelSplit(2): ["./mp_rank_00/model_weights.ckpt", "./mp_rank_01/model_weights.ckpt"],
    ParallelSplit(1, 2): [f"./tp_rank_00_pp_rank_00{p}/model_weights.ckpt" for p in range(2)],
    ParallelSplit(2, 2): [
        f"./tp_rank_0{t}_pp_rank_00{p}/model_weights.ckpt" for p in range(2) for t in range(2)
    ],
}


@pytest.mark.parametrize("split", RANKS)
def test_tar_lists_regular_members_and_torch_loads_the_weights(
    split: ParallelSplit, tmp_path: Path
) -> None:
    source = lively(CLASSIC)
    write_and_reopen(source, tmp_path / "x.nemo", split)
    with tarfile.open(tmp_path / "x.nemo", "r:") as archive:
        members = archive.getmembers()
        assert [member.name for member in members] == ["./model_config.yaml", *RANKS[split]]
        for info in members:
            assert (info.type, info.mode, info.mtime) == (tarfile.REGTYPE, 0o644, 0)
            assert (info.uid, info.gid, info.uname, info.gname) == (0, 0, "", "")
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert (tmp_path / "x.nemo").stat().st_size % tarfile.RECORDSIZE == 0
    for name in RANKS[split]:
        weights = load_member(tmp_path / "x.nemo", name)
        assert all(key.startswith("model.") for key in weights)
        assert "model.decoder.layers.0.self_attention.linear_qkv.weight" in weights
    reopened = open_checkpoint(tmp_path / "unpacked")
    assert base_digest(reopened) == base_digest(source)


def test_each_rank_has_its_layers_gate_rows_and_embedding_copy(tmp_path: Path) -> None:
    tied = MODERN.with_fields(untie_embeddings_and_output_weights=False)
    source = lively(tied)
    write_and_reopen(source, tmp_path / "x.nemo", ParallelSplit(2, 2))
    first_rank, last_rank = (
        load_member(tmp_path / "x.nemo", f"./tp_rank_01_pp_rank_00{p}/model_weights.ckpt")
        for p in range(2)
    )
    table = first_rank["model.embedding.word_embeddings.weight"]
    assert table.shape == (56, 32) and not table[47:].any()
    assert torch.equal(table[:47], source.read(EMBEDDING)[56:])
    assert torch.equal(last_rank["model.output_layer.weight"], table)
    assert "model.output_layer.weight" not in first_rank
    assert "model.decoder.final_layernorm.weight" in last_rank
    # The fourth layer of five is the first of the second stage.
    full_tensor = source.read("decoder.layers.3.mlp.linear_fc1.weight")
    gates = full_tensor[22:44]
    ups = full_tensor[66:88]
    assert torch.equal(
        last_rank["model.decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gates, ups])
    )
    assert first_rank["model.decoder.layers.0.mlp.linear_fc1._extra_state"] is None


def test_weights_are_aligned_and_match_the_slow_reference(
    tmp_path: Path,
) -> None:
    source = lively(SPARSE)
    layout = plan_layout(source, ParallelSplit(2, 2))
    (file,) = layout.files
    assert layout.is_single_file and layout.format == "nemo"
    assert all(placement.offset % 64 == 0 for placement in file.placements)
    convert(plan(source, tmp_path / "x.nemo", ConversionOptions("nemo", split=ParallelSplit(2, 2))))
    assert (tmp_path / "x.nemo").read_bytes() == file_bytes(source, file)
    assert "tested only with Preamble's reader" in layout.notes[0]


def model_with_vocabulary(folder: Path, **changes: Any) -> Checkpoint:
    """A model with the vocabulary size of the tokenizer in the folder."""
    size = open_tokenizer(folder).vocab_size
    source = lively(CLASSIC.with_fields(vocab_size=size, **changes))
    tensors = {name: source.read(name) for name in source.tensors}
    return checkpoint_from_tensors(source.config, tensors, folder)


def sentencepiece_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(model_type="bpe"))
    return folder


def assert_same_tokens(left: Path, right: Path | None, kind: str | None = None) -> None:
    assert right is not None
    tokenizer = open_tokenizer(left, kind=kind)
    reopened_tokenizer = open_tokenizer(right)
    text = "the quick brown fox: forty-two"
    assert (
        reopened_tokenizer.kind == tokenizer.kind
        and reopened_tokenizer.vocab_size == tokenizer.vocab_size
    )
    assert reopened_tokenizer.encode(text) == tokenizer.encode(text)


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2"])
def test_tokenizer_known_to_nemo_is_included_and_gives_the_vocabulary_size(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "words"
    if kind == "gpt2":
        gpt2_case(folder)
    else:
        sentencepiece_folder(folder)
    source = model_with_vocabulary(folder)
    reopened = write_and_reopen(source, tmp_path / "x.nemo", ParallelSplit(2))
    record = read_config(tmp_path / "x.nemo")
    assert "override_vocab_size" not in record and reopened.config == source.config
    assert_same_tokens(folder, reopened.tokenizer)
    section = record["tokenizer"]
    library = {"gpt2": "megatron", "sentencepiece": "sentencepiece"}[kind]
    assert section["library"] == library and section.get("sentencepiece_legacy") in (None, False)
    with tarfile.open(tmp_path / "x.nemo") as archive:
        names = archive.getnames()[1:-2]
    references = [value for value in section.values() if str(value).startswith("nemo:")]
    assert sorted(references) == sorted(f"nemo:{name[2:]}" for name in names)
    assert len(names) == (2 if kind == "gpt2" else 1)
    # Written again from the archive: member names depend on the files' contents only.
    write_and_reopen(source, tmp_path / "y.nemo", ParallelSplit(2))
    assert (tmp_path / "y.nemo").read_bytes() == (tmp_path / "x.nemo").read_bytes()
    rewritten = write_and_reopen(reopened, tmp_path / "z.nemo", ParallelSplit(1, 2))
    assert_same_tokens(folder, rewritten.tokenizer)


def notes_of(layout: Layout) -> str:
    return " ".join(layout.notes)


def test_tokenizer_unknown_to_nemo_is_kept_with_a_note(tmp_path: Path) -> None:
    json_case(tmp_path / "words", byte_level())
    source = model_with_vocabulary(tmp_path / "words")
    assert "NeMo finds no tokenizer in the target, because a .nemo can contain only" in notes_of(
        plan_layout(source, ParallelSplit())
    )
    reopened = write_and_reopen(source, tmp_path / "x.nemo")
    assert_same_tokens(tmp_path / "words", reopened.tokenizer)
    assert reopened.config == source.config
    assert read_config(tmp_path / "x.nemo")["tokenizer"]["library"] is None
    rows = stored_vocab_rows(source.config, 1, 8)
    assert read_config(tmp_path / "x.nemo")["override_vocab_size"] == rows


def as_json(model: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json with the tokens of a SentencePiece model."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = {library.id_to_piece(i): i for i in range(library.get_piece_size())}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def test_sentencepiece_model_is_included_if_it_matches_tokenizer_json(
    tmp_path: Path,
) -> None:
    folder = sentencepiece_folder(tmp_path / "words")
    library = as_json(folder / "tokenizer.model")
    library.save(str(folder / "tokenizer.json"))
    source = model_with_vocabulary(folder)
    assert open_tokenizer(folder).kind == "tokenizer.json"
    reopened = write_and_reopen(source, tmp_path / "x.nemo")
    assert read_config(tmp_path / "x.nemo")["tokenizer"]["library"] == "sentencepiece"
    assert_same_tokens(folder, reopened.tokenizer)
    assert reopened.tokenizer is not None
    assert_same_tokens(folder, reopened.tokenizer / "tokenizer.model", "sentencepiece")
    library.add_tokens(["<one more>"])
    library.save(str(folder / "tokenizer.json"))
    assert "NeMo finds no tokenizer in the target, because a .nemo can contain only" in notes_of(
        plan_layout(model_with_vocabulary(folder), ParallelSplit())
    )
    other_tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"fox": 0}, unk_token="fox"))
    other_tokenizer.add_tokens([f"word {i}" for i in range(source.config.vocab_size - 1)])
    other_tokenizer.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(folder).vocab_size == source.config.vocab_size
    assert "NeMo finds no tokenizer in the target, because a .nemo can contain only" in notes_of(
        plan_layout(model_with_vocabulary(folder), ParallelSplit())
    )


def test_bos_token_is_noted(tmp_path: Path) -> None:
    folder = sentencepiece_folder(tmp_path / "words")
    assert "(BOS)" not in notes_of(plan_layout(model_with_vocabulary(folder), ParallelSplit()))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    assert "a BOS token, which NeMo's config cannot record" in notes_of(
        plan_layout(model_with_vocabulary(folder), ParallelSplit())
    )


def run(*arguments: object) -> int:
    return preamble.main(["convert", *map(str, arguments)])


def test_command_writes_one_file_and_refuses_unsupported_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_and_reopen(lively(MODERN), tmp_path / "source.nemo")
    target = tmp_path / "x.nemo"
    arguments = (tmp_path / "source.nemo", target, "--to", "nemo", "--tp", 2, "--pp", 3)
    assert run(*arguments, "--dry-run") == 0
    assert "tested only with Preamble's reader" in capsys.readouterr().out and not target.exists()
    assert run(*arguments) == 0
    assert base_digest(open_checkpoint(target)) == base_digest(lively(MODERN))
    assert sorted(path.name for path in tmp_path.glob("*.nemo")) == ["source.nemo", "x.nemo"]
    assert run(*arguments, "--resume") == 0 and "already complete" in capsys.readouterr().err
    assert run(*arguments) == 1 and "already exists" in capsys.readouterr().err
    target.unlink()
    for flags, message in (
        (("--prove",), "cannot store reference logits"),
        (("--vpp", 2), "does not support virtual stages (--vpp 2)"),
        (("--megatron-spec", "te"), "no layer specs"),
        (("--tokenizer", tmp_path / "nowhere"), "does not exist"),
    ):
        assert run(*arguments, *flags) == 1
        assert message in capsys.readouterr().err and not target.exists()
    with pytest.raises(SystemExit):
        run(tmp_path / "source.nemo", tmp_path / "folder", "--to", "nemo")


class Killed(BaseException):
    """Simulates a kill: no write happens after it."""


def test_resumed_run_writes_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = lively(CLASSIC)
    write_and_reopen(source, tmp_path / "source.nemo")
    opened = open_checkpoint(tmp_path / "source.nemo")
    conversion_plan = plan(
        opened, tmp_path / "x.nemo", ConversionOptions("nemo", split=ParallelSplit(2, 2))
    )
    expected_plan = plan(
        opened, tmp_path / "y.nemo", ConversionOptions("nemo", split=ParallelSplit(2, 2))
    )
    convert(expected_plan)
    monkeypatch.setattr(copy_engine, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(copy_engine, "PROGRESS_SECONDS", 0.001)
    original_write = copy_engine.TargetFiles.write
    writes_left = 60

    def write(
        files: copy_engine.TargetFiles, number: int, offset: int, content: memoryview | bytes
    ) -> None:
        nonlocal writes_left
        writes_left -= 1
        if writes_left < 0:
            raise Killed
        original_write(files, number, offset, content)

    with monkeypatch.context() as patch:
        patch.setattr(copy_engine.TargetFiles, "write", write)
        with pytest.raises(Killed):
            convert(conversion_plan)
    assert conversion_plan.partial_dir.is_dir() and not conversion_plan.target.exists()
    convert(conversion_plan, resume=True)
    assert (
        conversion_plan.target.read_bytes() == expected_plan.target.read_bytes()
        and not conversion_plan.partial_dir.exists()
    )


def test_member_over_8_gib_is_read_by_tar_and_our_reader(tmp_path: Path) -> None:
    """The file is sparse: only headers and the zip directory are written."""
    large = CLASSIC.with_fields(num_layers=1, vocab_size=50 << 20, moe_layers=())
    row = torch.zeros(1, 1)
    tensors = {
        name: row.expand(parameter.shape)
        if len(parameter.shape) == 2
        else row[0].expand(parameter.shape)
        for name, parameter in parameter_specs(large.with_fields(hidden_size=64)).items()
    }
    source = checkpoint_from_tensors(large.with_fields(hidden_size=64), tensors)
    (file,) = plan_layout(source, ParallelSplit()).files
    path = tmp_path / "x.nemo"
    with open(path, "wb") as out:
        os.truncate(path, file.size)
        for text in file.literals:
            out.seek(text.offset)
            out.write(text.content)
    with tarfile.open(path, "r:") as archive:
        config, weights = archive.getmembers()
    assert (config.name, weights.name) == ("./model_config.yaml", "./model_weights.ckpt")
    assert weights.size > 8 << 30 and weights.offset_data + weights.size <= file.size
    tree, _ = open_nemo_archive(path)
    archive_layout = read_torch_span(tree.spans["model_weights.ckpt"])
    assert archive_layout["model.embedding.word_embeddings.weight"].shape == (50 << 20, 64)
    assert open_checkpoint(path).config.vocab_size == 50 << 20
