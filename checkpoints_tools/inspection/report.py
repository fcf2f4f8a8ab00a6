"""`preamble inspect`: reports format, architecture, size, split, serving memory and faults.

Only headers, small files and a few rows are read, unless `--deep` requests a full scan. The report
is a dataclass of plain values, which --json prints under the field names. A problem is a fault if
it would change the model's outputs, else a remark.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch

from checkpoints_tools.flags import source_overrides
from checkpoints_tools.inspection.full_scan import scan_checkpoint, scan_tasks, tied_head_message
from checkpoints_tools.inspection.parallel_read import OpenProgress, ProgressCounter, format_bytes
from checkpoints_tools.inspection.verify import PrintLine
from gpt.attention.kv_cache import BLOCK_TOKENS
from gpt.checkpoint.digest import lookup_identity
from gpt.checkpoint.files.file_tree import scan_folder
from gpt.checkpoint.files.torch_dcp import read_index
from gpt.checkpoint.logical_tensor import (
    TOKENIZER_FILE_SUFFIXES,
    Checkpoint,
    ComputedTensor,
    LogicalTensor,
    summarize_names,
)
from gpt.config import DTYPE_BYTES, GPTConfig, RopeScaling
from gpt.costs.inference import parameter_count, rank_costs
from gpt.dtypes import FLOAT_DTYPE_NAMES, FLOAT_DTYPES
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.manifest import MANIFEST
from gpt.formats.mappings.hybrid_layers import show_layers
from gpt.formats.mappings.megatron_names import EMBEDDING, HEAD, LOCAL_EXPERT
from gpt.formats.megatron.rank_files import TRACKER_FILE, newer_iteration_notes
from gpt.formats.megatron.torch_dist import FSDP_DTENSOR, TORCH_DIST
from gpt.formats.megatron.torch_dist_config import ARGS_KEY, COMMON_KEY, read_common_args
from gpt.formats.registry import open_checkpoint
from gpt.kv_groups import SequenceBlocks, kv_groups
from gpt.parallel.weight_sharding import parameter_specs
from gpt.tokenizers.tokenizer import check_tokenizer, open_tokenizer

# Files that identify each format, as glob patterns in the checkpoint's directory.
FORMAT_MARKERS = {
    "native": (MANIFEST,),
    "megatron": ("mp_rank_*",),
    "megatron_deepspeed": ("layer_*-model_*-model_states.pt",),
    "torch_dist": ("metadata.json", ".metadata", "run_config.yaml"),
    "fsdp_dtensor": ("metadata.json", ".metadata", "run_config.yaml"),
    "huggingface": ("config.json",),
    "nemo": ("model_config.yaml", "model_weights", "metadata.json", ".metadata"),
}
# Formats with one file for each tensor rank.
RANK_FILE_FORMATS = ("megatron", "megatron_deepspeed")
SPLIT_SIZES = (1, 2, 4, 8, 16)  # Parallel sizes in the serving table.
RANKS_MAX = 16
# For a model with more parameter tensors than this, the table has only pp = 1, because the
# computation for all splits would take seconds.
PARAMETER_TENSORS_MAX = 8_000
SAMPLE_COLUMNS = 64
# Memory sizes of common GPUs in GB. A rank needs memory for weights, KV cache, the CUDA context
# (with its libraries), and an overhead proportional to the weights; a tenth of the GPU's memory
# stays free.
GPU_GB = (16, 24, 32, 40, 48, 80, 96, 141, 180)
CUDA_CONTEXT_BYTES = 2_500_000_000
WEIGHT_OVERHEAD_SHARE = 0.05
USABLE_MEMORY_SHARE = 0.9
SPLIT_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
ALWAYS_SHOWN = ("tp", "pp")  # These sizes are shown even if they are 1.


@dataclass(frozen=True)
class SplitMemory:
    """Memory of the largest rank when the model is served at this parallel split."""

    tp: int
    pp: int
    weight_bytes: int
    kv_bytes_per_token: int
    # KV cache of one sequence of max_position_embeddings tokens, without blocks behind windows.
    kv_bytes_per_context: int
    dtype: str
    # Smallest size in GPU_GB that is enough for the weights and one full context. None: all sizes
    # are too small.
    gpu_gb: int | None
    ep: int = 1  # Parts of whole experts; 1: each expert is split over the tensor ranks.


@dataclass
class InspectReport:
    """The report; field names are the keys of --json and must not change."""

    path: str  # Directory (or .nemo file) with the weights, e.g. the iteration directory.
    given: str  # The path on the command line, e.g. the parent of the iteration directory.
    format: str  # The format's name in `gpt.formats.registry`.
    evidence: list[str]  # Files that identify the format.
    # "HybridModel" if the files store the layers of Megatron-Core's HybridModel, else null.
    model_class: str | None
    hybrid_layer_pattern: str | None  # The layers of a HybridModel, one symbol per layer.
    config: dict[str, Any]  # All fields of the GPTConfig.
    split: dict[str, int]  # tp, pp, vpp, ep of the training run; empty if not recorded.
    files: int  # Number of weight files.
    file_bytes: int
    dtypes: dict[str, int]  # Number of stored elements of each dtype.
    tensors: int  # Number of logical tensors.
    parameters: int
    active_parameters: int  # Parameters used per token; fewer than `parameters` with experts.
    vocabulary_rows: int  # Rows of the stored embedding, padding included.
    padding_rows: int
    tokenizer: dict[str, Any] | None  # Keys: path, kind, vocab_size.
    digest: str | None  # From the manifest or the digest cache; null: not computed yet.
    fingerprint: str | None
    splits: list[SplitMemory]
    notes: list[str] = field(default_factory=list)  # Assumptions of the reader, ignored files.
    remarks: list[str] = field(default_factory=list)  # Suspicious or wasteful properties.
    faults: list[str] = field(default_factory=list)  # Problems that would change outputs.
    deep: bool = False  # Whether every byte was read.


def inspect(flags: argparse.Namespace, print_line: PrintLine, open_progress: OpenProgress) -> int:
    """Run `preamble inspect` with parsed flags.

    Return exit status 1 if there is a fault, else 0.
    """
    checkpoint = open_checkpoint(flags.source, source_overrides(flags))
    report = build_report(checkpoint, flags.source, deep=flags.deep)
    if flags.deep:
        with open_progress(sum(size for size, _ in scan_tasks(checkpoint))) as report_progress:
            findings = scan_checkpoint(
                checkpoint, flags.workers, ProgressCounter(report_progress).add_bytes
            )
        report.faults += [finding.line for finding in findings if finding.is_fault]
        report.remarks += [finding.line for finding in findings if not finding.is_fault]
    if flags.json:
        print_line(json.dumps(asdict(report), indent=2))
    else:
        for line in _format_report(report):
            print_line(line)
    return 1 if report.faults else 0


def build_report(checkpoint: Checkpoint, source: str, *, deep: bool = False) -> InspectReport:
    """Build the report from headers, small files and samples of the weights.

    With `deep`, the caller adds a full scan. A check of samples is then omitted if the scan makes
    the same check on all values.
    """
    config, path = checkpoint.config, checkpoint.path
    dtype_counts = _count_dtypes(checkpoint)
    vocabulary_rows = _stored_rows(checkpoint.tensors[EMBEDDING], checkpoint)
    tokenizer, tokenizer_remarks = _describe_tokenizer(checkpoint)
    report = InspectReport(
        path=str(path),
        given=source,
        format=checkpoint.format,
        evidence=_find_markers(checkpoint, Path(source)),
        model_class="HybridModel" if checkpoint.hybrid_layers else None,
        hybrid_layer_pattern=checkpoint.hybrid_layers or None,
        config=config.to_dict(),
        split=_writer_split(checkpoint),
        files=len(checkpoint.files),
        file_bytes=sum(file.stat().st_size for file in checkpoint.files),
        dtypes=dict(dtype_counts.most_common()),
        tensors=len(checkpoint.tensors),
        parameters=parameter_count(config),
        active_parameters=_active_parameters(config),
        vocabulary_rows=vocabulary_rows,
        padding_rows=vocabulary_rows - config.vocab_size,
        tokenizer=tokenizer,
        digest=None,
        fingerprint=None,
        splits=_serving_splits(config),
        notes=list(checkpoint.notes),
        remarks=tokenizer_remarks,
        deep=deep,
    )
    report.remarks += _find_remarks(checkpoint, report)
    try:
        identity = lookup_identity(checkpoint)
        report.digest = identity.digest or None
        report.fingerprint = identity.fingerprint
    except CheckpointError as error:
        report.faults.append(str(error))
    return report


def _find_markers(checkpoint: Checkpoint, source: Path) -> list[str]:
    """Return the names of the files that identify the format, for `evidence`."""
    path, markers = checkpoint.path, []
    source = source.expanduser()
    if (
        source != path
        and (path.parent / TRACKER_FILE).is_file()
        and source.resolve() != path.resolve()
    ):
        markers.append(f"{TRACKER_FILE} (names {path.name})")
    for pattern in FORMAT_MARKERS.get(checkpoint.format, ()):
        names = sorted(child.name for child in path.glob(pattern)) if path.is_dir() else []
        if names:
            more = f" to {names[-1]}" if len(names) > 1 else ""
            markers.append(names[0] + more)
    if checkpoint.format == "nemo" and (path.parent / "context").is_dir():
        markers.append("context beside it")
    return markers or [path.name]


def _writer_split(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the parallel sizes of the run that wrote the checkpoint.

    The reader of distributed checkpoints does not return these sizes, so they are read from the
    saved args.
    """
    if checkpoint.split or checkpoint.format not in (TORCH_DIST, FSDP_DTENSOR):
        return dict(checkpoint.split)
    index = read_index(scan_folder(checkpoint.path), (COMMON_KEY, ARGS_KEY).__contains__)
    args = read_common_args(index) or {}
    sizes = {name: args.get(arg) for name, arg in SPLIT_ARGS.items()}
    return {name: size for name, size in sizes.items() if type(size) is int}


