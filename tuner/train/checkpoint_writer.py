"""Saving between two steps, written there and then or by a thread while the next steps run.

The loop copies the parameters to host memory, which is one state of the run, and goes on. At most
one save is in flight, so states cannot mix and memory for one more copy is all that it takes. A
write that failed is raised at the next step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType

from mindspore import Parameter

from tuner.train.checkpoint import CheckpointFolder, Snapshot, take_snapshot
from tuner.train.state import TrainState


class CheckpointWriter:
    """Use it in a `with` block: leaving it waits for the save in flight."""

    def __init__(
        self, folder: CheckpointFolder, *, in_background: bool, saved_steps: int = 0
    ) -> None:
        """Open it; nothing is written yet.

        Args:
            folder: Where checkpoints go.
            in_background: Whether `save` returns while a thread writes.
            saved_steps: Steps of the checkpoint that the run goes on from; 0 without.
        """
        self._folder = folder
        self._in_background = in_background
        self._saved_steps = saved_steps
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._join()
        # What ended the run says more than a save that failed after it.
        if error is None:
            self.raise_failure()

    def save(
        self,
        state: TrainState,
        parameters: Sequence[Parameter],
        evaluation_loss: float | None = None,
        others: Snapshot | None = None,
    ) -> None:
        """Save a state; waits for the save before it.

        Args:
            state: Where the run stands.
            parameters: Of this rank.
            evaluation_loss: Of just these parameters; None if they were not evaluated.
            others: What other ranks have of their own, by `name_of_rank`, and moments that they
                keep.

        Raises:
            BadInputError: this one could not be written or, in the background, the one before.
        """
        self._join()
        self.raise_failure()
        snapshot = {**take_snapshot(parameters), **(others or {})}
        if not self._in_background:
            self._folder.write(state, snapshot, evaluation_loss)
            self._saved_steps = state.steps
            return
        self._thread = threading.Thread(
            target=self._write, args=(state, snapshot, evaluation_loss), name="checkpoint"
        )
        self._thread.start()

    def raise_failure(self) -> None:
        """Raise what a save in the background failed with, once; waits for nothing.

        Raises:
            BadInputError: it could not be written.
        """
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def last_saved_steps(self) -> int:
        """Steps of the newest checkpoint that is whole; waits for the save in flight."""
        self._join()
        return self._saved_steps

    def _write(self, state: TrainState, snapshot: Snapshot, evaluation_loss: float | None) -> None:
        try:
            self._folder.write(state, snapshot, evaluation_loss)
            self._saved_steps = state.steps
        except BaseException as error:
            self._failure = error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
