"""Which attention is chosen; pools of eight bits in torch; FlashInfer, without FlashInfer."""

import sys
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from gpt.attention.flashinfer import FlashInferAttention
from gpt.attention.fp8_kv_cache import EightBits, narrowed
from gpt.attention.kv_cache import NARROW, KVPool
from gpt.attention.paged import ragged, reference
from gpt.attention.selector import choose
from gpt.batch import Batch
from gpt.errors import ConfigError
from gpt.generation.generate import generate
from gpt.sampling_params import Sampling
from serving.config import ServerConfig
from serving.service.service import Found
from serving.worker.model_runner import blocks_that_fit
from tests.support.attention_cases import Drawn, check, paged_logits
from tests.support.models import CONFIGS, build
from tests.support.paged_steps import case

CONFIG = next(iter(CONFIGS.values()))
CPU = torch.device("cpu")


def test_on_a_cpu_torch_attends_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        found = choose("auto", CONFIG, CPU)
    assert (found.name, found.attend) == ("torch", ragged)
    assert "backend=torch kv_dtype=auto reason='the device is cpu'" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("name", "help"), [("triton", "pip install triton"), ("flashinfer", "preamble[flashinfer]")]
)
def test_what_was_asked_for_and_cannot_be_is_an_error_that_says_what_to_do(
    name: str, help: str
) -> None:
    with pytest.raises(ConfigError, match="the device is cpu") as error:
        choose(name, CONFIG, CPU)
    assert help in str(error.value) and "attention_backend: auto" in str(error.value)


@pytest.mark.parametrize("name", ["triton", "flashinfer"])
def test_a_gpu_without_what_it_takes_is_told_by_its_reason(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = CONFIG.with_fields(kv_channels=64, dtype="bfloat16")
    there = torch.device("cuda")
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))

    def broken(_: str) -> ModuleType:
        raise OSError("libcudart.so: no such file")

    monkeypatch.setattr("gpt.attention.selector.import_module", broken)
    with pytest.raises(ConfigError, match=r"cannot be imported \(OSError: libcudart.so"):
        choose(name, config, there)
    capability[:] = [7, 5]
    with pytest.raises(ConfigError, match=r"compute capability is 7.5; it needs 8.0"):
        choose(name, config, there)
    capability[:] = [8, 0]
    with pytest.raises(ConfigError, match=r"numbers of eight bits need 8.9"):
        choose(name, config, there, kv_dtype="fp8")
    with pytest.raises(ConfigError, match="the model computes in float64"):
        choose(name, config, there, dtype="float64")
    with caplog.at_level("INFO"):
        assert choose("auto", config, there).name == "torch"
    assert "libcudart" in caplog.messages[-1]


def test_eight_bits_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="need a CUDA device; the device is cpu"):
        choose("auto", CONFIG, CPU, kv_dtype="fp8")


@pytest.mark.parametrize("setting", [{"attention_backend": "triton"}, {"kv_dtype": "fp8"}])
def test_a_server_refuses_before_anything_is_loaded(setting: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="the device is cpu"):
        Found.at(ServerConfig("examples/demo/checkpoint", **setting))  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["attention_backend", "kv_dtype"])
def test_an_unknown_word_is_refused_by_its_name(key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} is 'int4'; known are: auto"):
        ServerConfig("m", **{key: "int4"})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(40))
def test_a_pool_of_eight_bits_in_torch_equals_the_plain_attention_of_what_it_holds(
    seed: int,
) -> None:
    drawn = Drawn.by(seed, widths=(6, 16, 64))
    drawn = Drawn(**{**vars(drawn), "eight_bits": True})
    check(drawn, EightBits, CPU)


def test_a_model_over_a_pool_of_eight_bits_says_nearly_what_it_says_over_a_wide_one() -> None:
    near, far = (paged_logits(EightBits(), kind, CPU) for kind in (NARROW, torch.float32))
    # A number of four significant bits is off by up to 1/16.
    assert 0 < (near - far).std() < 0.1 * far.std()


def test_the_plain_loop_takes_a_model_whose_server_has_a_pool_of_eight_bits() -> None:
    attention = EightBits()
    plain = build(CONFIG, dtype=torch.float32)
    model = build(CONFIG, dtype=torch.float32, attend=attention.attend, store=attention.store)
    want, got = (generate(one, [[7, 3, 5], [64]], Sampling(4)) for one in (plain, model))
    assert [one.token_ids for one in got] == [one.token_ids for one in want]


def test_what_is_too_large_is_the_largest_and_what_is_no_number_is_seen() -> None:
    x = torch.tensor([1e9, -1e9, float("inf"), 449.0, 0.3, float("nan")])
    wide = narrowed(x).view(NARROW).float()
    assert wide[:5].tolist() == [448, -448, 448, 448, 0.3125]
    assert wide[5].isnan()


