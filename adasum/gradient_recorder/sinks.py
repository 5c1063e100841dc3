"""Where recorded steps may go, by `on_step`: TensorBoard, and Weights & Biases."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Any

from adasum.gradient_recorder.rows import RecordedStep

_PREFIX = "gradients"


def _scalars(record: RecordedStep) -> Iterator[tuple[str, float]]:
    for row in record.rows:
        yield f"{_PREFIX}/{row.name}/orthogonality", row.orthogonality
        yield f"{_PREFIX}/{row.name}/noise scale", row.noise_scale
        for rank, (norm, agreement) in enumerate(zip(row.norms, row.agreements, strict=True)):
            yield f"{_PREFIX}/{row.name}/norm of rank {rank}", norm
            yield f"{_PREFIX}/{row.name}/agreement of rank {rank}", agreement


class TensorBoardSink:
    """Writes each recorded step to TensorBoard, alarms as text; use it on one rank.

    Args:
        writer: A SummaryWriter, or the folder for one of its own.

    Raises:
        ImportError: `writer` is a folder, and tensorboard is not installed.
    """

    def __init__(self, writer: str | PathLike[str] | Any) -> None:
        if isinstance(writer, str | PathLike):
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ImportError(
                    "TensorBoardSink needs tensorboard: pip install tensorboard"
                ) from error
            writer = SummaryWriter(str(writer))
        self._writer = writer

    def __call__(self, record: RecordedStep) -> None:
        """Write a step."""
        for tag, value in _scalars(record):
            self._writer.add_scalar(tag, value, record.step)
        for alarm in record.alarms:
            self._writer.add_text(f"{_PREFIX}/alarms", str(alarm), record.step)


class WandbSink:
    """Logs each recorded step to Weights & Biases, and calls its alert for alarms; for one rank.

    The step is logged as "gradients/step", beside which wandb draws what has no step of its own.

    Args:
        run: What `wandb.init` returned; the run that is active unless given.

    Raises:
        ImportError: There is no `run`, and wandb is not installed.
        RuntimeError: There is no `run`, and none is active.
    """

    def __init__(self, run: Any = None) -> None:
        if run is None:
            try:
                import wandb
            except ImportError as error:
                raise ImportError("WandbSink needs wandb: pip install wandb") from error
            run = wandb.run
            if run is None:
                raise RuntimeError("no run of wandb is active: call wandb.init() first")
        self._run = run

    def __call__(self, record: RecordedStep) -> None:
        """Log a step."""
        self._run.log({**dict(_scalars(record)), f"{_PREFIX}/step": record.step})
        for alarm in record.alarms:
            self._run.alert(title=f"adasum: {alarm.kind}", text=str(alarm))
