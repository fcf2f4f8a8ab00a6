"""One rank: it joins the others, loads its part of the model, proves it, and does step after step.

Rank 0 plans besides. A rank ends as soon as another one has: the kernel, the channels between ranks
and the collectives each tell it, whichever is first, and then all start anew. Who starts ranks, and
where its own process comes from, is not known here.
"""

import gc
import logging
import os
import queue
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from gpt.attention.selector import choose
from gpt.backends import linear_selector
from gpt.backends.cpu_packing import batch_invariant, pack, pack_as_bytes, weight_bytes
from gpt.backends.quantization_check import Drift
from gpt.batch import Batch
from gpt.checkpoint.logical_tensor import Checkpoint
from gpt.cpu.int8_linear import refuse_unfit
from gpt.dtypes import FLOAT_NAMES, FLOATS
from gpt.errors import CheckpointError, PreambleError
from gpt.formats.overrides import open_overridden, read_overrides
from gpt.model.gpt_model import GPT
from gpt.model.loading import check_dtype, device_of, load_model
from gpt.model.pipeline import forward
from gpt.model.reference_logits import Proof, find_proof, replay
from gpt.parallel.mesh import Mesh
from gpt.parallel.sharding import check_split
from gpt.parallel.symmetric_memory import quicken
from gpt.tokenizers.tokenizer import NullTokenizer, Tokenizer, open_tokenizer
from serving.config import ServerConfig
from serving.messages import (
    Close,
    Dump,
    Failed,
    FromPlanner,
    Halt,
    Load,
    Ready,
    Update,
    Warming,
    encode,
    to_planner,
    to_rank,
)
from serving.ranks.message_socket import Channel
from serving.ranks.rank_channels import Circle, Store, listen
from serving.ranks.rank_position import Place
from serving.scheduler.scheduler import Scheduler
from serving.worker.adapter_cache import fill_tokens_max
from serving.worker.engine_loop import Planner
from serving.worker.model_runner import Runner, blocks_that_fit

log = logging.getLogger(__name__)

T = TypeVar("T")

HALT = encode(Halt())
DOUBT_S = 0.3
PART_S = 5.0  # For the other ranks to end in order.


class _Word(msgspec.Struct, frozen=True):
    """What a rank says of each part of its start; rank 0 answers with what all have said."""

    error: str = ""
    refused: bool = False
    shared: bool = False  # It shares its device with another rank.
    blocks: int = 0
    weight_bytes: int = 0
    freed_bytes: int = 0  # Of those, since.
    proof: list[float] | None = None
    drift: list[float] | None = None


_word = msgspec.json.Decoder(_Word).decode


@dataclass(frozen=True)
class Found:
    """What a rank knows from headers, before it loads."""

    checkpoint: Checkpoint
    proof: Proof | None
    tokenizer: Tokenizer
    device: torch.device
    neighbours: int  # Ranks that share this one's memory, this one counted.


class _AgreedError(Exception):
    """Some rank cannot go on, so none does. It has been told."""


