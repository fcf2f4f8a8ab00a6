"""The Hugging Face form, written: transformers and our reader find the same model in it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import gpt
from checkpoints_tools.layout.layout import Layout, unplaced
from checkpoints_tools.writers.huggingface import layout
from gpt.checkpoint.files.safetensors_file import open_safetensors
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.formats.registry import open_checkpoint
from tests.support.checkpoints.hf_models import CASES, ids, logits_of, model_of
from tests.support.checkpoints.hf_targets import MODELS, PLAIN
from tests.support.checkpoints.plain_writer import write_plainly
from tests.support.models import lively
from tests.support.trained_tokenizers import byte_level, json_case

LOGITS_ATOL = 1e-4  # fp32 sums in another order, over logits of a few tens.
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


def written(checkpoint: Checkpoint, folder: Path, **options: Any) -> Layout:
    made = layout(checkpoint, **options)
    assert unplaced(checkpoint, made) == []
    check_once(checkpoint, made)
    write_plainly(checkpoint, made, folder)
    return made


def check_once(checkpoint: Checkpoint, made: Layout) -> None:
    """Each row of each tensor goes to one place."""
    rows: dict[str, list[tuple[int, int]]] = {}
    for file in made.files:
        for placement in file.placements:
            assert placement.part.dim == 0
            rows.setdefault(placement.name, []).extend(placement.part.ranges)
    for name, ranges in rows.items():
        ends = [0, *(stop for _, stop in sorted(ranges))]
        assert [start for start, _ in sorted(ranges)] == ends[:-1], name
        assert ends[-1] == checkpoint.tensors[name].shape[0], name


def transformers_model(folder: Path) -> Any:
    """What transformers makes of the folder, if it finds a place for each tensor, and no more."""
    import transformers

    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", output_loading_info=True
    )
    model, report = loaded
    wrong = {what: names for what, names in report.items() if names}
    assert wrong == {}
    model.train(False)
    return model


def stored(folder: Path) -> dict[str, Tensor]:
    return {key: value for f in folder.glob("*.safetensors") for key, value in load_file(f).items()}


def family_of(folder: Path) -> str:
    return str(json.loads((folder / CONFIG).read_text())["model_type"])


def assert_same_tensors(ours: Checkpoint, theirs: Checkpoint) -> None:
    assert list(ours.tensors) == list(theirs.tensors)
    for name in ours.tensors:
        mine, its = ours.read(name), theirs.read(name)
        assert mine.dtype == its.dtype and torch.equal(mine, its), name


@pytest.mark.parametrize("case", CASES)
def test_what_transformers_saved_is_written_as_it_was(case: str, tmp_path: Path) -> None:
    family, model = CASES[case][0], model_of(case)
    model.save_pretrained(tmp_path / "theirs")
    checkpoint = open_checkpoint(tmp_path / "theirs")
    written(checkpoint, tmp_path / "ours", family=family)
    ours, theirs = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert set(ours) == set(theirs)
    for key, value in theirs.items():
        assert ours[key].dtype == value.dtype and torch.equal(ours[key], value), key
    assert open_checkpoint(tmp_path / "ours").config == checkpoint.config
    # The same weights, and a config.json that says the same: not one bit of a logit differs.
    loaded = transformers_model(tmp_path / "ours")
    assert torch.equal(logits_of(loaded, ids()), logits_of(model, ids()))


@pytest.mark.parametrize("name", MODELS)
def test_each_family_takes_its_models_and_computes_what_we_do(name: str, tmp_path: Path) -> None:
    family, config = MODELS[name]
    checkpoint = lively(config)
    made = written(checkpoint, tmp_path)
    assert family_of(tmp_path) == family
    again = open_checkpoint(tmp_path)
    assert_same_tensors(again, checkpoint)
    # What does not come back is training's, and said.
    lost = {"hidden_dropout": 0.0, "ffn_hidden_size": again.config.ffn_hidden_size}
    assert again.config in (config, config.with_fields(**lost))
    dropped = again.config.hidden_dropout != config.hidden_dropout
    assert any("hidden_dropout" in note for note in made.notes) == dropped
    theirs = logits_of(transformers_model(tmp_path), ids())
    ours = gpt.load(tmp_path).logits(ids())
    assert float(ours.std()) >= 5
    assert float((ours - theirs).abs().max()) <= LOGITS_ATOL


@pytest.mark.parametrize("name", ["classic", "gated", "partly rotary, scaled", "experts"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_is_stored_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    whole = lively(MODELS[name][1])
    written(whole.in_dtype(dtype), tmp_path)
    again = open_checkpoint(tmp_path)
    assert again.config.dtype == str(dtype).removeprefix("torch.")
    for tensor in again.tensors:
        assert torch.equal(again.read(tensor), whole.read(tensor).to(dtype)), tensor
    assert next(transformers_model(tmp_path).parameters()).dtype == dtype


def test_shards_are_bounded_indexed_and_read_by_all(tmp_path: Path) -> None:
    checkpoint = lively(PLAIN.with_fields(activation="gelu"))
    written(checkpoint, tmp_path / "one")
    made = written(checkpoint, tmp_path / "many", shard_bytes_max=60_000)
    files = sorted(file.name for file in (tmp_path / "many").glob("*.safetensors"))
    assert files == [f"model-{n + 1:05}-of-{len(files):05}.safetensors" for n in range(len(files))]
    assert len(files) > 3
    for file in files:
        assert sum(value.nbytes for value in load_file(tmp_path / "many" / file).values()) <= 60_000
    one, many = stored(tmp_path / "one"), stored(tmp_path / "many")
    assert set(one) == set(many) and all(torch.equal(one[key], many[key]) for key in one)
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in one.values())
    assert {key: file for file in files for key in load_file(tmp_path / "many" / file)} == index[
        "weight_map"
    ]
    assert [file.path for file in made.last] == [INDEX, CONFIG]
    assert_same_tensors(open_checkpoint(tmp_path / "many"), checkpoint)
    both = (logits_of(transformers_model(tmp_path / name), ids()) for name in ("one", "many"))
    assert torch.equal(*both)


def test_a_tensor_larger_than_a_shard_has_one_for_itself(tmp_path: Path) -> None:
    checkpoint = lively(PLAIN)
    made = written(checkpoint, tmp_path, shard_bytes_max=1)
    assert all(len(file.placements) == 1 for file in made.files)
    assert_same_tensors(open_checkpoint(tmp_path), checkpoint)


def test_wide_tensors_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    sizes = {"hidden_size": 3, "num_attention_heads": 3, "num_query_groups": 3, "kv_channels": 1}
    config = PLAIN.with_fields(vocab_size=1, ffn_hidden_size=5, **sizes)
    whole, half = lively(config), lively(config).in_dtype(torch.bfloat16)
    mixed = {name: (whole if "norm" in name else half).tensors[name] for name in half.tensors}
    checkpoint = replace(half, tensors=mixed)
    made = written(checkpoint, tmp_path)
    for placement in made.files[0].placements:
        assert placement.offset % placement.dtype.itemsize == 0
    assert made.files[0].placements[0].dtype == torch.float32
    for name, logical in open_checkpoint(tmp_path).tensors.items():
        assert torch.equal(logical.read(), checkpoint.read(name))


def test_a_file_says_that_it_is_torchs(tmp_path: Path) -> None:
    written(lively(PLAIN), tmp_path)
    content = (tmp_path / WEIGHTS).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    assert json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    assert len(open_safetensors(tmp_path / WEIGHTS)) == len(stored(tmp_path))


def test_the_tokenizer_says_how_a_text_ends(tmp_path: Path) -> None:
    case = json_case(tmp_path / "tokenizer", byte_level())
    assert case.ours.eos_id is not None
    size = case.ours.vocab_size
    checkpoint = lively(PLAIN.with_fields(vocab_size=size + 7))
    known = replace(checkpoint, tokenizer=tmp_path / "tokenizer")
    for one, eos in ((checkpoint, None), (known, case.ours.eos_id)):
        made = layout(one)
        record = json.loads(made.last[-1].texts[0].content)
        assert record["eos_token_id"] == eos and "bos_token_id" in record
    small = replace(known, config=PLAIN.with_fields(vocab_size=size - 1))
    made = layout(small)
    assert json.loads(made.last[-1].texts[0].content)["eos_token_id"] is None
    assert "names no token that ends a text: the tokenizer in" in made.notes[-1]
