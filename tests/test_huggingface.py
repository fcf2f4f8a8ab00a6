"""Hugging Face checkpoints: what transformers saved is what we read, and compute."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gpt
from gpt.checkpoint import open_checkpoint
from gpt.config import GPTConfig
from gpt.digest import base_digest
from gpt.errors import CheckpointError
from gpt.generate import generate
from gpt.sampling import Sampling
from tests.hf_models import (
    CASES,
    GPT2_SIZES,
    SIZES,
    WINDOW,
    edit_json,
    ids,
    logits_of,
    model_of,
    random_model,
)
from tests.models import first_tie, recompute_greedy

LOGITS_ATOL = 1e-4  # fp32 sums in another order, over logits of a few tens.
CONFIG, WEIGHTS = "config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder where transformers saved a case, in several shards. Do not write into it."""
    root = tmp_path_factory.mktemp("saved")

    def folder(case: str) -> Path:
        path = root / case.replace(", ", "-").replace(" ", "-")
        if not path.exists():
            model_of(case).save_pretrained(path, max_shard_size="60KB")
        return path

    return folder


@pytest.fixture
def llama(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a sharded Llama, to be broken."""
    return Path(shutil.copytree(saved("llama, multi-head"), tmp_path / "llama"))


def single(folder: Path) -> Path:
    """The same checkpoint in one file."""
    if (folder / INDEX).exists():
        tensors = {k: v for f in folder.glob("*.safetensors") for k, v in load_file(f).items()}
        for file in [*folder.glob("*.safetensors"), folder / INDEX]:
            file.unlink()
        save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, saved: Callable[[str], Path]) -> None:
    theirs = logits_of(model_of(case), ids())
    ours = gpt.load(saved(case)).logits(ids())
    assert float(theirs.std()) >= 5
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert float((ours - theirs).abs().max()) <= LOGITS_ATOL


@pytest.mark.parametrize("case", CASES)
def test_sixteen_tokens_through_the_cache_are_what_recomputing_all_gives_here_and_there(
    case: str, saved: Callable[[str], Path]
) -> None:
    theirs, ours = model_of(case), gpt.load(saved(case))
    prompts = [row[:length].tolist() for row, length in zip(ids(3), (20, 3, 9), strict=True)]
    completions = generate(ours, prompts, Sampling(max_new_tokens=16))
    for prompt, completion in zip(prompts, completions, strict=True):
        here = recompute_greedy(ours, prompt, 16)
        until = first_tie(here)
        assert completion.token_ids[:until] == here.tokens[:until]
        there = logits_of(theirs, torch.tensor([prompt + here.tokens]))[0].argmax(-1).tolist()
        assert there[len(prompt) - 1 :][:until] == here.tokens[:until]


def packed(model: Any, config: GPTConfig) -> dict[str, Tensor]:
    """The slow twin: build each canonical tensor from a state dict with views and cats."""
    weights, result = model.state_dict(), {}
    gpt2 = model.config.model_type == "gpt2"
    ng, d = config.num_query_groups, config.kv_channels

    def group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [t.view(ng, -1, d, *t.shape[1:]) for t in (q, k, v)]
        return torch.cat(heads, dim=1).flatten(0, 2)

    def put(name: str, key: str) -> None:
        for kind in ("weight", "bias"):
            if f"{key}.{kind}" in weights:
                value = weights[f"{key}.{kind}"]
                conv = gpt2 and value.dim() == 2 and ".h." in key
                place = name + kind if name.endswith("_") else f"{name}.{kind}"
                result[place] = value.T if conv else value

    stem = "transformer" if gpt2 else "model"
    put("embedding.word_embeddings", f"{stem}.{'wte' if gpt2 else 'embed_tokens'}")
    put("embedding.position_embeddings", f"{stem}.wpe")
    put("decoder.final_layernorm", f"{stem}.{'ln_f' if gpt2 else 'norm'}")
    if not model.config.tie_word_embeddings:
        put("output_layer", "lm_head")
    for n in range(config.num_layers):
        theirs = f"{stem}.{'h' if gpt2 else 'layers'}.{n}."
        attention, mlp = f"decoder.layers.{n}.self_attention.", f"decoder.layers.{n}.mlp."
        put(f"{attention}linear_qkv.layer_norm_", theirs + ("ln_1" if gpt2 else "input_layernorm"))
        put(f"{attention}q_layernorm", f"{theirs}self_attn.q_norm")
        put(f"{attention}k_layernorm", f"{theirs}self_attn.k_norm")
        put(f"{attention}linear_proj", theirs + ("attn.c_proj" if gpt2 else "self_attn.o_proj"))
        norm = "ln_2" if gpt2 else "post_attention_layernorm"
        put(f"{mlp}linear_fc1.layer_norm_", theirs + norm)
        put(f"{mlp}linear_fc2", theirs + ("mlp.c_proj" if gpt2 else "mlp.down_proj"))
        put(f"{mlp}linear_fc1", f"{theirs}mlp.c_fc")
        for kind in ("weight", "bias"):
            if gpt2:
                qkv = list(weights[f"{theirs}attn.c_attn.{kind}"].T.chunk(3, dim=0))
            else:
                keys = [f"{theirs}self_attn.{letter}_proj.{kind}" for letter in "qkv"]
                qkv = [weights[key] for key in keys if key in weights]
                halves = [f"{theirs}mlp.{half}_proj.{kind}" for half in ("gate", "up")]
                if halves[0] in weights:
                    both = [weights[key] for key in halves]
                    result[f"{mlp}linear_fc1.{kind}"] = torch.cat(both)
            if qkv:
                result[f"{attention}linear_qkv.{kind}"] = group(*qkv)
    return result


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_packed_bit_for_bit(case: str, saved: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(saved(case))
    expected = packed(model_of(case), checkpoint.config)
    assert set(checkpoint.tensors) == set(expected)
    for name, value in expected.items():
        assert torch.equal(checkpoint.read(name), value), name


def test_shards_one_file_and_pickles_are_the_same_model(llama: Path, tmp_path: Path) -> None:
    digests = {base_digest(open_checkpoint(llama))}
    tensors = load_file(single(llama) / WEIGHTS)
    digests.add(base_digest(open_checkpoint(llama)))
    (llama / WEIGHTS).unlink()
    torch.save(tensors, llama / "pytorch_model.bin")
    digests.add(base_digest(open_checkpoint(llama)))
    torch.save(tensors, llama / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    digests.add(base_digest(open_checkpoint(llama)))
    assert len(digests) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_read_as_it_is(dtype: str, tmp_path: Path) -> None:
    model = model_of("gpt2", getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.dtype == dtype
    words = checkpoint.read("embedding.word_embeddings.weight")
    assert words.dtype == getattr(torch, dtype)
    assert torch.equal(words, model.state_dict()["transformer.wte.weight"])


@pytest.mark.parametrize("case", ["gpt2", "llama, tied, all biases, wide heads"])
def test_files_of_the_bare_model_are_read(
    case: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    bare: Any = model_of(case).base_model
    bare.save_pretrained(tmp_path)
    assert base_digest(open_checkpoint(tmp_path)) == base_digest(open_checkpoint(saved(case)))


def to_version_4(record: dict[str, Any]) -> None:
    """config.json as transformers 4 wrote it."""
    rope = record.pop("rope_parameters", None)
    if rope:
        record["rope_theta"] = rope.pop("rope_theta")
        record["rope_scaling"] = rope if rope["rope_type"] != "default" else None
    record["torch_dtype"] = record.pop("dtype")
    record.pop("layer_types", None)


@pytest.mark.parametrize("case", CASES)
def test_config_of_transformers_4_reads_the_same(
    case: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(saved(case), tmp_path / "old"))
    edit_json(folder / CONFIG, to_version_4)
    assert open_checkpoint(folder).config == open_checkpoint(saved(case)).config


def test_the_oldest_spelling_of_rope_scaling_reads_too(llama: Path) -> None:
    def change(record: dict[str, Any]) -> None:
        record.pop("rope_parameters")
        record.update(rope_theta=10000, rope_scaling={"type": "linear", "factor": 2})

    edit_json(llama / CONFIG, change)
    config = open_checkpoint(llama).config
    assert config.rope_scaling is not None and config.rope_scaling.factor == 2.0
    assert config.rotary_base == 10000.0


OPTIONAL = {
    *("num_key_value_heads", "max_position_embeddings", "n_positions", "bos_token_id"),
    "eos_token_id",
}


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral", "qwen2", "qwen3"])
def test_where_config_is_silent_the_familys_default_holds(family: str, tmp_path: Path) -> None:
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    needed = {key: value for key, value in sizes.items() if key not in OPTIONAL}
    needed["num_attention_heads" if family != "gpt2" else "n_head"] = 32
    needed["hidden_size" if family != "gpt2" else "n_embd"] = 64
    spoken, silent = tmp_path / "spoken", tmp_path / "silent"
    random_model(family, needed).save_pretrained(spoken)
    shutil.copytree(spoken, silent)
    (silent / CONFIG).write_text(json.dumps({"model_type": family, **needed}))
    assert open_checkpoint(silent).config == open_checkpoint(spoken).config


# What a config.json can ask for that the model does not compute, or does not say.
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown architecture": (
        "llama, multi-head",
        {"model_type": "falcon"},
        "'falcon' is not a family .* known are gpt2, llama, mistral, qwen2, qwen3",
    ),
    "no architecture": ("llama, multi-head", {"model_type": None}, "model_type 'None' is not"),
    "yarn": (
        "llama, multi-head",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        "rope type 'yarn' is not one that Preamble computes; known are default, linear, llama3",
    ),
    "dynamic": (
        "qwen2",
        {"rope_parameters": None, "rope_theta": 1e4, "rope_scaling": {"type": "dynamic"}},
        "rope type 'dynamic'",
    ),
    "positions by layer": (
        "qwen3, wide heads",
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope_parameters differ by layer",
    ),
    "partial positions": (
        "llama, multi-head",
        {"partial_rotary_factor": 0.5},
        "partial_rotary_factor is 0.5, which Preamble does not compute",
    ),
    "attention scaled by layer": (
        "gpt2",
        {"scale_attn_by_inverse_layer_idx": True},
        "scale_attn_by_inverse_layer_idx is true, which Preamble does not compute",
    ),
    "cross attention": ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
    "unknown activation": ("gpt2", {"activation_function": "mish"}, 'is "mish"; it must be one of'),
    "quantized": (
        "llama, multi-head",
        {"quantization_config": {"quant_method": "gptq"}},
        "quantization_config .*gptq",
    ),
    "mixed windows by number": (
        "qwen2",
        {**WINDOW, "max_window_layers": 1, "layer_types": None},
        "max_window_layers 1 of 3 layers mixes",
    ),
    "mixed windows by name": (
        "qwen2",
        {**WINDOW, "layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        "layer_types mixes full_attention, sliding_attention",
    ),
    "a missing field": ("llama, multi-head", {"hidden_size": None}, "hidden_size .*whole number"),
    "a text for a number": ("gpt2", {"n_head": "4"}, 'n_head is "4"; it must be a whole number'),
    "a number for a flag": ("llama, multi-head", {"mlp_bias": 1}, "mlp_bias is 1; .*true or false"),
    "heads that do not divide": (
        "llama, multi-head",
        {"num_key_value_heads": 3},
        "4 attention heads do not divide into 3",
    ),
    "another width": (
        "llama, multi-head",
        {"intermediate_size": 96},
        r"gate_proj.weight: found \(80, 48\), need \(96, 48\) for .*the weights disagree",
    ),
    "another vocabulary": (
        "gpt2",
        {"vocab_size": 90},
        r"wte.weight: found \(101, 48\), need \(90, 48\)",
    ),
    "more layers": (
        "llama, multi-head",
        {"num_hidden_layers": 4},
        "none of the weights is 'model.layers.3.*download is incomplete",
    ),
    "fewer layers": (
        "llama, multi-head",
        {"num_hidden_layers": 2},
        "no place for 9 of the weights: model.layers.2.*so the model is not read",
    ),
    "heads of another width": (
        "qwen3, wide heads",
        {"head_dim": 24},
        r"q_proj.weight: found \(80, 48\), need \(96, 48\)",
    ),
    "tied, with a head of its own": (
        "llama, multi-head",
        {"tie_word_embeddings": True},
        "lm_head.weight is not equal to .*set tie_word_embeddings to false",
    ),
    "biases that are not there": (
        "llama, multi-head",
        {"attention_bias": True},
        "none of the weights is 'model.layers.0.self_attn.q_proj.bias'",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_config_that_cannot_be_is_one_sentence(
    what: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    case, fields, message = REFUSED[what]
    folder = Path(shutil.copytree(saved(case), tmp_path / "model"))
    edit_json(folder / CONFIG, lambda record: record.update(fields))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


def remove_weights(folder: Path) -> None:
    for file in folder.glob("model*"):
        file.unlink()


def first_shard(folder: Path) -> Path:
    return min(folder.glob("model-*.safetensors"))


def reword(folder: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(folder / name, change)


def retype(folder: Path, dtype: torch.dtype) -> None:
    tensors = load_file(first_shard(folder))
    save_file({key: value.to(dtype) for key, value in tensors.items()}, first_shard(folder))


def swap_pickle(folder: Path, value: object) -> None:
    (single(folder) / WEIGHTS).unlink()
    torch.save(value, folder / "pytorch_model.bin")


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return exec, ("raise SystemExit('the pickle was executed')",)


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (
        lambda folder: first_shard(folder).unlink(),
        r"names \d+ shards, 1 of them missing: model-00001-of-.*; fetch the missing",
    ),
    "a truncated shard": (
        lambda folder: os.truncate(first_shard(folder), 20000),
        "model-00001-of-.* is truncated: .*fetch or copy it again",
    ),
    "a shard that is a pointer": (
        lambda folder: first_shard(folder).write_text("version https://git-lfs.github.com/spec/v1"),
        "is a git-lfs pointer, not the weights; run `git lfs pull`",
    ),
    "a shard of another version": (
        lambda folder: save_file({"x": torch.ones(1)}, first_shard(folder)),
        "index.json places '.*' in model-00001-of-.*, which does not hold it",
    ),
    "no index": (
        lambda folder: (folder / INDEX).unlink(),
        "shards as .*but not model.safetensors.i",
    ),
    "an index without a map": (
        lambda folder: (folder / INDEX).write_text("{}"),
        "has no weight_map",
    ),
    "an index that leaves the folder": (
        partial(reword, name=INDEX, change=lambda r: r["weight_map"].update(x="../x.safetensors")),
        "names '../x.safetensors', which is not a file beside it",
    ),
    "an index that lacks a key": (
        partial(reword, name=INDEX, change=lambda r: r["weight_map"].update(x="model-00001-of-0")),
        "1 of them missing",
    ),
    "no weights": (
        remove_weights,
        "has config.json but no weights; model.safetensors, or",
    ),
    "a config that is no JSON": (
        lambda folder: (folder / CONFIG).write_text("{"),
        "config.json is not JSON",
    ),
    "a config that is a list": (
        lambda folder: (folder / CONFIG).write_text("[]"),
        "config.json is not a JSON object",
    ),
    "whole numbers": (
        partial(retype, dtype=torch.int8),
        "is torch.int8, not one of float64, float32, bfloat16, float16",
    ),
    "a pickle that runs code": (
        partial(swap_pickle, value={"a": Hostile()}),
        "holds more than tensors: it asks to run .*exec; save it again as safetensors",
    ),
    "a pickle of something else": (partial(swap_pickle, value=[1]), "is not a plain state dict"),
    "a pickle in a pickle": (
        partial(swap_pickle, value={"model": {"a": torch.ones(1)}}),
        "is not a plain state dict",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_files_are_one_sentence(what: str, llama: Path) -> None:
    change, message = BROKEN[what]
    change(llama)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(llama)
    assert str(llama) in str(caught.value) and "\n" not in str(caught.value)


def test_a_truncated_pickle_is_one_sentence(llama: Path) -> None:
    swap_pickle(llama, load_file(single(llama) / WEIGHTS))
    os.truncate(llama / "pytorch_model.bin", 50000)
    with pytest.raises(CheckpointError, match="it has 50000 bytes and is truncated or broken"):
        open_checkpoint(llama)
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(), protocol=2))
    with pytest.raises(CheckpointError, match="is not a readable torch file"):
        open_checkpoint(llama)


def test_the_folder_is_the_tokenizers_if_it_has_one(llama: Path) -> None:
    assert open_checkpoint(llama).tokenizer is None
    (llama / "tokenizer.model").write_bytes(b"")
    assert open_checkpoint(llama).tokenizer == llama


def test_buffers_that_are_no_weights_are_left_alone(llama: Path) -> None:
    before = base_digest(open_checkpoint(llama))
    tensors = load_file(single(llama) / WEIGHTS)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, llama / WEIGHTS)
    assert base_digest(open_checkpoint(llama)) == before


def test_a_tied_model_may_repeat_its_embedding_as_the_head(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = single(Path(shutil.copytree(saved("gpt2"), tmp_path / "gpt2")))
    before = base_digest(open_checkpoint(folder))
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / WEIGHTS)
    assert base_digest(open_checkpoint(folder)) == before


def test_the_true_vocabulary_can_be_told(llama: Path) -> None:
    model, whole = gpt.load(llama, config={"vocab_size": 90}), gpt.load(llama)
    assert torch.equal(model.logits(ids() % 90), whole.logits(ids() % 90)[..., :90])
    with pytest.raises(CheckpointError, match="overridden with 102, but the embedding has 101"):
        open_checkpoint(llama, {"vocab_size": 102})
