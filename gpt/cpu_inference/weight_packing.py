"""CPU weight packing: loaded weights in the C library's panels (bf16, int8) or oneDNN's layout.

Packed weights make CPU inference faster. The C library packs the weights into panels (groups of
adjacent output columns); oneDNN packs them if the library does not support them. Of an fp32 model,
the library packs the experts, and oneDNN the other weights. A matmul with a packed weight applies
bias, activation and residual while the product is in registers. `pack_weights` replaces the weights
of a loaded model one at a time, so at most one weight is in memory twice. The exception is a tied
embedding, which stays in memory unpacked for lookups, in addition to the packed LM head.
"""

import logging
from typing import cast

import torch
from torch import Tensor

from gpt.cpu import int8_linear, packed_linear
from gpt.cpu.exact_argmax import CpuGreedyHead, ScreenedArgmax
from gpt.cpu.huge_pages import huge_page_zeros
from gpt.cpu.int8_linear import Int8PackedLinear
from gpt.cpu.kernels import has_prefill_attention
from gpt.cpu.packed_linear import CpuNorm, Fp32PackedLinear, PackedLinear
from gpt.cpu_inference.fused_decoder import FusedDecoder
from gpt.linear import cpu_experts
from gpt.linear.cpu_experts import CpuExperts
from gpt.linear.cpu_linear import CpuLinear, OneDnnLinear, make_input_norm, make_norm
from gpt.linear.quantization_check import Divergence, DivergenceProbe, enforce_limit
from gpt.model.activation import gate_limits, packed_activation_name
from gpt.model.gpt_model import GPT
from gpt.model.linear import Linear, LinearBackend
from gpt.model.mlp import MLP
from gpt.model.moe import MoELayer
from gpt.model.norm import Norm

log = logging.getLogger(__name__)

# The model's dtypes for which packed weights are faster, according to measurements.
PACKED_DTYPES = (torch.bfloat16, torch.float32)


def pack_weights(model: GPT, *, int8: bool = False) -> None:
    """Pack the weights of a loaded model, for inference only.

    If packing is unsupported, the model is unchanged and the reason is logged. `int8` quantizes the
    weights, without the quantization check of `pack_int8_weights`; if int8 weights are unsupported,
    ConfigError is raised.
    """
    if int8:
        int8_linear.check_supported(model.mesh.device, model.dtype)
    unsupported = _unsupported_reason(model)
    if unsupported is not None and not int8:
        log.info("event=weights_not_packed reason=%r", unsupported)
        return
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    mlps = [module for module in model.modules() if isinstance(module, MLP)]
    gated_linears = {mlp.linear_fc1 for mlp in mlps if mlp.config.gated}
    # The lists of weights must not be stored in variables, because a reference to the unpacked
    # weights would keep all of them in memory.
    packer = _WeightPacker(
        [model.head_weight] if model.is_last_stage else [],
        [(linear.weight, linear in gated_linears) for linear in linears],
        int8=int8,
    )
    expert_packer = None if packer.uses_panels else _Fp32ExpertPacker.build(model)
    # Norms are fused on one tensor rank only. With several ranks, there may be communication
    # between a norm and its linear.
    fuses_norms = packer.uses_panels and model.mesh.tp == 1
    is_screened = False
    if model.is_last_stage:
        is_screened = _pack_head(model, packer, fuses_norms=fuses_norms, int8=int8)
    for linear in linears:
        norm = make_input_norm(linear) if fuses_norms else None
        gated = linear in gated_linears
        if expert_packer is not None and linear in expert_packer.linears:
            linear.use_backend(expert_packer.pack(linear.weight, gated=gated))
        else:
            linear.use_backend(packer.pack(linear.weight, norm, gated=gated))
    for mlp in mlps:
        if isinstance(mlp.linear_fc1.backend, CpuLinear):
            _fuse_activation(mlp)
    cpu_experts.use_native_experts(model)
    has_all_experts = model.mesh.expert_mesh.tp == 1
    if fuses_norms and has_all_experts and FusedDecoder.supports_config(model.config):
        model.use_decoder_backend(FusedDecoder(model))
    layout = "int8" if int8 else "panels" if packer.uses_panels else "onednn"
    log.info("event=weights_packed form=%s shortlist=%s", layout, is_screened)


