"""The FlashInfer attention backend, with a stand-in that has the real wrappers' signatures."""

import sys
from dataclasses import replace
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gpt.attention.flashinfer import FlashInferAttention
from gpt.attention.kv_cache import FP8_DTYPE
from gpt.attention.options import AttentionOptions
from gpt.attention.paged import ragged_attention, reference_attention
from gpt.attention.selector import select_backend
from gpt.batch import Batch
from gpt.errors import ConfigError
from tests.support.attention_cases import AttentionCase, check_store_and_attend
from tests.support.models import CONFIGS
from tests.support.paged_steps import case
from tests.support.wheel_signatures import bind_call

CPU = torch.device("cpu")


class Wrapper:
    """Stand-in for FlashInfer's wrappers: the reference attention with the planned arguments.

    Each call is bound to the signatures that the wheels of FlashInfer have.
    """

    instances: ClassVar[list["Wrapper"]] = []
    real_class: ClassVar[str]
    table_names: ClassVar[tuple[str, str, str]]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.options = self._bind("__init__", *args, **kwargs)
        workspace = self.options.pop("float_workspace_buffer")
        assert workspace.dtype == torch.uint8 and not workspace.any()
        self.plans: list[dict[str, Any]] = []
        self.instances.append(self)

    def _bind(self, method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
        call = bind_call("flashinfer-python", f"{self.real_class}.{method}", self, *args, **kwargs)
        del call["self"]
        return call

    def plan(self, *args: Any, **kwargs: Any) -> None:
        call = self._bind("plan", *args, **kwargs)
        query_starts = call.get("qo_indptr")
        page_table = [call[name] for name in self.table_names]
        assert {x.dtype for x in page_table} == {torch.int32}
        assert query_starts is None or call["causal"]
        indptr, indices, last_page_lengths = page_table
        counts = indptr.diff()
        size = call["page_size"]
        contexts = ((counts - 1) * size + last_page_lengths).tolist()
        lengths = [1] * len(contexts) if query_starts is None else query_starts.diff().tolist()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.long)
        for row, pages in enumerate(indices.split(counts.tolist())):
            tables[row, : len(pages)] = pages
        past = [c - n for c, n in zip(contexts, lengths, strict=True)]
        self._batch = Batch.paged(lengths, past, tables, size)
        self.plans.append(call)

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        call = self._bind("run", *args, **kwargs)
        q, kv = call["q"], call["paged_kv_cache"]
        window = self.plans[-1]["window_left"] + 1 or None
        keys = kv[:, 0].float() * call.get("k_scale", 1)
        values = kv[:, 1].float() * call.get("v_scale", 1)
        scaled_kv = torch.stack([keys, values], dim=1)
        y = reference_attention(
            q.float(), q.float(), q.float(), self._batch, scaled_kv, AttentionOptions(window)
        )
        return y.to(q.dtype)


class Decode(Wrapper):
    real_class = "BatchDecodeWithPagedKVCacheWrapper"
    table_names = ("indptr", "indices", "last_page_len")


class Prefill(Wrapper):
    real_class = "BatchPrefillWithPagedKVCacheWrapper"
    table_names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("gpt.attention.flashinfer.WORKSPACE_BYTES", 1 << 10)
    Wrapper.instances.clear()
    return Wrapper


@pytest.mark.parametrize("seed", range(40))
def test_flashinfer_plans_read_the_same_tokens_as_the_reference(
    seed: int, flashinfer: type[Wrapper]
) -> None:
    attention_case = replace(
        AttentionCase.draw(seed, widths=(16, 64)), dtype=torch.bfloat16, sinks=False, alibi=False
    )
    queries = attention_case.heads[1]
    check_store_and_attend(
        attention_case,
        lambda scales: FlashInferAttention(CPU, queries_per_kv_head=queries, scales=scales),
        CPU,
    )
    decode = next(wrapper for wrapper in flashinfer.instances if isinstance(wrapper, Decode))
    assert decode.options == {"kv_layout": "HND", "use_tensor_cores": queries >= 4}


def test_flashinfer_plans_once_per_step_for_all_layers_and_wrappers_take_turns(
    flashinfer: type[Wrapper],
) -> None:
    first, second = (case([1, 5], [past, 20], (2, 2, 64), 16, torch.bfloat16) for past in (40, 3))
    attention = FlashInferAttention(CPU, queries_per_kv_head=2)
    for step in (first, first, second, first):
        got = attention.attend(step.q, step.k, step.v, step.batch, step.kv, AttentionOptions())
        want = ragged_attention(step.q, step.k, step.v, step.batch, step.kv, AttentionOptions())
        assert torch.allclose(got, want, atol=0.05)
    # Two decode wrappers and two prefill wrappers; three steps were planned.
    assert [len(wrapper.plans) for wrapper in flashinfer.instances] == [2, 1, 2, 1]
    plan = flashinfer.instances[0].plans[0]
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.bfloat16
    assert (plan["head_dim"], plan["sm_scale"], plan["window_left"]) == (64, 0.125, -1)


def test_a_plan_waits_for_the_copy_of_the_previous_plan_of_its_wrapper(
    flashinfer: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """plan() overwrites the pinned host buffer that its previous call has queued to be copied."""
    recorded: list[int] = []
    waits: list[tuple[int, int]] = []

    def record_event(_: torch.device) -> Any:
        recorded.append(len(recorded))
        return lambda copy=recorded[-1]: waits.append((copy, len(recorded)))

    monkeypatch.setattr("gpt.attention.flashinfer.record_event", record_event)
    attention = FlashInferAttention(CPU, queries_per_kv_head=2)
    for past in range(4):
        step = case([1], [past], (2, 2, 64), 16, torch.bfloat16)
        attention.attend(step.q, step.k, step.v, step.batch, step.kv, AttentionOptions())
    # Plan 2 waits for copy 0, plan 3 for copy 1, each before it is queued.
    assert waits == [(0, 2), (1, 3)]


@pytest.mark.parametrize("fp8_kv", [False, True])
def test_flashinfer_kernels_are_compiled_when_the_backend_is_selected(
    fp8_kv: bool, flashinfer: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first plan() compiles the kernels, so each kind is planned and run before serving."""
    config = next(iter(CONFIGS.values())).with_fields(
        kv_channels=64, dtype="bfloat16", window_size=9
    )
    monkeypatch.setattr("gpt.attention.selector._unsupported_reason", lambda *_: None)
    monkeypatch.setattr("gpt.attention.selector.check_backend", lambda *_, **__: None)
    kv_dtype = "fp8" if fp8_kv else "auto"
    select_backend("flashinfer", config, CPU, kv_dtype=kv_dtype)
    plans = [plan for wrapper in flashinfer.instances for plan in wrapper.plans]
    assert len(plans) == 2, "decode and prefill"
    for plan in plans:
        assert plan["q_data_type"] == torch.bfloat16
        assert plan["kv_data_type"] == (FP8_DTYPE if fp8_kv else torch.bfloat16)
        assert plan.get("head_dim", plan.get("head_dim_qk")) == 64
        assert plan["window_left"] == 8

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Could not find nvcc\nand a stack")

    monkeypatch.setattr(Wrapper, "plan", fail)
    with pytest.raises(ConfigError, match=r"RuntimeError: Could not find nvcc\).*jit-cache"):
        select_backend("flashinfer", config, CPU, kv_dtype=kv_dtype)
