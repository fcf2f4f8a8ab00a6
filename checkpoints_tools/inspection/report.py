"""`preamble inspect`: what a checkpoint is, what it takes to serve it, and what looks wrong.

Only headers, small files and a few rows are read, unless a deep look is asked for. A report is
plain values, each documented where it stands, and --json prints just these. Where something is
worth a person's time it is said in one line; what would change an answer is a fault.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch

from checkpoints_tools.flags import source_changes
from checkpoints_tools.inspection.full_scan import examine, same_head, tasks
from checkpoints_tools.inspection.parallel_read import Tally, in_words
from checkpoints_tools.inspection.verify import Progress, Say
from gpt.checkpoint.digest import glance
from gpt.checkpoint.files.file_tree import files_in
from gpt.checkpoint.files.torch_dcp import read_index
from gpt.checkpoint.logical_tensor import TOKENIZER_FILES, Checkpoint, Logical, some
from gpt.config import DTYPE_BYTES, GPTConfig
from gpt.costs.inference import parameter_count, rank_costs
from gpt.dtypes import FLOAT_NAMES
from gpt.errors import CheckpointError, ConfigError
from gpt.formats.manifest import MANIFEST
from gpt.formats.mappings.megatron_names import EMBEDDING, EXPERT, HEAD
from gpt.formats.megatron.rank_files import TRACKER, newer_iteration
from gpt.formats.megatron.torch_dist_config import COMMON_KEY, arguments
from gpt.formats.registry import open_checkpoint
from gpt.parallel.sharding import parameters
from gpt.tokenizers.tokenizer import check_tokenizer, open_tokenizer

# What tells each format, of what may be in the directory.
EVIDENCE = {
    "native": (MANIFEST,),
    "megatron": ("mp_rank_*",),
    "torch_dist": ("metadata.json", ".metadata", "run_config.yaml"),
    "huggingface": ("config.json",),
    "nemo": ("model_config.yaml", "model_weights", "metadata.json", ".metadata"),
}
SIZES = (1, 2, 4, 8, 16)  # Of splits that are shown.
RANKS_MAX = 16
PARAMETERS_MAX = 8_000  # Tensors; beyond it counting each split takes seconds.
SAMPLE_COLUMNS = 64
# Memory of GPUs there are, and what of it a rank needs besides weights and KV: a context with its
# libraries, a share of the weights, and a tenth of all that stays free.
GPU_GB = (16, 24, 32, 40, 48, 80, 96, 141, 180)
CONTEXT_BYTES = 2_500_000_000
BESIDES_WEIGHTS = 0.05
MEMORY_SHARE = 0.9
SPLIT_ARGS = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
}
ALWAYS = ("tp", "pp")  # Told even where they are 1.


@dataclass(frozen=True)
class Split:
    """What each rank holds at most when the model is served at this split."""

    tp: int
    pp: int
    weight_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_context: int  # Of one sequence of the longest length.
    dtype: str
    gpu_gb: int | None  # The smallest GPU that holds that with one full context; null: none does.


@dataclass
class Report:
    """All that is printed; the keys of --json are these, and stay."""

    path: str  # Where the weights are: below what was given, if a tracker names an iteration.
    given: str
    format: str  # As its reader calls it.
    evidence: list[str]  # The files that it was recognised by.
    config: dict[str, Any]  # Every field of a GPTConfig.
    split: dict[str, int]  # tp, pp, vpp, ep of the run that wrote it; empty if nothing says.
    files: int  # Those of weights.
    file_bytes: int
    dtypes: dict[str, int]  # Stored elements of each.
    tensors: int
    parameters: int
    active_parameters: int  # Per token; fewer where there are experts.
    vocabulary_rows: int  # Of the stored embedding, padding included.
    padding_rows: int
    tokenizer: dict[str, Any] | None  # path, kind, vocab_size.
    digest: str | None  # As recorded or cached; null: nobody has computed it.
    fingerprint: str | None
    splits: list[Split]
    notes: list[str] = field(default_factory=list)  # How the reader found what was not said.
    remarks: list[str] = field(default_factory=list)  # What looks wrong, or wastes.
    faults: list[str] = field(default_factory=list)  # What would change an answer.
    deep: bool = False


def inspect(flags: argparse.Namespace, say: Say, progress: Progress) -> int:
    """Carry out what `flags.inspect_parser` understood; 1 if there is a fault."""
    checkpoint = open_checkpoint(flags.source, source_changes(flags))
    report = look(checkpoint, flags.source, deep=flags.deep)
    if flags.deep:
        with progress(sum(size for size, _ in tasks(checkpoint))) as tell:
            findings = examine(checkpoint, flags.workers, Tally(tell).add)
        report.faults += [one.line for one in findings if one.fault]
        report.remarks += [one.line for one in findings if not one.fault]
    if flags.json:
        say(json.dumps(asdict(report), indent=2))
    else:
        for line in _lines(report):
            say(line)
    return 1 if report.faults else 0


def look(checkpoint: Checkpoint, given: str, *, deep: bool = False) -> Report:
    """Everything that can be told without reading all; what a `deep` look tells better is not."""
    config, path = checkpoint.config, checkpoint.path
    dtypes = _dtypes(checkpoint)
    rows = _stored_rows(checkpoint.tensors[EMBEDDING], checkpoint)
    tokenizer, wrong = _tokenizer(checkpoint)
    report = Report(
        path=str(path),
        given=given,
        format=checkpoint.format,
        evidence=_evidence(checkpoint, Path(given)),
        config=config.to_dict(),
        split=_written_at(checkpoint),
        files=len(checkpoint.files),
        file_bytes=sum(file.stat().st_size for file in checkpoint.files),
        dtypes=dict(dtypes.most_common()),
        tensors=len(checkpoint.tensors),
        parameters=parameter_count(config),
        active_parameters=_active(config),
        vocabulary_rows=rows,
        padding_rows=rows - config.vocab_size,
        tokenizer=tokenizer,
        digest=None,
        fingerprint=None,
        splits=_splits(config),
        notes=list(checkpoint.notes),
        remarks=wrong,
        deep=deep,
    )
    report.remarks += _strange(checkpoint, report)
    try:
        identity = glance(checkpoint)
        report.digest, report.fingerprint = identity.digest or None, identity.fingerprint
    except CheckpointError as error:
        report.faults.append(str(error))
    return report


def _evidence(checkpoint: Checkpoint, given: Path) -> list[str]:
    path, found = checkpoint.path, []
    given = given.expanduser()
    if given != path and (path.parent / TRACKER).is_file() and given.resolve() != path.resolve():
        found.append(f"{TRACKER} (names {path.name})")
    for pattern in EVIDENCE.get(checkpoint.format, ()):
        names = sorted(child.name for child in path.glob(pattern)) if path.is_dir() else []
        if names:
            more = f" to {names[-1]}" if len(names) > 1 else ""
            found.append(names[0] + more)
    if checkpoint.format == "nemo" and (path.parent / "context").is_dir():
        found.append("context beside it")
    return found or [path.name]


def _written_at(checkpoint: Checkpoint) -> dict[str, int]:
    """The writer's split. Distributed files are read without it, and only their args tell."""
    if checkpoint.split or checkpoint.format != "torch_dist":
        return dict(checkpoint.split)
    index = read_index(files_in(checkpoint.path), lambda key: key == COMMON_KEY)
    args = arguments(index) or {}
    sizes = {name: args.get(arg) for name, arg in SPLIT_ARGS.items()}
    return {name: size for name, size in sizes.items() if type(size) is int}