def _count_dtypes(checkpoint: Checkpoint) -> "Counter[str]":
    """Return the number of stored elements of each dtype."""
    sources = {
        id(piece.source): piece.source
        for logical in checkpoint.tensors.values()
        for piece in logical.slices
    }
    counts: Counter[str] = Counter()
    for source in sources.values():
        name = (
            source.stored_dtype_name
            if isinstance(source, ComputedTensor)
            else FLOAT_DTYPE_NAMES[source.dtype]
        )
        counts[name] += prod(source.shape)
    return counts


def _stored_rows(embedding: LogicalTensor, checkpoint: Checkpoint) -> int:
    """Return the number of stored embedding rows, including padding rows."""
    # Rank files with only padding rows have no slice, so the sum over the slices' files can be too
    # small. In a format of rank files, all files have the same number of rows, so the total
    # is (rows of one file) * (number of tensor ranks).
    source_rows = {id(piece.source): piece.source.shape[0] for piece in embedding.slices}
    row_counts = list(source_rows.values())
    ranks = checkpoint.split.get("tp", 1) if checkpoint.format in RANK_FILE_FORMATS else 1
    return max(sum(row_counts), max(row_counts) * ranks)


def _active_parameters(config: GPTConfig) -> int:
    """Return the number of parameters used for one token: `moe_router_topk` experts per layer."""

    def is_active(name: str) -> bool:
        match = LOCAL_EXPERT.search(name)
        return match is None or int(match[1]) < config.moe_router_topk

    return sum(
        prod(parameter.shape)
        for name, parameter in parameter_specs(config).items()
        if is_active(name)
    )