def _fuse_activation(mlp: MLP) -> None:
    """Let the packed fc1 compute the activation, if the C library has it."""
    assert isinstance(mlp.linear_fc1.backend, CpuLinear)
    name = packed_activation_name(mlp.config)
    if name is not None:
        mlp.linear_fc1.backend.packed.use_gate_limits(gate_limits(mlp.config))
        mlp.use_fused_activation(name)


def _pack_head(model: GPT, packer: "_WeightPacker", *, fuses_norms: bool, int8: bool) -> bool:
    """Pack the LM head; return whether INT8 bounds screen the greedy tokens (`ScreenedArgmax`)."""
    final_norm = make_norm(cast(Norm, model.decoder.final_layernorm)) if fuses_norms else None
    head = packer.pack(model.head_weight, final_norm, fp32_output=True)
    screened: ScreenedArgmax | None = None
    if isinstance(head, CpuLinear) and fuses_norms:
        vocab_size = model.config.vocab_size
        if not int8:  # With an int8 head, screening would not be faster.
            screened = ScreenedArgmax.build(model.head_weight[:vocab_size], head.packed, final_norm)
        model.use_greedy_head(CpuGreedyHead(head.packed, final_norm, vocab_size, screened))
    model.use_head_backend(head)
    return screened is not None


def pack_int8_weights(model: GPT, divergence_max: float | None = None) -> Divergence | None:
    """Pack the weights as int8, and raise ConfigError if the quantization check fails.

    All ranks must call this together. The last stage returns the measured divergence, the other
    stages None.
    """
    int8_linear.check_supported(model.mesh.device, model.dtype)
    probe = DivergenceProbe(model, divergence_max)
    pack_weights(model, int8=True)
    divergence = probe.measure(model)
    enforce_limit(divergence, "weights int8")
    return divergence


def weight_bytes(model: GPT) -> int:
    """Return the bytes of unpacked weights and of panels. Weights packed by oneDNN do not count."""
    backends = [module.backend for module in model.modules() if isinstance(module, Linear)]
    routers = [module.router_backend for module in model.modules() if isinstance(module, MoELayer)]
    packed_bytes = [
        backend.packed.nbytes
        for backend in (*backends, *routers, model.head_backend)
        if isinstance(backend, CpuLinear)
    ]
    return sum(parameter.nbytes for parameter in model.parameters()) + sum(packed_bytes)


def is_batch_invariant(model: GPT) -> bool:
    """Return whether a row's results are bit-identical in every batch that contains the row.

    This needs the C library's panels for all linears, its experts and its prefill attention.
    """
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    uses_panels = all(isinstance(linear.backend, CpuLinear) for linear in linears)
    # `TorchExperts` multiplies groups of rows whose sizes depend on the batch, and torch computes
    # the router logits.
    uses_native_experts = all(
        isinstance(module.experts_backend, CpuExperts)
        for module in model.modules()
        if isinstance(module, MoELayer)
    )
    # Without the C prefill kernel, torch computes prefill attention for groups of sequences, and a
    # result depends on the group.
    return uses_panels and uses_native_experts and has_prefill_attention()