def _dtypes(checkpoint: Checkpoint) -> "Counter[str]":
    """Elements by dtype, each stored tensor once."""
    sources = {
        id(piece.source): piece.source
        for logical in checkpoint.tensors.values()
        for piece in logical.pieces
    }
    counted: Counter[str] = Counter()
    for source in sources.values():
        counted[FLOAT_NAMES[source.dtype]] += prod(source.shape)
    return counted


def _stored_rows(embedding: Logical, checkpoint: Checkpoint) -> int:
    """Of the embedding as it is stored; the last tensor ranks may hold nothing but padding."""
    parts = {id(piece.source): piece.source.shape[0] for piece in embedding.pieces}
    heights = list(parts.values())
    ranks = checkpoint.split.get("tp", 1) if checkpoint.format == "megatron" else 1
    return max(sum(heights), max(heights) * ranks)


def _active(config: GPTConfig) -> int:
    """Parameters that one token meets: of each layer's experts only as many as it is sent to."""

    def is_met(name: str) -> bool:
        match = EXPERT.search(name)
        return match is None or int(match[1]) < config.moe_router_topk

    return sum(prod(one.shape) for name, one in parameters(config).items() if is_met(name))


def _splits(config: GPTConfig) -> list[Split]:
    """Those that the model can have, and what each costs a rank."""
    wide = DTYPE_BYTES[config.dtype] > 2
    dtypes = (config.dtype, "bfloat16") if wide else (config.dtype,)
    return [split for dtype in dtypes for split in _splits_in(config, dtype)]