def _serving_splits(config: GPTConfig) -> list[SplitMemory]:
    """Return the memory per rank at every split of the table that the model supports.

    The memory is computed for the model's dtype, and also for bfloat16 if the model's dtype has
    more than 16 bits.
    """
    is_wide = DTYPE_BYTES[config.dtype] > 2
    dtypes = (config.dtype, "bfloat16") if is_wide else (config.dtype,)
    return [split for dtype in dtypes for split in _splits_for_dtype(config, dtype)]


def _splits_for_dtype(config: GPTConfig, dtype: str) -> Iterator[SplitMemory]:
    is_large = len(parameter_specs(config)) > PARAMETER_TENSORS_MAX
    groups = kv_groups(config)
    sequence_blocks = SequenceBlocks(tuple(group.window for group in groups), BLOCK_TOKENS)
    # A full context, in tokens that are summed over the KV groups.
    context_tokens = BLOCK_TOKENS * sequence_blocks.count_max(config.max_position_embeddings, 1)
    for tp, pp, ep in _split_sizes(config):
        if pp == 1 or not is_large:
            try:
                ranks = rank_costs(config, tp, pp, dtype=dtype, ep=ep)
            except ConfigError:
                continue  # This split is impossible for the model.
            kv_bytes_per_token = max(rank.kv_bytes_per_token for rank in ranks)
            weight_bytes = max(rank.weight_bytes for rank in ranks)
            context_bytes = kv_bytes_per_token * context_tokens // len(groups)
            yield SplitMemory(
                tp,
                pp,
                weight_bytes,
                kv_bytes_per_token,
                context_bytes,
                dtype,
                _smallest_gpu_gb(weight_bytes + context_bytes, weight_bytes),
                ep,
            )


