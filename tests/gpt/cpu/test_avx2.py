"""A machine with AVX2 and without bf16 instructions uses the same library for GEMM and decode.

These tests limit the library to AVX2, so a machine with more instructions can run them too.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gpt.cpu import kernels, packed_linear
from gpt.cpu_inference.weight_packing import is_batch_invariant
from tests.support.packed_adapter_cases import (
    check_adapted_gemm,
    check_adapted_rows_are_independent,
)
from tests.support.packed_linear_cases import (
    check_fused_norm,
    check_independent_rows,
    check_matmul_argmax,
    check_packed_gemm,
)
from tests.support.packed_models import (
    DECODER_CONFIGS,
    STEPS,
    check_adapted_decoder,
    check_fused_decoder,
    packed_model,
    run_step,
)


@pytest.fixture(autouse=True)
def avx2_only() -> Iterator[None]:
    kernels.force_isa_level("avx2")
    if kernels.isa_level() != "avx2":
        kernels.force_isa_level(None)
        pytest.skip("this machine has no AVX2, or the library was not built")
    yield
    kernels.force_isa_level(None)


def test_gemm_equals_the_reference() -> None:
    check_packed_gemm()


@pytest.mark.parametrize("channels", [768, 4096])
def test_gemm_rows_are_independent(channels: int) -> None:
    check_independent_rows(channels)


def test_adapted_gemm_equals_the_reference() -> None:
    check_adapted_gemm()


def test_adapted_rows_are_independent() -> None:
    check_adapted_rows_are_independent(int8=False, has_norm=True)


def test_matmul_argmax_is_the_first_of_ties() -> None:
    check_matmul_argmax()


def test_fused_norm_equals_torch() -> None:
    check_fused_norm()


@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("name", DECODER_CONFIGS)
def test_fused_decode_equals_the_modules(name: str, kind: str) -> None:
    check_fused_decoder(name, kind)


@pytest.mark.parametrize("kind", ["one", "several"])
def test_fused_decode_with_adapters_equals_the_modules(kind: str) -> None:
    check_adapted_decoder("modern", kind)
    check_adapted_decoder("ALiBi", kind)


@pytest.mark.parametrize("name", DECODER_CONFIGS)
def test_prefill_uses_the_modules(name: str) -> None:
    model = packed_model(DECODER_CONFIGS[name])
    assert not is_batch_invariant(model)
    got, pool = run_step(model, *STEPS["all kinds"], fused=True)
    want, other_pool = run_step(model, *STEPS["all kinds"], fused=False)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(pool, other_pool, strict=True))


@pytest.mark.parametrize(("kind", "packs"), [("avx2", True), ("plain", False)])
def test_a_bf16_model_runs_where_torch_has_no_bf16_matmul(kind: str, packs: bool) -> None:
    program = (
        "import torch; from gpt.cpu import kernels; from gpt.generation.generate import generate; "
        "from gpt.cpu_inference.fused_decoder import FusedDecoder; "
        "from gpt.cpu_inference.weight_packing import pack_weights; "
        "from gpt.sampling_params import SamplingParams; "
        "from tests.support.models import CLASSIC, build; "
        f"kernels.force_isa_level({kind!r}); model = build(CLASSIC, dtype=torch.bfloat16); "
        "assert not torch.ops.mkldnn._is_mkldnn_bf16_supported(); pack_weights(model); "
        f"assert isinstance(model.decoder_backend, FusedDecoder) == {packs}; "
        "completions = generate(model, [[5, 6, 7]], SamplingParams(max_new_tokens=4)); "
        "assert len(completions[0].token_ids) == 4"
    )
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=600)


def test_a_machine_without_avx2_uses_torch() -> None:
    kernels.force_isa_level("plain")
    assert not packed_linear.supports_weight(torch.zeros(32, 32).bfloat16())
