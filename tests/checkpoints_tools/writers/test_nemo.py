"""`.nemo` archives: read back they are the model, and tar and torch read what is in them."""

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
from checkpoints_tools.layout.layout import Division, Layout, padded_vocabulary
from checkpoints_tools.writers.nemo import layout
from checkpoints_tools.writers.registry import WHOLE, Wish
from gpt.checkpoint.digest import base_digest, function
from gpt.checkpoint.files.torch_zip import read_archive
from gpt.checkpoint.logical_tensor import Checkpoint, in_memory
from gpt.config import RopeScaling
from gpt.formats.mappings.megatron_names import EMBEDDING
from gpt.formats.nemo.archive import open_archive
from gpt.formats.registry import open_checkpoint
from gpt.parallel.sharding import parameters
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


def written(source: Checkpoint, target: Path, division: Division = WHOLE) -> Checkpoint:
    convert(plan(source, target, Wish("nemo", division=division, vocabulary_multiple=8)))
    return open_checkpoint(target)


def said(target: Path) -> dict[str, Any]:
    tree, _ = open_archive(target)
    record: dict[str, Any] = yaml.safe_load(tree.spans["model_config.yaml"].read(1 << 20))
    return record


def loaded(target: Path, name: str) -> dict[str, Any]:
    """A member, as torch itself loads it; its checksums fit."""
    with tarfile.open(target) as archive:
        member = archive.extractfile(name)
        assert member is not None and zipfile.ZipFile(member).testzip() is None
        member.seek(0)
        found: dict[str, Any] = torch.load(member, weights_only=True)
    return found


