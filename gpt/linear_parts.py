"""Names of linears, and of the parts of fused linears that an adapter can change separately.

The rows of a part are in the order of the heads or channels. The module does not import torch.
"""

QKV_PARTS = ("query", "key", "value")
GATED_PARTS = ("gate", "up")
# In the name of an expert's linear, between the MoE layer and the number of the expert.
LOCAL_EXPERTS = ".experts.local_experts."
LINEAR_PARTS = {"linear_qkv": QKV_PARTS, "linear_fc1": GATED_PARTS}


def split_key(key: str) -> tuple[str, str]:
    """Split the key of a linear or of a part; the part is "" for the key of a whole linear."""
    linear, _, last = key.rpartition(".")
    module = linear.rpartition(".")[2]
    return (linear, last) if last in LINEAR_PARTS.get(module, ()) else (key, "")


def join_key(linear: str, part: str) -> str:
    """Return the key of a part, or of the whole linear if `part` is ""."""
    return f"{linear}.{part}" if part else linear
