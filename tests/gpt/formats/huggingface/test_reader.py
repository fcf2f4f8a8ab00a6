"""Hugging Face checkpoints: tensors and logits equal those of transformers."""

import logging
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gpt
from gpt.checkpoint.digest import base_digest, fingerprint
from gpt.checkpoint.files.torch_save import open_state_dict
from gpt.errors import CheckpointError
from gpt.formats.registry import open_checkpoint
from gpt.generation.generate import generate
from gpt.sampling_params import SamplingParams
from tests.support.checkpoints.hf_models import (
    CASES,
    POSITIONS,
    VOCABULARY,
    edit_json,
    ids,
    logits_of,
    model_of,
    packed,
    sizes_of,
)
from tests.support.models import first_tie, recompute_greedy

LOGITS_ATOL = 1e-4  # fp32 sums in another order, over logits of a few tens.
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder where transformers saved a case, in shards. Do not write into it."""
    root = tmp_path_factory.mktemp("saved")

    def folder(case: str) -> Path:
        path = root / case.replace(", ", "-").replace(" ", "-")
        if not path.exists():
            model_of(case).save_pretrained(path, max_shard_size="60KB")
        return path

    return folder


@pytest.fixture
def llama(saved: Callable[[str], Path], tmp_path: Path) -> Path:
    """A copy of a sharded Llama that the test may damage."""
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
def test_logits_equal_those_of_transformers(case: str, saved: Callable[[str], Path]) -> None:
    hf_logits = logits_of(model_of(case), ids())
    logits = gpt.load(saved(case)).logits(ids())
    assert float(hf_logits.std()) >= 5
    assert logits.shape == hf_logits.shape and logits.dtype == torch.float32
    assert float((logits - hf_logits).abs().max()) <= LOGITS_ATOL


@pytest.mark.parametrize("case", CASES)
def test_sixteen_cached_tokens_equal_recomputation_and_transformers(
    case: str, saved: Callable[[str], Path]
) -> None:
    hf_model = model_of(case)
    model = gpt.load(saved(case))
    prompts = [row[:length].tolist() for row, length in zip(ids(3), (20, 3, 9), strict=True)]
    completions = generate(model, prompts, SamplingParams(max_new_tokens=16))
    for prompt, completion in zip(prompts, completions, strict=True):
        greedy = recompute_greedy(model, prompt, 16)
        until = first_tie(greedy)
        assert completion.token_ids[:until] == greedy.tokens[:until]
        hf_tokens = (
            logits_of(hf_model, torch.tensor([prompt + greedy.tokens]))[0].argmax(-1).tolist()
        )
        assert hf_tokens[len(prompt) - 1 :][:until] == greedy.tokens[:until]


@pytest.mark.filterwarnings("ignore:The use of `x.T` on tensors")
@pytest.mark.parametrize("case", CASES)
def test_tensors_are_packed_bitwise(case: str, saved: Callable[[str], Path]) -> None:
    checkpoint = open_checkpoint(saved(case))
    expected = packed(model_of(case), checkpoint.config)
    assert set(checkpoint.tensors) == set(expected)
    for name, value in expected.items():
        assert torch.equal(checkpoint.read(name), value), name


def test_shards_single_file_and_pickles_give_the_same_model(llama: Path, tmp_path: Path) -> None:
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
def test_half_precision_weights_keep_their_dtype(dtype: str, tmp_path: Path) -> None:
    model = model_of("gpt2", getattr(torch, dtype))
    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.config.dtype == dtype
    embedding = checkpoint.read("embedding.word_embeddings.weight")
    assert embedding.dtype == getattr(torch, dtype)
    assert torch.equal(embedding, model.state_dict()["transformer.wte.weight"])


@pytest.mark.parametrize(
    "case",
    [
        "gpt2",
        "llama, tied, all biases, wide heads",
        "mixtral, tied, window, three experts of four, wide heads",
        "qwen2_moe, renormalized, no bias, tied, every other layer dense",
        "gpt_neox, tied, no attention bias, linear positions",
    ],
)
def test_files_of_models_without_a_head_are_read(
    case: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    bare: Any = model_of(case).base_model
    bare.save_pretrained(tmp_path)
    assert base_digest(open_checkpoint(tmp_path)) == base_digest(open_checkpoint(saved(case)))


@pytest.mark.parametrize(
    ("case", "key"),
    [
        ("mixtral", "model.layers.2.mlp.experts.gate_up_proj"),
        ("granitemoe", "model.layers.2.block_sparse_moe.experts.down_proj"),
        ("qwen2_moe, one dense layer", "model.layers.2.mlp.experts.down_proj"),
        ("gpt_neox, parallel residual", "lm_head.weight"),
    ],
)
def test_in_memory_keys_of_transformers_5_are_read(
    case: str, key: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    model_of(case).save_pretrained(tmp_path, save_original_format=False)
    assert key in load_file(tmp_path / WEIGHTS)
    assert base_digest(open_checkpoint(tmp_path)) == base_digest(open_checkpoint(saved(case)))


@pytest.mark.parametrize(
    "case",
    [
        "gemma3_text, windows in two layers of three",
        "granite, biases, tied",
        "granitemoe",
        "apertus, biases, tied",
        "bloom",
    ],
)
def test_virtual_tokens_enter_where_transformers_takes_embeddings(
    case: str, saved: Callable[[str], Path]
) -> None:
    hf_model: Any = model_of(case)
    tokens = ids()
    table = torch.randn(3, hf_model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        embeddings = hf_model.get_input_embeddings()(tokens)
        embeddings[:, 1:4] = table
        hf_logits = hf_model(inputs_embeds=embeddings).logits
    tokens[:, 1:4] = VOCABULARY + torch.arange(3)
    with torch.inference_mode():
        logits = gpt.load(saved(case)).logits(tokens, table)
    assert float((logits - hf_logits).abs().max()) <= LOGITS_ATOL


def test_longrope_has_the_factors_that_the_context_selects(
    saved: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    case = "phi3, longrope, beyond the original length"
    original = CASES[case][1]["original_max_position_embeddings"]
    hf_model = model_of(case)
    short_ids, long_ids = ids()[:, :original], ids()[:, : original + 1]
    short_config = {"max_position_embeddings": original}
    checkpoints = [open_checkpoint(saved(case), config) for config in (short_config, None)]
    assert "factors for short contexts" in checkpoints[0].notes[0]
    assert f"set max_position_embeddings to {original} to use" in checkpoints[1].notes[0]
    assert fingerprint(checkpoints[0]) != fingerprint(checkpoints[1])
    with caplog.at_level(logging.INFO):
        short, long = (gpt.load(saved(case), config=config) for config in (short_config, None))
    assert caplog.messages == [
        f"event=longrope factors={factors} context={context} original={original}"
        for factors, context in (("short", original), ("long", POSITIONS))
    ]
    # transformers chooses by the length of the call.
    assert float((short.logits(short_ids) - logits_of(hf_model, short_ids)).abs().max()) <= 1e-4
    assert float((long.logits(long_ids) - logits_of(hf_model, long_ids)).abs().max()) <= 1e-4
    # Keys in a KV cache keep their factors, so short sequences have them too.
    assert float((long.logits(short_ids) - logits_of(hf_model, short_ids)).abs().max()) > 0.1
    leading = long.logits(long_ids)[:, :original]
    assert float((long.logits(short_ids) - leading).abs().max()) <= 1e-4


def add_mtp_layer(key: str, record: dict[str, Any]) -> None:
    record[key] = 1


def test_layers_for_multi_token_prediction_are_ignored(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    expected = base_digest(open_checkpoint(saved("glm4_moe")))
    folder = single(Path(shutil.copytree(saved("glm4_moe"), tmp_path / "model")))
    tensors = load_file(folder / WEIGHTS)
    tensors["model.layers.3.eh_proj.weight"] = torch.ones(48, 96)
    save_file(tensors, folder / WEIGHTS)
    keys = ("num_mtp_layers", "num_nextn_predict_layers")
    for key in keys:
        edit_json(folder / CONFIG, partial(add_mtp_layer, key))
        checkpoint = open_checkpoint(folder)
        assert base_digest(checkpoint) == expected
        assert "multi-token prediction" in " ".join(checkpoint.notes)
    edit_json(folder / CONFIG, lambda record: record.update(dict.fromkeys(keys, 0)))
    with pytest.raises(CheckpointError, match=r"no parameter for 1 of the weights: .*eh_proj"):
        open_checkpoint(folder)


def doubled_head(tensors: dict[str, Tensor]) -> None:
    tensors["embed_out.weight"] = tensors["lm_head.weight"].clone()


def odd_row(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.gate_up_proj"] = torch.ones(5, 161, 48)


def extra_expert(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.ones(6, 48, 80)


def flat_experts(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj"] = torch.ones(5 * 48, 80)


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("gpt_neox, parallel residual", doubled_head, "no parameter for 1 of the weights: lm_head"),
        (
            "mixtral",
            odd_row,
            r"experts.gate_up_proj\[0, 80::\]: found \(81, 48\), need \(80, 48\)",
        ),
        ("mixtral", extra_expert, r"no parameter for 1 of .*block_sparse_moe.experts.5.w2.weight"),
        ("mixtral", flat_experts, r"experts.down_proj\[0, 0::\]: found \(80,\), need \(48, 80\)"),
    ],
)
def test_transformers_5_keys_are_checked_against_the_config(
    case: str, change: Callable[[dict[str, Tensor]], None], message: str, tmp_path: Path
) -> None:
    model_of(case).save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / WEIGHTS)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path)


IMAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma3": ("gemma3_text, windows in two layers of three", "Gemma3", {"mm_tokens_per_image": 4}),
    "mistral3": ("ministral3, window", "Mistral3", {"tie_word_embeddings": False}),
    "mistral3, a Mistral": ("mistral, window", "Mistral3", {"tie_word_embeddings": False}),
}


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_the_text_part_of_a_model_with_images_opens(
    name: str, original: bool, tmp_path: Path
) -> None:
    import transformers

    case, prefix, options = IMAGE_MODELS[name]
    family, fields = CASES[case]
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision: dict[str, Any] = {
        **sizes,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    if prefix == "Mistral3":
        vision["model_type"] = "pixtral"
    text = {**sizes_of(family), **fields, "model_type": family}
    config = getattr(transformers, f"{prefix}Config")(
        text_config=text, vision_config=vision, **options
    )
    model: Any = getattr(transformers, f"{prefix}ForConditionalGeneration")(config)
    text_model: Any = model_of(case)
    model.model.language_model.load_state_dict(text_model.model.state_dict())
    model.lm_head.load_state_dict(text_model.lm_head.state_dict())
    model.train(False)
    model.save_pretrained(tmp_path, save_original_format=original)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.notes == ("the parts for images are ignored; the text model is complete",)
    logits = gpt.load(tmp_path).logits(ids())
    assert float((logits - logits_of(text_model, ids())).abs().max()) <= LOGITS_ATOL
    edit_json(tmp_path / CONFIG, lambda record: record["text_config"].update(model_type="gpt2"))
    with pytest.raises(CheckpointError, match=r"text_config\.model_type is 'gpt2', which"):
        open_checkpoint(tmp_path)


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


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing shard": (
        lambda folder: first_shard(folder).unlink(),
        r"names \d+ shards, 1 of them missing: model-00001-of-.*; fetch the missing",
    ),
    "a truncated shard": (
        lambda folder: os.truncate(first_shard(folder), 20000),
        "model-00001-of-.* is truncated: .*download or copy the file again",
    ),
    "a shard that is a pointer": (
        lambda folder: first_shard(folder).write_text("version https://git-lfs.github.com/spec/v1"),
        "is a git-lfs pointer, not the weights; run `git lfs pull`",
    ),
    "a shard of another version": (
        lambda folder: save_file({"x": torch.ones(1)}, first_shard(folder)),
        "index.json lists '.*' in model-00001-of-.*, but that file does not contain it",
    ),
    "no index": (
        lambda folder: (folder / INDEX).unlink(),
        "shards such as .*but not model.safetensors.i",
    ),
    "an index without a map": (
        lambda folder: (folder / INDEX).write_text("{}"),
        "has no weight_map",
    ),
    "an index that leaves the folder": (
        partial(reword, name=INDEX, change=lambda r: r["weight_map"].update(x="../x.safetensors")),
        "names '../x.safetensors', which is not a file beside it",
    ),
    "an index of a name too long": (
        partial(reword, name=INDEX, change=lambda r: r["weight_map"].update(x="a" * 256)),
        "names 'a{60}', which is not a file beside it; fetch it again",
    ),
    "an index of numbers": (
        partial(reword, name=INDEX, change=lambda r: r["weight_map"].update(x=1)),
        "has no weight_map of keys to files",
    ),
    "an index that lacks a key": (
        partial(reword, name=INDEX, change=lambda r: r["weight_map"].update(x="model-00001-of-0")),
        "1 of them missing",
    ),
    "no weights": (
        remove_weights,
        "has config.json but no weights; it needs model.safetensors, or",
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
        "contains more than tensors: it asks to run .*exec; save it again as safetensors",
    ),
    "a pickle of something else": (partial(swap_pickle, value=[1]), "is not a plain state dict"),
    "a sparse pickle": (
        partial(swap_pickle, value={"a": torch.eye(3).to_sparse()}),
        "pytorch_model.bin: a is torch.sparse_coo on cpu; it must be a dense CPU tensor",
    ),
    "a pickle without numbers": (
        partial(swap_pickle, value={"a": torch.empty(3, device="meta")}),
        "pytorch_model.bin: a is torch.strided on meta; it must be a dense CPU tensor",
    ),
    "a pickle in a pickle": (
        partial(swap_pickle, value={"model": {"a": torch.ones(1)}}),
        "is not a plain state dict",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::UserWarning")  # Sparse tensors warn when they are loaded.
def test_broken_files_raise_one_sentence(fault: str, llama: Path) -> None:
    change, message = FAULTS[fault]
    change(llama)
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(llama)
    assert str(llama) in str(caught.value) and "\n" not in str(caught.value)


def test_truncated_pickles_raise_one_sentence(llama: Path) -> None:
    swap_pickle(llama, load_file(single(llama) / WEIGHTS))
    os.truncate(llama / "pytorch_model.bin", 50000)
    with pytest.raises(CheckpointError, match="it has 50000 bytes and is truncated or broken"):
        open_checkpoint(llama)
    (llama / "pytorch_model.bin").write_bytes(pickle.dumps(Hostile(), protocol=2))
    with pytest.raises(CheckpointError, match="is not a readable torch file"):
        open_checkpoint(llama)


@pytest.mark.filterwarnings("ignore::UserWarning")  # Storage types that torch has deprecated.
def test_flipped_pickle_bytes_raise_one_sentence_or_load(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(3, 4), "b": torch.ones(2)}, path)
    content = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        record = next(i for i in archive.infolist() if i.filename.endswith("data.pkl"))
        begin = content.index(archive.read(record))
    refusals: list[str] = []
    for offset in range(begin, begin + record.file_size):
        for flip in (0x01, 0xFF):
            path.write_bytes(
                content[:offset] + bytes([content[offset] ^ flip]) + content[offset + 1 :]
            )
            try:
                open_state_dict(path)
            except CheckpointError as error:
                refusals.append(str(error))
    assert len(refusals) > record.file_size
    assert all(str(path) in refusal and "\n" not in refusal for refusal in refusals)


def test_the_folder_is_the_tokenizer_folder_if_it_contains_one(llama: Path) -> None:
    assert open_checkpoint(llama).tokenizer is None
    for name in ("tokenizer.model", "gpt2-vocab.json"):
        (llama / name).write_bytes(b"")
        assert open_checkpoint(llama).tokenizer == llama
        (llama / name).unlink()


def test_buffers_are_ignored(llama: Path) -> None:
    digest_before = base_digest(open_checkpoint(llama))
    tensors = load_file(single(llama) / WEIGHTS)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, llama / WEIGHTS)
    assert base_digest(open_checkpoint(llama)) == digest_before


def test_buffers_of_old_gpt_neox_are_ignored(saved: Callable[[str], Path], tmp_path: Path) -> None:
    neox = single(Path(shutil.copytree(saved("gpt_neox, parallel residual"), tmp_path / "neox")))
    digest_before = base_digest(open_checkpoint(neox))
    tensors = load_file(neox / WEIGHTS)
    attention = "gpt_neox.layers.0.attention."
    tensors[f"{attention}bias"] = torch.ones(1, 1, 8, 8, dtype=torch.uint8)
    tensors[f"{attention}masked_bias"] = torch.tensor(-1e9)
    tensors[f"{attention}rotary_emb.inv_freq"] = torch.ones(3)
    save_file(tensors, neox / WEIGHTS)
    assert base_digest(open_checkpoint(neox)) == digest_before


def test_tied_models_may_store_the_embedding_as_head_too(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = single(Path(shutil.copytree(saved("gpt2"), tmp_path / "gpt2")))
    digest_before = base_digest(open_checkpoint(folder))
    tensors = load_file(folder / WEIGHTS)
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    save_file(tensors, folder / WEIGHTS)
    assert base_digest(open_checkpoint(folder)) == digest_before


def test_vocab_size_can_be_overridden(llama: Path) -> None:
    model = gpt.load(llama, config={"vocab_size": 90})
    full_model = gpt.load(llama)
    assert torch.equal(model.logits(ids() % 90), full_model.logits(ids() % 90)[..., :90])
    with pytest.raises(
        CheckpointError, match="vocab_size is set to 102, but the embedding has only 101"
    ):
        open_checkpoint(llama, {"vocab_size": 102})