class Rank:
    """`front` is rank 0's channel to the front end; `host` where the others reach rank 0.

    `drain` is called on rank 0 when some rank was asked to end.
    """

    def __init__(
        self,
        place: Place,
        config: ServerConfig,
        store: Store,
        host: str,
        front: Channel | None = None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        self._place, self._config, self._store = place, config, store
        self._front = front
        self._leaving = False
        self._planner: Planner | None = None
        self._orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._drain = drain
        self._circle = Circle.join(
            store, place, host, config.load_s, ended=self._alone, asked=drain
        )
        if front is not None:
            listen({0: front}, lambda _, frame: self._obey(frame), lambda _: self._forsaken())

    def run(self) -> int:
        """Until the end is asked for. The exit code."""
        try:
            runner = self._prepare()
        except _AgreedError:
            return 1
        gc.collect()
        gc.freeze()  # What is here stays. To look through it again holds up a step for 0.1 s.
        runner.populate()
        if self._place.rank > 0:
            return self._follow(runner)
        assert self._planner is not None
        if self._planner.run() is not None:
            return 1
        self._leaving = True
        self._circle.part(PART_S)
        return 0

    def ask_to_drain(self) -> None:
        """From any thread: this rank was asked to end."""
        if self._place.rank == 0:
            self._drain()
        else:
            self._circle.ask()

    # ----------------------------------------------------------------------------- up to the steps

    def _prepare(self) -> Runner:
        config, place = self._config, self._place
        found, words = self._together(lambda: find(config, place))
        mesh = self._join(found, shared=any(word.shared for word in words))
        model, loaded = self._together(lambda: self._load(found, mesh))
        _, words = self._together(lambda: (None, self._measure(model, found)))
        blocks = min(word.blocks for word in words)
        runner = Runner(
            model,
            config,
            blocks=blocks,
            slots=config.running_requests_max,
            tokenizer=found.tokenizer,
        )
        if place.rank == 0:
            weight_bytes = sum(word.weight_bytes for word in loaded)
            weight_bytes -= sum(word.freed_bytes for word in words)
            proofs = [word.proof for word in words if word.proof is not None]
            drifts = [word.drift for word in words if word.drift is not None]
            known = (proofs[-1] if proofs else None, drifts[-1] if drifts else None)
            self._lead(runner, weight_bytes, *known)
        return runner

    def _join(self, found: Found, shared: bool) -> Mesh:
        config, place = self._config, self._place
        backend = "nccl" if found.device.type == "cuda" and not shared else "gloo"
        if place.ranks == 1:
            return Mesh.single(found.device)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("torch", self._store),  # type: ignore[attr-defined,arg-type]
            rank=place.rank,
            world_size=place.ranks,
            timeout=timedelta(seconds=config.load_s),
        )
        mesh = Mesh.create(config.tp, config.pp, device=found.device)
        return quicken(mesh) if found.device.type == "cuda" else mesh

    def _load(self, found: Found, mesh: Mesh) -> tuple[GPT, _Word]:
        model = load(found.checkpoint, mesh, self._config)
        size = sum(parameter.nbytes for parameter in model.parameters())
        if not self._config.narrow:
            arrange(model, self._config)
        return model, _Word(weight_bytes=size)

    def _measure(self, model: GPT, found: Found) -> _Word:
        """Prove the model, and see what memory is left beside it.

        It is proved in the form that answers, but before its weights lose digits; what that
        changes all ranks find out together, so none may have failed to load.
        """
        proof = None if found.proof is None else prove(model, found.checkpoint, found.proof)
        arranged = arrange(model, self._config) if self._config.narrow else Arranged()
        return _Word(
            blocks=blocks_that_fit(model, self._config, neighbours=found.neighbours),
            proof=proof,
            freed_bytes=arranged.freed_bytes,
            drift=arranged.told,
        )

    def _together(self, work: Callable[[], tuple[T, _Word]]) -> tuple[T, list[_Word]]:
        """Do something that may fail, and go on only if no rank has failed."""
        try:
            result, word = work()
        except PreambleError as error:
            self._agree(_Word(str(error), refused=True))
        except Exception as error:
            log.exception("event=rank_failed")
            self._agree(_Word(f"rank {self._place.rank}: {type(error).__name__}: {error}"))
        else:
            return result, self._agree(word)
        raise AssertionError("a failure was agreed upon")

    def _agree(self, word: _Word) -> list[_Word]:
        """Every rank's word, in their order, if none of them is an error."""
        if self._place.rank > 0:
            self._circle.say(msgspec.json.encode(word))
            frame = self._circle.hear(0)
            return msgspec.json.decode(frame, type=list[_Word])
        others = range(1, self._place.ranks)
        words = [word, *(_word(self._circle.hear(rank)) for rank in others)]
        errors = [one for one in words if one.error]
        if errors:
            first = min(errors, key=lambda one: not one.refused)
            self._give(Failed(first.error, first.refused))
            raise _AgreedError
        self._circle.say(msgspec.json.encode(words))
        return words

    # ------------------------------------------------------------------------------------ the steps

    def _lead(
        self,
        runner: Runner,
        weight_bytes: int,
        proof: list[float] | None,
        drift: list[float] | None,
    ) -> None:
        config, network = self._config, runner.model.config
        scheduler = Scheduler(
            vocab_size=network.vocab_size,
            blocks=runner.blocks,
            config=config,
            context_tokens_max=network.max_position_embeddings,
            stages=config.pp,
            fill_tokens_max=fill_tokens_max(network),
            ahead=config.steps_ahead(runner.model.mesh.device.type),
        )
        last = self._place.ranks - config.tp
        self._planner = Planner(
            scheduler,
            runner,
            config,
            self._give,
            send_step=self._order if self._place.ranks > 1 else None,
            take_outcome=(lambda: self._circle.hear(last)) if last > 0 else None,
        )
        self._give(Warming())
        warm = self._planner.warm_up()
        # How long first steps took tells the front end what to expect of the next ones.
        tokens = config.step_tokens_max
        self._give(Update([], Load(), step_tokens=tokens))
        self._give(Update([], Load(), seconds=warm.chunk_ms_per_token * tokens / 1000))
        ready = Ready(
            kv_tokens=(runner.blocks - 1) * config.kv_block_tokens,
            weight_bytes=weight_bytes,
            dtype=FLOAT_NAMES[runner.model.dtype],
            proof=proof,
            drift=drift,
            batch_invariant=batch_invariant(runner.model),
        )
        self._give(ready)

    def _follow(self, runner: Runner) -> int:
        while True:
            order = to_rank(self._circle.hear(0))
            if isinstance(order, Halt):
                self._leaving = True
                return 0
            try:
                outcome = runner.run(order)
            except RuntimeError:
                # If a collective has failed since a rank is dead, that is said elsewhere, and ends
                # this one; a stack from each rank would only hide it.
                time.sleep(DOUBT_S)
                raise
            if outcome is not None:
                self._circle.say(encode(outcome))

    def _order(self, frame: bytes) -> None:
        # After a failure no rank may end in good order, or torchrun would take the run for done.
        if self._leaving or frame != HALT:
            self._circle.say(frame)

    def _give(self, message: FromPlanner) -> None:
        if self._front is not None:
            self._front.send(encode(message))

    def _obey(self, frame: bytes) -> None:
        message = to_planner(frame)
        planner = self._planner
        if isinstance(message, Dump):
            # Here and now: the planner may be stuck, and that is when it is wanted.
            if planner is not None:
                planner.write_flight(message.path, "asked", ids=message.ids)
        elif isinstance(message, Close):
            self._leaving = True
            if planner is None:
                os._exit(0)
            planner.put(message)
        elif planner is not None:
            planner.put(message)

    # ------------------------------------------------------------------------------------- the ends

    def _alone(self, rank: int) -> None:
        """Another rank has ended, or rank 0 has. Nothing here can go on, wherever it stands."""
        if self._leaving:
            return
        if self._place.rank == 0:
            reason = f"rank {rank} has ended"
            if self._planner is not None:
                self._planner.write_crash(reason)
            self._give(Failed(reason))
        log.error("event=ending reason='rank %d has ended'", rank)
        leave(1)

    def _forsaken(self) -> None:
        if not self._leaving:
            log.error("event=ending reason='the front end has gone'")
            leave(1)


