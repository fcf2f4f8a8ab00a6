"""A machine that has AVX2 and nothing for bf16 multiplies and decodes by the same library.

What is asked of products is asked in tests/gpt/cpu/test_packed_linear.py of machines that have
more, and here of this kind, which such machines can be as well.
"""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gpt.backends.cpu_packing import batch_invariant
from gpt.cpu import kernels, packed_linear
from tests.gpt.backends import test_cpu_decoder
from tests.gpt.cpu import test_packed_linear
from tests.support.cpu_decoder_steps import MORE, STEPS, packed, step
from tests.support.models import CONFIGS


@pytest.fixture(autouse=True)
def less() -> Iterator[None]:
    kernels.choose_machine("avx2")
    if kernels.machine() != "avx2":
        kernels.choose_machine(None)
        pytest.skip("this machine has no AVX2, or the library was not built")
    yield
    kernels.choose_machine(None)


def test_products_are_the_plain_ones() -> None:
    test_packed_linear.test_products_with_panels_are_the_plain_ones()


@pytest.mark.parametrize("channels", [768, 4096])
def test_many_rows_are_multiplied_as_each_is_alone(channels: int) -> None:
    test_packed_linear.test_many_rows_are_multiplied_as_each_is_alone(channels)


def test_the_best_without_logits_is_the_first_of_the_largest() -> None:
    test_packed_linear.test_the_best_without_logits_is_the_first_of_the_largest()


def test_rows_are_normed_as_torch_norms_them() -> None:
    test_packed_linear.test_rows_are_normed_as_torch_norms_them()


@pytest.mark.parametrize("kind", ["one", "several"])
@pytest.mark.parametrize("name", [*CONFIGS, *MORE])
def test_single_tokens_walk_as_the_modules_go(name: str, kind: str) -> None:
    test_cpu_decoder.test_it_walks_as_the_modules_go(name, kind)


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_go_through_the_modules(name: str) -> None:
    model = packed(CONFIGS[name])
    assert model.walk is not None and not batch_invariant(model)
    got, pool = step(model, *STEPS["all kinds"], walks=True)
    want, same = step(model, *STEPS["all kinds"], walks=False)
    assert torch.equal(got, want)
    assert all(torch.equal(a, b) for a, b in zip(pool, same, strict=True))


@pytest.mark.parametrize(("kind", "packs"), [("avx2", True), ("plain", False)])
def test_a_model_of_bf16_answers_where_torch_itself_has_no_products_for_it(
    kind: str, packs: bool
) -> None:
    work = (
        "import torch; from gpt.cpu import kernels; from gpt.generation.generate import generate; "
        "from gpt.backends.cpu_packing import pack; from gpt.sampling_params import Sampling; "
        "from tests.support.models import CLASSIC, build; "
        f"kernels.choose_machine({kind!r}); model = build(CLASSIC, dtype=torch.bfloat16); "
        "assert not torch.ops.mkldnn._is_mkldnn_bf16_supported(); pack(model); "
        f"assert (model.walk is not None) == {packs}; "
        "made = generate(model, [[5, 6, 7]], Sampling(max_new_tokens=4)); "
        "assert len(made[0].token_ids) == 4"
    )
    less = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    subprocess.run([sys.executable, "-c", work], env=less, check=True, timeout=120)


def test_a_plain_machine_leaves_products_to_torch() -> None:
    kernels.choose_machine("plain")
    assert not packed_linear.multiplies(torch.zeros(32, 32).bfloat16())
