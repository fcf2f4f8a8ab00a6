"""Names of the parts of fused linears that an adapter can change separately.

The rows of a part are in the order of the heads or channels. The module does not import torch.
"""

QKV_PARTS = ("query", "key", "value")
GATED_PARTS = ("gate", "up")
LINEAR_PARTS = {"linear_qkv": QKV_PARTS, "linear_fc1": GATED_PARTS}