def find(config: ServerConfig, place: Place) -> tuple[Found, _Word]:
    """Refuses what headers tell already."""
    check_dtype(config.dtype)
    device, neighbours, shared = _device(config.device, place)
    changes = read_overrides(config.config_json, config.true_vocab_size)
    checkpoint = open_overridden(config.model, changes, config.tokenizer)
    check_split(checkpoint.config, config.tp, config.pp)
    proof = find_proof(checkpoint) if config.prove else None
    tokenizer: Tokenizer = NullTokenizer(checkpoint.config.vocab_size)
    if checkpoint.tokenizer is not None:
        tokenizer = open_tokenizer(checkpoint.tokenizer)
    found = Found(checkpoint, proof, tokenizer, device, neighbours)
    return found, _Word(shared=shared)


def load(checkpoint: Checkpoint, mesh: Mesh, config: ServerConfig) -> GPT:
    """This rank's part of the model as it is stored, with the attention that it will have."""
    attention = choose(
        config.attention_backend,
        checkpoint.config,
        mesh.device,
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
    )
    dtype = FLOATS[config.dtype or checkpoint.config.dtype]
    linear_selector.check(config.linear_backend, config.te_recipe, mesh.device, dtype)
    if config.weights == "int8":
        refuse_unfit(mesh.device, dtype)
    model = load_model(
        checkpoint, mesh, dtype=config.dtype, attend=attention.attend, store=attention.store
    )
    return model.eval()