def test_a_pool_of_eight_bits_is_filled_copied_and_cleared() -> None:
    pool = KVPool(CONFIG, range(2), 4, block_tokens=16, dtype=NARROW)
    shape = (20, 2, *pool.layer(0).shape[1:3], CONFIG.kv_channels)
    values = torch.randn(shape) * 1000
    pool.fill([2, 1], 0, values)
    held = pool.layer(1)[[2, 1]].view(torch.uint8).view(NARROW).float()
    got = held.permute(0, 3, 1, 2, 4).flatten(0, 1)[:20]
    assert torch.equal(got, narrowed(values[:, 1]).view(NARROW).float())
    assert got.abs().max() == 448
    pool.copy([2], [3])
    assert torch.equal(pool.layer(0)[3].float(), pool.layer(0)[2].float())
    pool.clear([2, 3])
    assert not pool.layer(0)[3].float().any() and pool.layer(0)[1].float().any()


def test_a_pool_of_eight_bits_takes_a_byte_for_each_number() -> None:
    model, said = build(CONFIG, dtype=torch.float32), []
    for kind in ("auto", "fp8"):
        with pytest.raises(ConfigError, match="each rank needs") as error:
            blocks_that_fit(model, ServerConfig("m", kv_dtype=kind, kv_tokens_max=1 << 40))
        said.append(int(str(error.value).split("needs ")[1].split()[0]))
    assert said[0] == 4 * said[1]


# ------------------------------------------------------------------------------------- FlashInfer


class Wrapper:
    """As FlashInfer's, over what a plan says, by the plain attention."""

    made: ClassVar[list["Wrapper"]] = []

    def __init__(self, room: Tensor, **options: Any) -> None:
        assert room.dtype == torch.uint8 and not room.any()
        self.options, self.plans = options, list[dict[str, Any]]()
        self.made.append(self)

    def _plan(self, begins: Tensor | None, kv: tuple[Tensor, ...], **rest: Any) -> None:
        indptr, indices, last = kv
        assert {x.dtype for x in kv} == {torch.int32}
        counts = indptr.diff()
        size = rest["page_size"]
        contexts = ((counts - 1) * size + last).tolist()
        lengths = [1] * len(contexts) if begins is None else begins.diff().tolist()
        tables = torch.zeros(len(counts), int(counts.max()), dtype=torch.long)
        for row, part in enumerate(indices.split(counts.tolist())):
            tables[row, : len(part)] = part
        past = [c - n for c, n in zip(contexts, lengths, strict=True)]
        self._batch = Batch.paged(lengths, past, tables, size)
        self.plans.append(rest)

    def run(self, q: Tensor, kv: Tensor, *, k_scale: float = 1, v_scale: float = 1) -> Tensor:
        window = self.plans[-1]["window_left"] + 1 or None
        wide = kv.float()
        wide = torch.stack([wide[:, 0] * k_scale, wide[:, 1] * v_scale], dim=1)
        y = reference(q.float(), q.float(), q.float(), self._batch, wide, window)
        return y.to(q.dtype)


class Decode(Wrapper):
    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, *shape: int, **options: Any
    ) -> None:
        names = ("num_qo_heads", "num_kv_heads", "head_dim", "page_size")
        self._plan(None, (indptr, indices, last), **dict(zip(names, shape, strict=True)), **options)


class Prefill(Wrapper):
    def plan(self, begins: Tensor, indptr: Tensor, *rest: Any, **options: Any) -> None:
        indices, last, *shape = rest
        assert options.pop("causal")
        names = ("num_qo_heads", "num_kv_heads", "head_dim_qk", "page_size")
        named = dict(zip(names, shape, strict=True))
        self._plan(begins, (indptr, indices, last), **named, **options)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr("gpt.attention.flashinfer.WORKSPACE_BYTES", 1 << 10)
    Wrapper.made.clear()
    return Wrapper


@pytest.mark.parametrize("seed", range(40))
def test_flashinfer_is_told_what_the_plain_attention_reads(
    seed: int, flashinfer: type[Wrapper]
) -> None:
    drawn = Drawn.by(seed, widths=(16, 64))
    drawn = Drawn(**{**vars(drawn), "dtype": torch.bfloat16})
    queries = drawn.heads[1]
    check(drawn, lambda scales: FlashInferAttention(CPU, queries=queries, scales=scales), CPU)
    decode = next(one for one in flashinfer.made if isinstance(one, Decode))
    assert decode.options == {"kv_layout": "HND", "use_tensor_cores": queries >= 4}


def test_flashinfer_plans_once_for_all_layers_and_again_for_another_step(
    flashinfer: type[Wrapper],
) -> None:
    one, other = (case([1, 5], [past, 20], (2, 2, 64), 16, torch.bfloat16) for past in (40, 3))
    attention = FlashInferAttention(CPU, queries=2)
    for turn in (one, one, other, one):
        got = attention.attend(turn.q, turn.k, turn.v, turn.batch, turn.kv, None)
        want = ragged(turn.q, turn.k, turn.v, turn.batch, turn.kv, None)
        assert torch.allclose(got, want, atol=0.05)
    assert [len(wrapper.plans) for wrapper in flashinfer.made] == [3, 3]
    plan = flashinfer.made[0].plans[0]
    assert plan["q_data_type"] == plan["kv_data_type"] == torch.bfloat16
    assert (plan["head_dim"], plan["sm_scale"], plan["window_left"]) == (64, 0.125, -1)