@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_what_was_written_is_read_back_bit_for_bit(tp: int, pp: int, tmp_path: Path) -> None:
    few = ("classic", "modern")  # The others have all their traits on the diagonal.
    for name, config in MODELS.items():
        if name not in few and (tp, pp) not in ((1, 1), (2, 2), (4, 3)):
            continue
        if tp == 4 and name == "chosen by sigmoid":
            config = config.with_fields(num_experts=4)
        source = lively(config)
        back = written(source, tmp_path / f"{name}.nemo", Division(tp, pp))
        assert back.format == "nemo" and back.path == tmp_path / f"{name}.nemo"
        assert function(back.config) == function(source.config) and back.config.dtype == "float32"
        assert back.split == {"tp": tp, "pp": pp, "vpp": 1, "ep": 1}
        assert back.tensors.keys() == source.tensors.keys()
        for tensor in source.tensors:
            assert torch.equal(back.read(tensor), source.read(tensor)), (name, tensor)
        assert base_digest(back) == base_digest(source)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_stay_narrow_but_for_the_choice_among_experts(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = lively(SIGMOID).in_dtype(dtype)
    back = written(source, tmp_path / "x.nemo", Division(2))
    assert back.config.dtype == source.config.dtype
    assert (
        said(tmp_path / "x.nemo")["precision"]
        == {"bfloat16": "bf16", "float16": 16}[back.config.dtype]
    )
    for name in source.tensors:
        assert torch.equal(back.read(name), source.read(name)), name
        assert (back.tensors[name].dtype is dtype) != name.endswith("expert_bias"), name


RANKS = {
    Division(): ["./model_weights.ckpt"],
    Division(2): ["./mp_rank_00/model_weights.ckpt", "./mp_rank_01/model_weights.ckpt"],
    Division(1, 2): [f"./tp_rank_00_pp_rank_00{p}/model_weights.ckpt" for p in range(2)],
    Division(2, 2): [
        f"./tp_rank_0{t}_pp_rank_00{p}/model_weights.ckpt" for p in range(2) for t in range(2)
    ],
}


@pytest.mark.parametrize("division", RANKS)
def test_tar_lists_plain_members_and_torch_loads_those_with_weights(
    division: Division, tmp_path: Path
) -> None:
    source = lively(CLASSIC)
    written(source, tmp_path / "x.nemo", division)
    with tarfile.open(tmp_path / "x.nemo", "r:") as archive:
        members = archive.getmembers()
        assert [one.name for one in members] == ["./model_config.yaml", *RANKS[division]]
        for one in members:
            assert (one.type, one.mode, one.mtime) == (tarfile.REGTYPE, 0o644, 0)
            assert (one.uid, one.gid, one.uname, one.gname) == (0, 0, "", "")
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert (tmp_path / "x.nemo").stat().st_size % tarfile.RECORDSIZE == 0
    for name in RANKS[division]:
        found = loaded(tmp_path / "x.nemo", name)
        assert all(key.startswith("model.") for key in found)
        assert "model.decoder.layers.0.self_attention.linear_qkv.weight" in found
    back = open_checkpoint(tmp_path / "unpacked")
    assert base_digest(back) == base_digest(source)


def test_ranks_have_their_own_layers_gates_and_copy_of_the_embedding(tmp_path: Path) -> None:
    tied = MODERN.with_fields(untie_embeddings_and_output_weights=False)
    source = lively(tied)
    written(source, tmp_path / "x.nemo", Division(2, 2))
    first, last = (
        loaded(tmp_path / "x.nemo", f"./tp_rank_01_pp_rank_00{p}/model_weights.ckpt")
        for p in range(2)
    )
    table = first["model.embedding.word_embeddings.weight"]
    assert table.shape == (56, 32) and not table[47:].any()
    assert torch.equal(table[:47], source.read(EMBEDDING)[56:])
    assert torch.equal(last["model.output_layer.weight"], table)
    assert "model.output_layer.weight" not in first
    assert "model.decoder.final_layernorm.weight" in last
    # The fourth layer of five is the first of the second stage.
    whole = source.read("decoder.layers.3.mlp.linear_fc1.weight")
    gates, ups = whole[22:44], whole[66:88]
    assert torch.equal(
        last["model.decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gates, ups])
    )
    assert first["model.decoder.layers.0.mlp.linear_fc1._extra_state"] is None


def test_weights_lie_aligned_and_the_streaming_writer_agrees_with_the_plain_one(
    tmp_path: Path,
) -> None:
    source = lively(SPARSE)
    planned = layout(source, Division(2, 2))
    (file,) = planned.files
    assert planned.alone and planned.format == "nemo"
    assert all(placement.offset % 64 == 0 for placement in file.placements)
    convert(plan(source, tmp_path / "x.nemo", Wish("nemo", division=Division(2, 2))))
    assert (tmp_path / "x.nemo").read_bytes() == file_bytes(source, file)
    assert "read back by Preamble only" in planned.notes[0]


def with_words(folder: Path, **changes: Any) -> Checkpoint:
    """A model whose vocabulary is that of the tokenizer in the folder."""
    size = open_tokenizer(folder).vocab_size
    source = lively(CLASSIC.with_fields(vocab_size=size, **changes))
    tensors = {name: source.read(name) for name in source.tensors}
    return in_memory(source.config, tensors, folder)


def pieces(folder: Path) -> Path:
    folder.mkdir()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(model_type="bpe"))
    return folder


def same_words(left: Path, right: Path | None, kind: str | None = None) -> None:
    assert right is not None
    ours, back = open_tokenizer(left, kind=kind), open_tokenizer(right)
    text = "the quick brown fox: forty-two"
    assert back.kind == ours.kind and back.vocab_size == ours.vocab_size
    assert back.encode(text) == ours.encode(text)


@pytest.mark.parametrize("kind", ["sentencepiece", "gpt2"])
def test_a_tokenizer_that_nemo_knows_goes_along_and_tells_the_vocabulary(
    kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "words"
    if kind == "gpt2":
        gpt2_case(folder)
    else:
        pieces(folder)
    source = with_words(folder)
    back = written(source, tmp_path / "x.nemo", Division(2))
    record = said(tmp_path / "x.nemo")
    assert "override_vocab_size" not in record and back.config == source.config
    same_words(folder, back.tokenizer)
    section = record["tokenizer"]
    library = {"gpt2": "megatron", "sentencepiece": "sentencepiece"}[kind]
    assert section["library"] == library and section.get("sentencepiece_legacy") in (None, False)
    with tarfile.open(tmp_path / "x.nemo") as archive:
        names = archive.getnames()[1:-2]
    references = [value for value in section.values() if str(value).startswith("nemo:")]
    assert sorted(references) == sorted(f"nemo:{name[2:]}" for name in names)
    assert len(names) == (2 if kind == "gpt2" else 1)
    # The same again, and from the archive: its names follow from what the files hold.
    written(source, tmp_path / "y.nemo", Division(2))
    assert (tmp_path / "y.nemo").read_bytes() == (tmp_path / "x.nemo").read_bytes()
    again = written(back, tmp_path / "z.nemo", Division(1, 2))
    same_words(folder, again.tokenizer)


def notes_of(planned: Layout) -> str:
    return " ".join(planned.notes)


def test_a_tokenizer_that_nemo_cannot_refer_to_stays_outside_with_a_note(tmp_path: Path) -> None:
    json_case(tmp_path / "words", byte_level())
    source = with_words(tmp_path / "words")
    assert "of a kind that a .nemo cannot refer to" in notes_of(layout(source, Division()))
    back = written(source, tmp_path / "x.nemo")
    assert back.tokenizer is None and back.config == source.config
    rows = padded_vocabulary(source.config, 1, 8)
    assert said(tmp_path / "x.nemo")["override_vocab_size"] == rows


def as_json(model: Path) -> tokenizers.Tokenizer:
    """The tokens of a sentencepiece model as a tokenizer.json has them."""
    library = sentencepiece.SentencePieceProcessor(model_file=str(model))
    vocabulary = {library.id_to_piece(i): i for i in range(library.get_piece_size())}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    made.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    return made


def test_a_sentencepiece_model_beside_a_tokenizer_json_goes_along_if_it_has_the_same_tokens(
    tmp_path: Path,
) -> None:
    folder = pieces(tmp_path / "words")
    library = as_json(folder / "tokenizer.model")
    library.save(str(folder / "tokenizer.json"))
    source = with_words(folder)
    assert open_tokenizer(folder).kind == "tokenizer.json"
    same_words(folder, written(source, tmp_path / "x.nemo").tokenizer, "sentencepiece")
    library.add_tokens(["<one more>"])
    library.save(str(folder / "tokenizer.json"))
    assert "cannot refer to" in notes_of(layout(with_words(folder), Division()))
    other = tokenizers.Tokenizer(tokenizers.models.WordLevel({"fox": 0}, unk_token="fox"))
    other.add_tokens([f"word {i}" for i in range(source.config.vocab_size - 1)])
    other.save(str(folder / "tokenizer.json"))
    assert open_tokenizer(folder).vocab_size == source.config.vocab_size
    assert "cannot refer to" in notes_of(layout(with_words(folder), Division()))


def test_prompts_that_begin_with_a_token_of_their_own_are_noted(tmp_path: Path) -> None:
    folder = pieces(tmp_path / "words")
    assert "(BOS)" not in notes_of(layout(with_words(folder), Division()))
    (folder / "tokenizer_config.json").write_text('{"add_bos_token": true, "bos_token": "<s>"}')
    assert "(BOS), which a .nemo cannot say" in notes_of(layout(with_words(folder), Division()))


def run(*words: object) -> int:
    return preamble.main(["convert", *map(str, words)])


def test_the_command_writes_one_file_and_refuses_what_it_would_not_keep(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(lively(MODERN), tmp_path / "source.nemo")
    target = tmp_path / "x.nemo"
    words = (tmp_path / "source.nemo", target, "--to", "nemo", "--tp", 2, "--pp", 3)
    assert run(*words, "--dry-run") == 0
    assert "no NeMo was at hand" in capsys.readouterr().out and not target.exists()
    assert run(*words) == 0
    assert base_digest(open_checkpoint(target)) == base_digest(lively(MODERN))
    assert sorted(path.name for path in tmp_path.glob("*.nemo")) == ["source.nemo", "x.nemo"]
    assert run(*words, "--resume") == 0 and "complete already" in capsys.readouterr().err
    assert run(*words) == 1 and "exists already" in capsys.readouterr().err
    target.unlink()
    for flags, message in (
        (("--prove",), "no place for a proof"),
        (("--vpp", 2), "no virtual pipeline"),
        (("--megatron-spec", "te"), "no specs"),
        (("--tokenizer", tmp_path / "nowhere"), "does not exist"),
    ):
        assert run(*words, *flags) == 1
        assert message in capsys.readouterr().err and not target.exists()
    with pytest.raises(SystemExit):
        run(tmp_path / "source.nemo", tmp_path / "folder", "--to", "nemo")


class Killed(BaseException):
    """A kill, as far as the file can tell: nothing after it is done."""


def test_a_killed_run_goes_on_and_ends_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = lively(CLASSIC)
    written(source, tmp_path / "source.nemo")
    opened = open_checkpoint(tmp_path / "source.nemo")
    made = plan(opened, tmp_path / "x.nemo", Wish("nemo", division=Division(2, 2)))
    whole = plan(opened, tmp_path / "y.nemo", Wish("nemo", division=Division(2, 2)))
    convert(whole)
    monkeypatch.setattr(copy_engine, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr(copy_engine, "PROGRESS_SECONDS", 0.001)
    real, left = copy_engine.Files.write, 60

    def write(
        files: copy_engine.Files, number: int, offset: int, content: memoryview | bytes
    ) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise Killed
        real(files, number, offset, content)

    with monkeypatch.context() as patch:
        patch.setattr(copy_engine.Files, "write", write)
        with pytest.raises(Killed):
            convert(made)
    assert made.partial.is_dir() and not made.target.exists()
    convert(made, resume=True)
    assert made.target.read_bytes() == whole.target.read_bytes() and not made.partial.exists()


def test_a_member_beyond_8_gib_is_found_by_tar_and_by_our_reader(tmp_path: Path) -> None:
    """Its header, its archive's directory and its place alone are written; all else is a hole."""
    large = CLASSIC.with_fields(num_layers=1, vocab_size=50 << 20, moe_layers=())
    row = torch.zeros(1, 1)
    tensors = {
        name: row.expand(parameter.shape)
        if len(parameter.shape) == 2
        else row[0].expand(parameter.shape)
        for name, parameter in parameters(large.with_fields(hidden_size=64)).items()
    }
    source = in_memory(large.with_fields(hidden_size=64), tensors)
    (file,) = layout(source, Division()).files
    path = tmp_path / "x.nemo"
    with open(path, "wb") as out:
        os.truncate(path, file.size)
        for text in file.texts:
            out.seek(text.offset)
            out.write(text.content)
    with tarfile.open(path, "r:") as archive:
        config, weights = archive.getmembers()
    assert (config.name, weights.name) == ("./model_config.yaml", "./model_weights.ckpt")
    assert weights.size > 8 << 30 and weights.offset_data + weights.size <= file.size
    tree, _ = open_archive(path)
    found = read_archive(tree.spans["model_weights.ckpt"])
    assert found["model.embedding.word_embeddings.weight"].shape == (50 << 20, 64)
    assert open_checkpoint(path).config.vocab_size == 50 << 20
