"""Agreement of the tensor ranks: each rank learns whether a phase has failed on any of them.

The ranks exchange texts through torch's key-value store, not by a collective. A collective has no
deadline of its own, and after a failed CUDA graph capture the communicator of a rank may be
unusable. Every tensor rank must call `gather_failures` the same number of times.
"""

from datetime import timedelta

import torch.distributed as dist

from gpt.parallel.mesh import Mesh

# Before the text of a rank: whether it has failed. A value of the store must not be empty.
_SUCCESS, _FAILURE = "+", "-"
# The result of an agreement, which the first rank that knows it writes: the last rank to arrive, or
# a rank whose time limit has passed.
_COMPLETE, _ABANDONED = b"complete", b"abandoned"


class AgreementTimeoutError(RuntimeError):
    """A tensor rank did not reach the agreement in time, so the ranks cannot go on together."""


def gather_failures(mesh: Mesh, failure: str | None, timeout_s: float) -> dict[int, str]:
    """Return the failures of all tensor ranks by tensor rank; empty if all have succeeded.

    `failure`: why this rank has failed; None if it has not. Raise AgreementTimeoutError if a rank
    does not call this within `timeout_s` of this rank's call.
    """
    if mesh.tp == 1:
        return {} if failure is None else {0: failure}
    assert mesh.tp_group is not None
    store = dist.distributed_c10d._get_default_store()
    prefix = f"preamble/agreement/{mesh.tp_group.group_name}"
    # Each rank counts its calls in the store, so the calls of all objects have different keys.
    number = store.add(f"{prefix}/calls/{mesh.tp_rank}", 1)
    keys = [f"{prefix}/{number}/{rank}" for rank in range(mesh.tp)]
    arrivals_key, result_key = f"{prefix}/{number}/arrivals", f"{prefix}/{number}/result"
    store.set(keys[mesh.tp_rank], _SUCCESS if failure is None else _FAILURE + failure)
    if store.add(arrivals_key, 1) == mesh.tp:
        result = store.compare_set(result_key, "", _COMPLETE.decode())
    else:
        try:
            store.wait([result_key], timedelta(seconds=timeout_s))
            result = store.get(result_key)
        except RuntimeError:  # The time limit; without the store, the next call raises again.
            result = store.compare_set(result_key, "", _ABANDONED.decode())
    if result != _COMPLETE:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        late = f"tensor ranks {missing} did not reach" if missing else "a tensor rank was late for"
        raise AgreementTimeoutError(f"{late} an agreement within {timeout_s:g} s")
    texts = [store.get(key).decode() for key in keys]
    return {
        rank: text.removeprefix(_FAILURE)
        for rank, text in enumerate(texts)
        if text.startswith(_FAILURE)
    }
