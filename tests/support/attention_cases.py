"""Random steps of attention over a pool, in which a backend must say what the plain twin says.

As a program it draws cases for Triton's interpreter, which must be asked for before Triton is
loaded: TRITON_INTERPRET=1 python -m tests.support.attention_cases FIRST COUNT
"""

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from gpt.attention.fp8_kv_cache import EightBits, narrowed
from gpt.attention.kv_cache import NARROW, KVPool
from gpt.attention.paged import KV, ragged, reference, store
from gpt.batch import Batch
from gpt.parallel.mesh import Mesh
from tests.support.models import CLASSIC, build
from tests.support.paged_steps import case

# Beside fp64, of the largest value: sums in fp32; in bf16 each probability and what comes out are
# rounded, by 2^-9 and more at most.
FAR_MAX = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
SCALES = [[1.0, 1.0], [0.5, 2.0]]


class Backend(Protocol):
    def store(self, k: Tensor, v: Tensor, batch: Batch, kv: KV) -> None: ...

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, kv: KV | None, window: int | None
    ) -> Tensor: ...


Make = Callable[[Tensor | None], Backend]


@dataclass(frozen=True)
class Drawn:
    sizes: tuple[tuple[int, int], ...]  # New tokens and past ones.
    heads: tuple[int, int, int]
    size: int
    window: int | None
    dtype: torch.dtype
    eight_bits: bool = False
    scaled: bool = False

    @classmethod
    def by(cls, seed: int, widths: tuple[int, ...] = (6, 16, 64, 80, 128, 256)) -> "Drawn":
        draw = random.Random(seed)
        news = draw.choice([(1,), (1, 1, 2, 3), (1, 5, 20, 70)])
        pasts = (0, 1, 15, 16, 40, 100, 300)
        return cls(
            tuple((draw.choice(news), draw.choice(pasts)) for _ in range(draw.randint(1, 4))),
            (draw.choice([1, 2, 3]), draw.choice([1, 1, 2, 4, 5, 9]), draw.choice(widths)),
            draw.choice([16, 32, 128]),
            draw.choice([None, None, 1, 5, 40, 64]),
            draw.choice([torch.float32, torch.bfloat16]),
            eight_bits=draw.random() < 0.4,
            scaled=draw.random() < 0.3,
        )


def check(drawn: Drawn, make: Make, device: torch.device) -> None:
    """What is stored equals the twin's to the bit, and what is seen of it is near fp64's."""
    lengths, past = ([one[part] for one in drawn.sizes] for part in (0, 1))
    one = case(lengths, past, drawn.heads, drawn.size, drawn.dtype)
    assert one.batch.tables is not None
    batch = Batch.paged(lengths, past, one.batch.tables.to(device), drawn.size)
    q, k, v, kv = (x.to(device) for x in (one.q, one.k, one.v, one.kv))
    if drawn.eight_bits:
        k = k * 300  # Some are too large for so few bits.
        q = q / 300
        kv = narrowed(kv).view(NARROW)
    scales = torch.tensor(SCALES, device=device) if drawn.scaled and drawn.eight_bits else None
    # The second layer of two, so that the scales are its own.
    pools = [torch.stack([kv.view(torch.uint8)] * 2).view(kv.dtype)[1] for _ in range(2)]
    backend = make(scales)
    (EightBits(scales).store if drawn.eight_bits else store)(k, v, batch, pools[0])
    backend.store(k, v, batch, pools[1])
    assert torch.equal(*(pool.view(torch.uint8) for pool in pools)), "stored otherwise"
    wide = pools[0].double()
    if scales is not None:
        wide = wide * scales[1].double().view(1, 2, 1, 1, 1)
    want = reference(q.double(), k.double(), v.double(), batch, wide, drawn.window)
    got = backend.attend(q, k, v, batch, pools[1], drawn.window)
    assert got.dtype == q.dtype and got.shape == q.shape
    far = (got.double() - want).abs().max() / wide[:, 1].abs().max()
    assert far < FAR_MAX[drawn.dtype], f"{float(far)} of the largest value away"


def check_ends(make: Make, device: torch.device) -> None:
    """Contexts that only the device knows give what known ones do, in longer tables too."""
    for heads in ((2, 1, 64), (2, 4, 64)):
        one = case([1] * 3, [0, 40, 130], heads, 16, torch.float32)
        assert one.batch.tables is not None
        backend, tables = make(None), one.batch.tables.to(device)
        known = Batch.paged([1] * 3, [0, 40, 130], tables, 16)
        q, k, v, kv = (x.to(device) for x in (one.q, one.k, one.v, one.kv))
        want = backend.attend(q, k, v, known, kv, None)
        ends = torch.tensor(known.contexts, dtype=torch.int32, device=device)
        longer = torch.nn.functional.pad(tables.int(), (0, 7))
        recorded = Batch((1,) * 3, (255,) * 3, known.positions, known.slots, longer, ends=ends)
        assert torch.equal(backend.attend(q, k, v, recorded, kv, None), want)


