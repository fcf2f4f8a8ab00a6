"""Attention backend selection, and the fp8 KV cache in torch."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from gpt.attention.backend import TorchAttention
from gpt.attention.fp8_kv_cache import Fp8KVAttention, quantize_fp8
from gpt.attention.kv_cache import FP8_DTYPE, KVPool
from gpt.attention.selector import select_backend
from gpt.batch import Batch
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.sampling_params import SamplingParams
from serving.config import ServerConfig
from serving.service.service import ServableCheckpoint
from serving.worker.kv_cache_size import available_kv_blocks
from tests.support.attention_cases import AttentionCase, check_store_and_attend, paged_logits
from tests.support.models import CONFIGS, build

CONFIG = next(iter(CONFIGS.values()))
CPU = torch.device("cpu")


def test_a_cpu_selects_torch_and_logs_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        backend = select_backend("auto", CONFIG, CPU)
    assert backend.name == "torch" and isinstance(backend, TorchAttention)
    assert "backend=torch kv_dtype=auto reason='the device is cpu'" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("name", "remedy"), [("triton", "pip install triton"), ("flashinfer", "preamble[flashinfer]")]
)
def test_an_unavailable_requested_backend_is_an_error_with_a_remedy(name: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match="the device is cpu") as error:
        select_backend(name, CONFIG, CPU)
    assert remedy in str(error.value) and "attention_backend: auto" in str(error.value)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_each_missing_gpu_requirement_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG.with_fields(kv_channels=64, dtype="bfloat16")
    gpu = torch.device("cuda")
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))

    def fail_import(_: str) -> ModuleType:
        raise OSError("libcudart.so: no such file")

    monkeypatch.setattr("gpt.attention.selector.import_module", fail_import)
    monkeypatch.setattr(
        "gpt.attention.selector.triton_unavailable_reason", lambda _: "libcudart.so: no such file"
    )
    with pytest.raises(ConfigError, match=r"is unavailable: .*libcudart.so"):
        select_backend(name, config, gpu)
    capability[:] = [7, 5]
    with pytest.raises(ConfigError, match=f"compute capability is 7.5; {name} needs 8.0"):
        select_backend(name, config, gpu)
    capability[:] = [8, 0]
    with pytest.raises(ConfigError, match=r"an fp8 KV cache needs 8.9"):
        select_backend(name, config, gpu, kv_dtype="fp8")
    with pytest.raises(ConfigError, match="the model computes in float64"):
        select_backend(name, config, gpu, dtype="float64")
    with caplog.at_level("INFO"):
        assert select_backend("auto", config, gpu).name == "torch"
    assert "libcudart" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"attention_sinks": True}, "the model has attention sinks"),
        ({"position_embedding_type": "alibi"}, "the model has ALiBi"),
        (
            {"window_size": 9, "window_layers": (True, *[False] * (CONFIG.num_layers - 1))},
            "the model's layers have different windows",
        ),
    ],
)
def test_flashinfer_is_refused_for_layers_that_it_cannot_compute(
    fields: dict[str, Any], reason: str
) -> None:
    config = CONFIG.with_fields(kv_channels=64, dtype="bfloat16", **fields)
    with pytest.raises(ConfigError, match=reason):
        select_backend("flashinfer", config, torch.device("cuda"))


def test_fp8_kv_cache_is_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="needs a CUDA device; the device is cpu"):
        select_backend("auto", CONFIG, CPU, kv_dtype="fp8")


@pytest.mark.parametrize("setting", [{"attention_backend": "triton"}, {"kv_dtype": "fp8"}])
def test_a_server_refuses_an_unavailable_setting_before_loading(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the device is cpu"):
        ServableCheckpoint.from_config(ServerConfig("examples/demo/checkpoint", **setting))


@pytest.mark.parametrize("key", ["attention_backend", "kv_dtype"])
def test_an_unknown_backend_is_refused_by_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is 'int4'; choose one of: auto"):
        ServerConfig("m", **{key: "int4"})


@pytest.mark.parametrize("seed", range(40))
def test_fp8_attention_equals_the_reference_on_the_dequantized_pool(
    seed: int,
) -> None:
    attention_case = replace(AttentionCase.draw(seed, widths=(6, 16, 64)), fp8_kv=True)
    check_store_and_attend(attention_case, Fp8KVAttention, CPU)


def test_logits_with_an_fp8_pool_are_close_to_those_with_an_fp32_pool() -> None:
    fp8_logits = paged_logits(Fp8KVAttention(), FP8_DTYPE, CPU)
    fp32_logits = paged_logits(Fp8KVAttention(), torch.float32, CPU)
    # The error of a number with four significant bits is up to 1/16.
    assert 0 < (fp8_logits - fp32_logits).std() < 0.1 * fp32_logits.std()


def test_generate_runs_a_model_with_the_fp8_backend() -> None:
    torch_model = build(CONFIG, dtype=torch.float32)
    fp8_model = build(CONFIG, dtype=torch.float32, attention_backend=Fp8KVAttention())
    want, got = (
        generate(model, [[7, 3, 5], [64]], SamplingParams(4)) for model in (torch_model, fp8_model)
    )
    assert [completion.token_ids for completion in got] == [
        completion.token_ids for completion in want
    ]


def test_quantize_fp8_clamps_values_and_preserves_nan() -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), 449.0, 0.3, float("nan")])
    dequantized = quantize_fp8(x).view(FP8_DTYPE).float()
    assert dequantized[:5].tolist() == [448, -448, 448, 448, 0.3125]
    assert dequantized[5].isnan()


def test_keys_and_values_are_divided_by_their_scales_in_fp32() -> None:
    """As in the Triton kernel. A division in bf16 would round before the cast to fp8."""
    scales = torch.tensor([[0.3, 0.7]])
    k, v = (torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    k, v = k.bfloat16(), v.bfloat16()
    kv = torch.zeros(4, 2, 2, 16, 16, dtype=FP8_DTYPE)
    batch = Batch.paged([64], [0], torch.arange(4).view(1, 4), 16)
    Fp8KVAttention(scales).store(k, v, batch, kv)
    stored = kv.view(torch.uint8).permute(1, 0, 3, 2, 4).flatten(1, 2)
    assert torch.equal(stored[0], quantize_fp8(k.float() / 0.3))
    assert torch.equal(stored[1], quantize_fp8(v.float() / 0.7))


def test_fp8_blocks_are_written_copied_and_cleared() -> None:
    pool = KVPool(CONFIG, range(2), 4, block_tokens=16, dtype=FP8_DTYPE)
    shape = (20, 2, *pool.layer(0).shape[1:3], CONFIG.kv_channels)
    kv = torch.randn(shape) * 1000
    pool.write_tokens([2, 1], 0, kv)
    stored = pool.layer(1)[[2, 1]].view(torch.uint8).view(FP8_DTYPE).float()
    stored_tokens = stored.permute(0, 3, 1, 2, 4).flatten(0, 1)[:20]
    assert torch.equal(stored_tokens, quantize_fp8(kv[:, 1]).view(FP8_DTYPE).float())
    assert stored_tokens.abs().max() == 448
    pool.copy_blocks([2], [3])
    assert torch.equal(pool.layer(0)[3].float(), pool.layer(0)[2].float())
    pool.clear_blocks([2, 3])
    assert not pool.layer(0)[3].float().any() and pool.layer(0)[1].float().any()


def test_an_fp8_pool_has_one_byte_per_element() -> None:
    model = build(CONFIG, dtype=torch.float32)
    needed_bytes = []
    for kind in ("auto", "fp8"):
        config = ServerConfig("m", kv_dtype=kind, kv_tokens_max=(1 << 31) - 16)
        with pytest.raises(ConfigError, match="each rank needs") as error:
            available_kv_blocks(model, config.scheduler_config, config.cache_config)
        needed_bytes.append(int(str(error.value).split("needs ")[1].split()[0]))
    assert needed_bytes[0] == 4 * needed_bytes[1]