def _splits_in(config: GPTConfig, dtype: str) -> Iterator[Split]:
    many = len(parameters(config)) > PARAMETERS_MAX
    for tp in SIZES:
        for pp in SIZES[:1] if many else SIZES:
            if tp * pp > RANKS_MAX:
                continue
            try:
                ranks = rank_costs(config, tp, pp, dtype=dtype)
            except ConfigError:
                continue  # It does not divide.
            token = max(rank.kv_bytes_per_token for rank in ranks)
            weights = max(rank.weight_bytes for rank in ranks)
            context = token * config.max_position_embeddings
            yield Split(tp, pp, weights, token, context, dtype, _gpu_gb(weights + context, weights))


def _gpu_gb(held: int, weights: int) -> int | None:
    needed = (held + CONTEXT_BYTES + BESIDES_WEIGHTS * weights) / MEMORY_SHARE
    return next((size for size in GPU_GB if needed <= size * 1e9), None)


def _tokenizer(checkpoint: Checkpoint) -> tuple[dict[str, Any] | None, list[str]]:
    """What kind it is, and what is wrong with it."""
    path = checkpoint.tokenizer
    if path is None:
        dangling = [link for link in _links(checkpoint.path) if not link.exists()]
        if dangling:
            return None, [f"the tokenizer is a link to nothing: {some(list(map(str, dangling)))}"]
        return None, ["no tokenizer is beside it; serving takes token ids, or needs a tokenizer"]
    try:
        opened = open_tokenizer(path)
    except CheckpointError as error:
        return {"path": str(path), "kind": None, "vocab_size": None}, [f"tokenizer: {error}"]
    found = {"path": str(path), "kind": opened.kind, "vocab_size": opened.vocab_size}
    try:
        check_tokenizer(opened, checkpoint.config.vocab_size, path)
    except CheckpointError as error:
        return found, [str(error)]
    return found, []


def _links(path: Path) -> Iterator[Path]:
    for folder in (path, path.parent, path / "tokenizer", path.parent / "tokenizer"):
        for ending in TOKENIZER_FILES:
            yield from (link for link in folder.glob(f"*{ending}") if link.is_symlink())


def _strange(checkpoint: Checkpoint, report: Report) -> Iterator[str]:
    """What a person should look at before trusting the model."""
    config = checkpoint.config
    for note in set(report.notes) & set(newer_iteration(checkpoint.path)):
        report.notes.remove(note)
        yield note
    sure = report.padding_rows > 0 or not any("vocabulary" in note for note in report.notes)
    size = report.tokenizer and report.tokenizer["vocab_size"]
    if not sure and size and size < config.vocab_size:
        yield (
            f"the tokenizer has {size:,} ids, the embedding {config.vocab_size:,} rows: the rest "
            f"may be padding that is served as tokens; if so, give --true-vocab-size {size}"
        )
    elif not sure:
        yield (
            f"all {config.vocab_size:,} rows of the embedding count as tokens; if some are padding,"
            " the model may answer with them: give --true-vocab-size"
        )
    if len(report.dtypes) > 1:
        mixed = ", ".join(f"{count:,} of {name}" for name, count in report.dtypes.items())
        yield f"weights are of several dtypes: {mixed}"
    head = checkpoint.tensors.get(HEAD)
    if head is not None and not report.deep and _look_equal(head, checkpoint.tensors[EMBEDDING]):
        yield f"{HEAD}: {same_head(head)}"
    for name in ("hidden_dropout", "attention_dropout"):
        if getattr(config, name):
            yield f"{name} was {getattr(config, name):g} in training; frozen and served it is off"


