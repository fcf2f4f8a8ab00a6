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
    store.set(keys[mesh.tp_rank], _SUCCESS if failure is None else _FAILURE + failure)
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise AgreementTimeoutError(
            f"tensor ranks {missing} did not reach an agreement within {timeout_s:g} s"
        ) from error
    texts = [store.get(key).decode() for key in keys]
    return {
        rank: text.removeprefix(_FAILURE)
        for rank, text in enumerate(texts)
        if text.startswith(_FAILURE)
    }