def _split_sizes(config: GPTConfig) -> Iterator[tuple[int, int, int]]:
    """Return the tensor, pipeline and expert parallel sizes of the serving table.

    Expert parallelism is shown where the memory of a rank differs: with more expert ranks than
    tensor ranks.
    """
    for tp, pp in product(SPLIT_SIZES, SPLIT_SIZES):
        if tp * pp <= RANKS_MAX:
            yield tp, pp, 1
    if any(config.moe_layers):
        for tp, ep in product(SPLIT_SIZES, SPLIT_SIZES):
            if tp < ep:
                yield tp, 1, ep


def _smallest_gpu_gb(used_bytes: int, weight_bytes: int) -> int | None:
    needed_bytes = (
        used_bytes + CUDA_CONTEXT_BYTES + WEIGHT_OVERHEAD_SHARE * weight_bytes
    ) / USABLE_MEMORY_SHARE
    return next((size for size in GPU_GB if needed_bytes <= size * 1e9), None)


def _describe_tokenizer(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """Return the tokenizer's path, kind and size, and remarks about the tokenizer."""
    path = checkpoint.tokenizer
    if path is None:
        dangling_links = [link for link in _tokenizer_links(checkpoint.path) if not link.exists()]
        if dangling_links:
            return None, [
                "the tokenizer is a broken symbolic link: "
                f"{summarize_names(list(map(str, dangling_links)))}"
            ]
        return None, [
            "no tokenizer found beside the weights; without a tokenizer, serving accepts only "
            "token ids"
        ]
    try:
        tokenizer = open_tokenizer(path)
    except CheckpointError as error:
        return {"path": str(path), "kind": None, "vocab_size": None}, [f"tokenizer: {error}"]
    description = {"path": str(path), "kind": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    try:
        check_tokenizer(tokenizer, checkpoint.config.vocab_size, path)
    except CheckpointError as error:
        return description, [str(error)]
    return description, []


def _tokenizer_links(path: Path) -> Iterator[Path]:
    """Yield the symbolic links that are named like tokenizer files, in and beside `path`."""
    for folder in (path, path.parent, path / "tokenizer", path.parent / "tokenizer"):
        for suffix in TOKENIZER_FILE_SUFFIXES:
            yield from (link for link in folder.glob(f"*{suffix}") if link.is_symlink())


def _find_remarks(checkpoint: Checkpoint, report: InspectReport) -> Iterator[str]:
    """Yield remarks: properties that a person should check before using the model."""
    config = checkpoint.config
    # The reader reports a newer iteration as a note; here it is a remark.
    for note in set(report.notes) & set(newer_iteration_notes(checkpoint.path)):
        report.notes.remove(note)
        yield note
    vocab_size_is_certain = report.padding_rows > 0 or not any(
        "vocabulary" in note for note in report.notes
    )
    tokenizer_size = report.tokenizer and report.tokenizer["vocab_size"]
    if not vocab_size_is_certain and tokenizer_size and tokenizer_size < config.vocab_size:
        yield (
            f"the tokenizer has {tokenizer_size:,} ids, but the embedding has "
            f"{config.vocab_size:,} rows: the other rows may be padding, and the model could "
            f"generate them as tokens; if they are padding, give --true-vocab-size {tokenizer_size}"
        )
    elif not vocab_size_is_certain:
        yield (
            f"all {config.vocab_size:,} rows of the embedding count as tokens; if some are padding,"
            " the model could generate them as tokens: give --true-vocab-size"
        )
    # Quantized weights beside unquantized ones are usual.
    float_dtypes = {name: n for name, n in report.dtypes.items() if name in FLOAT_DTYPES}
    if len(float_dtypes) > 1:
        mixed = ", ".join(f"{count:,} of {name}" for name, count in float_dtypes.items())
        yield f"weights have several dtypes: {mixed}"
    head = checkpoint.tensors.get(HEAD)
    if (
        head is not None
        and not report.deep
        and _sampled_rows_equal(head, checkpoint.tensors[EMBEDDING])
    ):
        yield f"{HEAD}: {tied_head_message(head)}"
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(config, name):
            yield (
                f"{name} was {getattr(config, name):g} in training; it is off in serving and "
                "with frozen weights"
            )


def _sampled_rows_equal(head: LogicalTensor, embedding: LogicalTensor) -> bool:
    """Compare the first columns of the first, middle and last rows of head and embedding."""
    rows = (0, head.shape[0] // 2, head.shape[0] - 1)
    pairs = (
        [tensor.read_sample(row, 1, SAMPLE_COLUMNS) for tensor in (head, embedding)] for row in rows
    )
    return all(torch.equal(left, right) for left, right in pairs)


def _format_report(report: InspectReport) -> Iterator[str]:
    """Yield the lines of the report: description, serving table, notes, remarks and faults."""
    config = GPTConfig.from_dict(report.config)
    yield f"{report.path}"
    layers = show_layers(report.hybrid_layer_pattern or "")
    model_class = f", {report.model_class} of layers {layers}" if report.model_class else ""
    yield f"format       {report.format}{model_class}, by {', '.join(report.evidence)}"
    if report.split:
        shown_split = {
            name: size for name, size in report.split.items() if size > 1 or name in ALWAYS_SHOWN
        }
        split_text = " x ".join(f"{name.upper()} {size}" for name, size in shown_split.items())
        yield f"written at   {split_text}"
    size = format_bytes(report.file_bytes)
    yield f"files        {report.files}, {size}; {report.tensors} tensors of the model"
    dtype_names = ", ".join(report.dtypes)
    yield f"dtype        {dtype_names}"
    active_text = f", {report.active_parameters:,} active per token"
    active_suffix = active_text if report.active_parameters != report.parameters else ""
    yield f"parameters   {report.parameters:,}{active_suffix}"
    for name, description in _describe_architecture(config):
        yield f"{name:13}{description}"
    padding_suffix = f", and {report.padding_rows:,} rows of padding" if report.padding_rows else ""
    yield f"vocabulary   {config.vocab_size:,}{padding_suffix}"
    tokenizer = report.tokenizer
    if tokenizer is None:
        yield "tokenizer    none"
    else:
        ids = f", {tokenizer['vocab_size']:,} ids" if tokenizer["vocab_size"] else ""
        yield f"tokenizer    {tokenizer['kind'] or 'unreadable'}{ids}, {tokenizer['path']}"
    missing_digest = "not computed yet; `preamble verify --deep` computes it"
    yield f"digest       {report.digest or missing_digest}"
    yield ""
    yield from _split_table(report.splits)
    yield ""
    for label, lines in (
        ("note", report.notes),
        ("looks wrong", report.remarks),
        ("fault", report.faults),
    ):
        for line in lines:
            yield f"{label}: {line}"
    if report.deep and not report.faults:
        yield "every byte was read, and no fault was found"


def _describe_architecture(config: GPTConfig) -> Iterator[tuple[str, str]]:
    """Yield the label and the value of each architecture line."""
    yield "layers", f"{config.num_layers}, hidden size {config.hidden_size:,}"
    if config.num_query_groups == config.num_attention_heads:
        kind = "MHA"
    elif config.num_query_groups == 1:
        kind = "MQA"
    else:
        kind = "GQA"
    window_text = ""
    if config.window_size:
        window_text = f", sliding window {config.window_size:,}"
        if config.window_layers:
            window_text += f" in {sum(config.window_layers)} of {config.num_layers} layers"
    window_text += ", sinks" if config.attention_sinks else ""
    qk_norm_text = ", norms on queries and keys" if config.qk_layernorm else ""
    if config.qk_layernorm and config.qk_layernorm_scope == "all_heads":
        qk_norm_text += " of all heads"
    yield (
        "attention",
        f"{config.num_attention_heads} heads of {config.kv_channels} in {config.num_query_groups} "
        f"groups ({kind}){qk_norm_text}{window_text}",
    )
    mlp_text = f"{config.ffn_hidden_size:,} wide, {config.activation}{', gated' * config.gated}"
    yield "mlp", mlp_text + (", parallel to the attention" if config.parallel_residual else "")
    if any(config.moe_layers):
        shared_width = config.moe_shared_expert_intermediate_size
        yield (
            "experts",
            f"{config.num_experts} in each of {sum(config.moe_layers)} layers, "
            f"{config.moe_router_topk} per token, {config.moe_ffn_hidden_size:,} wide, "
            f"{config.moe_router_score_function}"
            + (f", and a shared one {shared_width:,} wide" if shared_width else ""),
        )
    rope_text = ""
    if config.uses_rope:
        scaling = config.rope_scaling
        rope_text = f", base {config.rotary_base:,.0f}, {config.rotary_percent:.0%} of a head"
        rope_text += ", interleaved" if config.rotary_interleaved else ""
        if scaling is not None and scaling.kind == "longrope":
            rope_text += f", longrope{_describe_longrope(config, scaling)}"
        elif scaling is not None:
            rope_text += f", {scaling.kind} scaling by {scaling.factor:g}"
        if config.rope_layers:
            rope_text += f", in {sum(config.rope_layers)} of {config.num_layers} layers"
        if config.window_rope is not None:
            rope_text += f"; base {config.window_rope.base:,.0f} in layers with a window"
    yield (
        "positions",
        f"{config.position_embedding_type} up to {config.max_position_embeddings:,}{rope_text}",
    )
    multipliers = _describe_multipliers(config)
    if multipliers:
        yield "multipliers", multipliers
    norm_suffix = ", stored as gamma - 1" if config.layernorm_zero_centered_gamma else ""
    if config.norm_placement != "pre":
        places = {"post": "behind", "pre_and_post": "in front of and behind"}
        norm_suffix += f", {places[config.norm_placement]} attention and MLP"
    yield "norm", f"{config.normalization}, epsilon {config.layernorm_epsilon:g}{norm_suffix}"
    biases = {"QKV": config.qkv_bias, "projection": config.proj_bias, "MLP": config.mlp_bias}
    yield "biases", ", ".join(name for name, used in biases.items() if used) or "none"
    yield (
        "head",
        "its own" if config.untie_embeddings_and_output_weights else "tied to the embedding",
    )


def _describe_longrope(config: GPTConfig, scaling: RopeScaling) -> str:
    if not scaling.long_frequency_factors:
        return ""
    original = scaling.original_max_position_embeddings
    length = "long" if config.max_position_embeddings > original else "short"
    return f" with the factors for {length} contexts (original length {original:,})"


def _describe_multipliers(config: GPTConfig) -> str:
    """Return the factors of embeddings, scores, outputs and logits that differ from the usual."""
    parts = []
    if config.embedding_multiplier != 1:
        virtual = ", virtual tokens too" * (config.embedding_multiplier_scope == "all")
        parts.append(f"embeddings by {config.embedding_multiplier:g}{virtual}")
    if config.softmax_scale:
        parts.append(f"attention scores by {config.softmax_scale:g}")
    if config.query_scaling_beta:
        parts.append(
            f"queries by 1 + {config.query_scaling_beta:g} ln(1 + floor(position / "
            f"{config.query_scaling_length:,}))"
        )
    if config.residual_multiplier != 1:
        parts.append(f"outputs of attention and MLP by {config.residual_multiplier:g}")
    if config.logits_scaling != 1:
        parts.append(f"logits divided by {config.logits_scaling:g}")
    return "; ".join(parts)


def _split_table(splits: list[SplitMemory]) -> Iterator[str]:
    header = "weights, KV per 1,000 tokens, KV of one full context, smallest GPU that fits them"
    for dtype in dict.fromkeys(split.dtype for split in splits):
        yield f"to serve     memory of each rank in {dtype}: {header}"
        for split in (candidate for candidate in splits if candidate.dtype == dtype):
            kv_bytes_per_1000 = 1000 * split.kv_bytes_per_token
            sizes = (split.weight_bytes, kv_bytes_per_1000, split.kv_bytes_per_context)
            columns = "".join(f"{format_bytes(size):>12}" for size in sizes)
            gpu = f"{split.gpu_gb} GB" if split.gpu_gb else "none"
            sizes_text = f"TP {split.tp:<2} x PP {split.pp:<2}"
            if any(candidate.ep > 1 for candidate in splits):
                sizes_text += f" x EP {split.ep:<2}" if split.ep > 1 else " " * 8
            yield f"  {sizes_text}{columns}{gpu:>10}"