def _look_equal(head: Logical, embedding: Logical) -> bool:
    """As far as a few rows tell."""
    rows = (0, head.shape[0] // 2, head.shape[0] - 1)
    pairs = ([one.corner(row, 1, SAMPLE_COLUMNS) for one in (head, embedding)] for row in rows)
    return all(torch.equal(left, right) for left, right in pairs)


def _lines(report: Report) -> Iterator[str]:
    """The report for people, from what it is to what is wrong."""
    config = GPTConfig.from_dict(report.config)
    yield f"{report.path}"
    yield f"format       {report.format}, by {', '.join(report.evidence)}"
    if report.split:
        shown = {name: size for name, size in report.split.items() if size > 1 or name in ALWAYS}
        words = " x ".join(f"{name.upper()} {size}" for name, size in shown.items())
        yield f"written at   {words}"
    size = in_words(report.file_bytes)
    yield f"files        {report.files}, {size}; {report.tensors} tensors of the model"
    stored = ", ".join(report.dtypes)
    yield f"dtype        {stored}"
    active = f", {report.active_parameters:,} active per token"
    experts = active if report.active_parameters != report.parameters else ""
    yield f"parameters   {report.parameters:,}{experts}"
    for name, what in _described(config):
        yield f"{name:13}{what}"
    padded = f", and {report.padding_rows:,} rows of padding" if report.padding_rows else ""
    yield f"vocabulary   {config.vocab_size:,}{padded}"
    tokenizer = report.tokenizer
    if tokenizer is None:
        yield "tokenizer    none"
    else:
        ids = f", {tokenizer['vocab_size']:,} ids" if tokenizer["vocab_size"] else ""
        yield f"tokenizer    {tokenizer['kind'] or 'unreadable'}{ids}, {tokenizer['path']}"
    yield f"digest       {report.digest or 'not computed yet; `preamble verify --deep` does'}"
    yield ""
    yield from _table(report.splits)
    yield ""
    for word, lines in (
        ("note", report.notes),
        ("looks wrong", report.remarks),
        ("fault", report.faults),
    ):
        for line in lines:
            yield f"{word}: {line}"
    if report.deep and not report.faults:
        yield "every byte was read, and no fault found"


def _described(config: GPTConfig) -> Iterator[tuple[str, str]]:
    """The architecture in words."""
    yield "layers", f"{config.num_layers}, hidden size {config.hidden_size:,}"
    kind = {1: "MQA"}.get(config.num_query_groups, "GQA")
    kind = "MHA" if config.num_query_groups == config.num_attention_heads else kind
    seen = f", each token sees {config.window_size:,}" if config.window_size else ""
    norm = ", norms on queries and keys" if config.qk_layernorm else ""
    yield (
        "attention",
        f"{config.num_attention_heads} heads of {config.kv_channels} in {config.num_query_groups} "
        f"groups ({kind}){norm}{seen}",
    )
    wide = f"{config.ffn_hidden_size:,} wide, {config.activation}{', gated' * config.gated}"
    yield "mlp", wide + (", beside the attention" if config.parallel_residual else "")
    if any(config.moe_layers):
        shared = config.moe_shared_expert_intermediate_size
        yield (
            "experts",
            f"{config.num_experts} in {sum(config.moe_layers)} layers, {config.moe_router_topk} "
            f"for a token, {config.moe_ffn_hidden_size:,} wide, {config.moe_router_score_function}"
            + (f", and a shared one {shared:,} wide" if shared else ""),
        )
    turned = ""
    if config.rotary:
        scaling = config.rope_scaling
        turned = f", base {config.rotary_base:,.0f}, {config.rotary_percent:.0%} of a head"
        turned += ", interleaved" if config.rotary_interleaved else ""
        turned += f", {scaling.kind} scaling by {scaling.factor:g}" if scaling else ""
    yield (
        "positions",
        f"{config.position_embedding_type} up to {config.max_position_embeddings:,}{turned}",
    )
    centred = ", stored minus one" if config.layernorm_zero_centered_gamma else ""
    yield "norm", f"{config.normalization}, epsilon {config.layernorm_epsilon:g}{centred}"
    flags = {"QKV": config.qkv_bias, "projection": config.proj_bias, "MLP": config.mlp_bias}
    yield "biases", ", ".join(name for name, used in flags.items() if used) or "none"
    yield (
        "head",
        "its own" if config.untie_embeddings_and_output_weights else "tied to the embedding",
    )


def _table(splits: list[Split]) -> Iterator[str]:
    what = "weights, KV per 1,000 tokens, KV of one full context, a GPU that holds them"
    for dtype in dict.fromkeys(split.dtype for split in splits):
        yield f"to serve     each rank, in {dtype}: {what}"
        for split in (one for one in splits if one.dtype == dtype):
            thousand = 1000 * split.kv_bytes_per_token
            sizes = (split.weight_bytes, thousand, split.kv_bytes_per_context)
            columns = "".join(f"{in_words(size):>12}" for size in sizes)
            gpu = f"{split.gpu_gb} GB" if split.gpu_gb else "none"
            yield f"  TP {split.tp:<2} x PP {split.pp:<2}{columns}{gpu:>10}"