def check_prepared(make: Make, device: torch.device) -> None:
    """All forms run, over a pool of which they read nothing."""
    for heads in ((2, 1, 16), (2, 3, 16)):
        one = case([1], [3], heads, 16, torch.float32)
        prepared: Any = make(None)
        kv = torch.full_like(one.kv, float("nan")).to(device)
        prepared.prepare(one.q.to(device), kv, None)


def check_faults(make: Make, device: torch.device) -> None:
    """What is not finite stays with its sequence, and what lies behind the end is not read."""
    for news in (1, 3):
        one = case([news] * 3, [40] * 3, (2, 1, 64), 32, torch.float32)
        assert one.batch.tables is not None
        tables = one.batch.tables.to(device)
        batch = Batch.paged([news] * 3, [40] * 3, tables, 32)
        backend = make(None)
        q, k, v, kv = (x.to(device) for x in (one.q, one.k, one.v, one.kv))
        want = backend.attend(q, k, v, batch, kv, None)
        kv[tables[0, 1], :, :, 8 + news :] = float("nan")
        kv[tables[1, 0], 0, 1, 3] = float("nan")
        kv[tables[2, 0], 1, 0, 3] = float("inf")
        got = backend.attend(q, k, v, batch, kv, None)
        assert torch.equal(got[:news], want[:news])
        finite = got.isfinite().all(-1)[news:].view(2, news, 2)
        assert finite[0].tolist() == [[True, False]] * news
        assert finite[1].tolist() == [[False, True]] * news


def check_skipped(make: Make, device: torch.device) -> None:
    """A row without a slot is written nowhere."""
    one = case([1] * 3, [5, 6, 7], (2, 1, 16), 16, torch.float32)
    assert one.batch.slots is not None
    k, v, kv = (x.to(device) for x in (one.k, one.v, one.kv))
    block, place = (x.to(device) for x in one.batch.slots)
    block[1] = -1
    batch = Batch((1,) * 3, (5, 6, 7), one.batch.positions.to(device), (block, place))
    want = kv.clone()
    for row in (0, 2):
        want[block[row], 0, :, place[row]], want[block[row], 1, :, place[row]] = k[row], v[row]
    make(None).store(k, v, batch, kv)
    assert torch.equal(kv, want)


def paged_logits(backend: Backend, kind: torch.dtype, device: torch.device) -> Tensor:
    """Of a small model, for a prompt that comes in two pieces, over a pool of such numbers."""
    narrow = kind == NARROW
    model = build(
        CLASSIC,
        Mesh.single(device),
        dtype=torch.float32,
        attend=backend.attend if narrow else ragged,
        store=backend.store if narrow else store,
    )
    pool = KVPool(CLASSIC, model.layers, 4, block_tokens=16, dtype=kind, device=device)
    ids, tables = torch.arange(40, device=device), torch.tensor([[3, 1, 2]], device=device)
    with torch.inference_mode():
        pieces = [
            model(ids[start:end], Batch.paged([end - start], [start], tables, 16), pool)
            for start, end in ((0, 20), (20, 40))
        ]
    return torch.cat(pieces).cpu()


def mend_interpreter() -> None:
    """What Triton's interpreter does otherwise than a GPU.

    A loop's end it takes for a number although it is an array of one, which NumPy has stopped to
    do; it rounds to eight bits wrongly: small numbers, and those that round up to a power of 2; and
    it multiplies matrices of bf16 as the whole numbers that it keeps them as.
    """
    interpreter: Any = import_module("triton.runtime.interpreter")
    language: Any = import_module("triton.language")
    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    multiply = interpreter.InterpreterBuilder.create_dot
    narrow, wide, bf16 = language.float8e4nv, language.float32, language.bfloat16

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def converted(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == narrow:
            numbers = torch.from_numpy(x.view("uint8")).view(NARROW).float().numpy()
            return numbers if target == wide else convert(numbers, wide, target, rounding)
        if target == narrow:
            numbers = x if source == wide else convert(x, source, wide, rounding).view("float32")
            return torch.from_numpy(numbers).to(NARROW).view(torch.uint8).numpy()
        return convert(x, source, target, rounding)

    def multiplied(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        same = interpreter.TensorHandle
        a, b = (
            same(convert(x.data, x.dtype, wide, None).view("float32"), wide)
            if x.dtype == bf16
            else x
            for x in (a, b)
        )
        return multiply(self, a, b, *rest)

    interpreter._patch_lang_tensor, interpreter._convert_float = patched, converted
    interpreter.InterpreterBuilder.create_dot = multiplied


def main(first: int, count: int) -> None:
    from gpt.attention import triton_paged

    ours = triton_paged.TritonAttention
    torch.set_num_threads(1)
    mend_interpreter()
    device = torch.device("cpu")
    for seed in range(first, first + count):
        drawn = Drawn.by(seed)
        try:
            check(drawn, ours, device)
        except Exception:
            print(f"case {seed}: {drawn}")
            raise
    for checked in (check_ends, check_faults, check_skipped):
        checked(ours, device)
    triton_paged.PROGRAMS_MIN = 8  # An interpreted one takes its time.
    check_prepared(ours, device)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