@dataclass(frozen=True)
class Arranged:
    """What the form of its weights has changed of a model, beside the time that it takes."""

    freed_bytes: int = 0
    drift: Drift | None = None  # Where weights became bytes; the last stage knows it.

    @property
    def told(self) -> list[float] | None:
        """For a message."""
        if self.drift is None:
            return None
        return [self.drift.divergence, self.drift.same_best, float(self.drift.places)]


def arrange(model: GPT, config: ServerConfig) -> Arranged:
    """Bring a loaded model's weights into the form that answers."""
    if model.mesh.device.type == "cuda":
        kinds = (config.linear_backend, config.te_recipe)
        return Arranged(*linear_selector.place(model, *kinds, config.divergence_max))
    if config.weights == "int8":
        before = weight_bytes(model)
        drift = pack_as_bytes(model, config.divergence_max)
        return Arranged(before - weight_bytes(model), drift)
    if config.linear_backend != "torch":
        pack(model)
    return Arranged()


def _device(name: str, place: Place) -> tuple[torch.device, int, bool]:
    """This rank's device, how many ranks share its memory, and whether they share the device."""
    device = device_of(name)
    if device.type == "cpu":
        return device, place.locals, False
    if device.index is not None:
        return device, place.locals, place.locals > 1
    count = torch.cuda.device_count()
    own = torch.device("cuda", place.local % count)
    torch.cuda.set_device(own)
    return own, -(-place.locals // count), place.locals > count


@torch.inference_mode()
def prove(model: GPT, checkpoint: Checkpoint, proof: Proof) -> list[float] | None:
    """Refuse a model that does not say what its source did. The last stage knows, and answers."""
    mesh = model.mesh

    def logits_of(ids: Tensor) -> Tensor:
        rows, columns = ids.shape
        batch = Batch.plain((columns,) * rows, mesh.device)
        logits = forward(model, ids.flatten().to(mesh.device), batch)
        assert logits is not None, "only the last stage has logits"
        return logits.view(rows, columns, -1)

    if not model.last:
        batch = Batch.plain((proof.ids.shape[1],) * len(proof.ids), mesh.device)
        forward(model, proof.ids.flatten().to(mesh.device), batch)
        return None
    found = replay(proof, logits_of, checkpoint, FLOAT_NAMES[model.dtype])
    log.info(
        "event=proof_replayed difference=%.3g limit=%g best=%d/%d dtype=%s",
        *(found.largest, found.limit, found.best, found.places, found.dtype),
    )
    if not found.same:
        path = checkpoint.path
        raise CheckpointError(
            f"{path} does not give the logits that its proof has of its source: "
            f"{found.sentence}; find the tensors that differ with `preamble verify SOURCE "
            f"{path}`, or start it all the same with --no-prove (prove: false)"
        )
    return [found.largest, found.limit, float(found.best), float(found.places)]


def share_cores(place: Place, *, said: bool) -> None:
    """As many threads as there are cores for each rank of the node, or as the user has `said`."""
    number = os.environ.get("OMP_NUM_THREADS", "") if said else ""
    torch.set_num_threads(int(number) if number.isdecimal() else max(1, _cores() // place.locals))


def _cores() -> int:
    """Those that this process may use: a container's share, which torch does not look at."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else min(cores, -(-int(quota) // int(period)))


def leave(code: int) -> NoReturn:
    """At once: threads may be stuck in collectives, and torch's own goodbye waits for peers."""
    sys.stderr.flush()
    os._exit(code)