class _WeightPacker:
    """Packs all weights with the C library (into panels), or all weights with oneDNN.

    int8 weights are packed with the C library. bf16 and fp32 weights are packed with the C library
    if it supports all weights, otherwise with oneDNN.
    """

    def __init__(
        self, heads: list[Tensor], linears: list[tuple[Tensor, bool]], *, int8: bool
    ) -> None:
        """`heads`: the LM head's weight on the last stage; an empty list on the other stages.

        `linears`: pairs of (weight, whether a gated activation follows the linear).
        """
        self._panels_type: type[PackedLinear] = Int8PackedLinear if int8 else PackedLinear
        self._panel_size = int8_linear.packed_bytes if int8 else packed_linear.packed_numel
        weights = [(head, False) for head in heads] + linears
        self.uses_panels = int8 or all(
            packed_linear.supports_weight(weight) for weight, _ in weights
        )
        element_count = sum(self._panel_size(weight, gated=gated) for weight, gated in weights)
        # One allocation for all panels, so that it can have huge pages. Each part of the allocation
        # uses physical memory only after a panel is written there.
        self._free_memory: Tensor | None = None
        if self.uses_panels:
            dtype = torch.uint8 if int8 else torch.bfloat16
            self._free_memory = huge_page_zeros((element_count,), dtype, torch.device("cpu"))

    def pack(
        self,
        weight: Tensor,
        norm: CpuNorm | None,
        *,
        fp32_output: bool = False,
        gated: bool = False,
    ) -> LinearBackend:
        """Return a backend that has `weight` packed, and applies `norm`, if any, before the matmul.

        `fp32_output`: whether the GEMM with panels returns fp32, as needed for logits. oneDNN
        always returns the dtype of the weight.
        """
        if self._free_memory is None:
            assert norm is None, "oneDNN does not compute norms"
            return OneDnnLinear(weight)
        size = self._panel_size(weight, gated=gated)
        panel_memory, self._free_memory = self._free_memory[:size], self._free_memory[size:]
        packed = self._panels_type(weight, panel_memory, fp32_output=fp32_output, gated=gated)
        return CpuLinear(packed, norm)


class _Fp32ExpertPacker:
    """Packs the experts of an fp32 model with the C library; oneDNN packs the other weights."""

    def __init__(self, experts: list[MLP]) -> None:
        self.linears = {linear for mlp in experts for linear in (mlp.linear_fc1, mlp.linear_fc2)}
        element_count = sum(
            packed_linear.packed_numel(linear.weight, gated=mlp.config.gated and is_fc1)
            for mlp in experts
            for linear, is_fc1 in ((mlp.linear_fc1, True), (mlp.linear_fc2, False))
        )
        # One allocation, as in `_WeightPacker`.
        self._free_memory = huge_page_zeros((element_count,), torch.float32, torch.device("cpu"))

    @classmethod
    def build(cls, model: GPT) -> "_Fp32ExpertPacker | None":
        """Return a packer, or None if the model has no experts that the C library supports."""
        experts = [
            mlp
            for module in model.modules()
            if isinstance(module, MoELayer)
            for mlp in module.local_experts.values()
        ]
        weights = (w for mlp in experts for w in (mlp.linear_fc1.weight, mlp.linear_fc2.weight))
        is_supported = bool(experts) and all(map(packed_linear.supports_fp32_weight, weights))
        return cls(experts) if is_supported else None

    def pack(self, weight: Tensor, *, gated: bool) -> LinearBackend:
        size = packed_linear.packed_numel(weight, gated=gated)
        memory, self._free_memory = self._free_memory[:size], self._free_memory[size:]
        return CpuLinear(Fp32PackedLinear(weight, memory, gated=gated))


def _unsupported_reason(model: GPT) -> str | None:
    """Return why the weights of this model cannot be packed; None if they can."""
    device, dtype = model.mesh.device.type, model.dtype
    if device != "cpu":
        return f"the device is {device}"
    if dtype not in PACKED_DTYPES:
        return f"the model's dtype is {dtype}"
    if any(parameter.requires_grad for parameter in model.parameters()):
        return "the model has trainable weights"
    if not torch.backends.mkldnn.is_available():
        return "torch was built without oneDNN"
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return "this version of torch cannot pack weights"
    weights = (module.weight for module in model.modules() if isinstance(module, Linear))
    needs_onednn_bf16 = dtype == torch.bfloat16 and not all(
        map(packed_linear.supports_weight, weights)
    )
    if needs_onednn_bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "neither oneDNN nor the C library supports bf16 matmuls on this CPU"
    return None
