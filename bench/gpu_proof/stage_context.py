"""Stage context of a GPU proof: the device and the figures file of a stage, and its failure."""

from dataclasses import dataclass

from bench.gpu_proof.stage_runner import FiguresFile


class StageFailure(Exception):
    """A stage ran, and its figures show a fault."""


@dataclass(frozen=True)
class StageContext:
    """What the function of a stage gets."""

    device: str  # "cuda" or "cpu".
    figures: FiguresFile
    ranks: int = 1  # More than one: the proof of a node.

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"
