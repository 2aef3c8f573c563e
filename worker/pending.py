"""A step that a rank's device was told to do, and how its result comes back to the host."""

import time
from array import array

import numpy as np
import torch

from paceline.proto.step import StepPlan, StepResult, column
from paceline.worker.batch import Batch
from paceline.worker.sampler import Drawn, Logprobs


class PendingStep:
    """``result`` waits for the step; on a CPU it is done already.

    On a GPU what was drawn is copied to the host right behind the step, into pinned memory, and an event marks that
    point: a later step that is enqueued before somebody asks for this result does not delay it.
    """

    def __init__(self, plan: StepPlan, batch: Batch, drawn: Drawn | None, seconds: float = 0.0):
        """``drawn``: None where no row draws, or another rank does. ``seconds``: spent on the step so far."""
        self._plan, self._batch, self._seconds = plan, batch, seconds
        self._event: torch.cuda.Event | None = None
        self._drawn = drawn
        if batch.ids.is_cuda:
            self._drawn = None if drawn is None else _to_host(drawn)
            self._event = torch.cuda.Event()
            self._event.record()

    def is_done(self) -> bool:
        """Whether ``result`` would return without waiting."""
        return self._event is None or self._event.query()

    def result(self) -> StepResult:
        """One row per chunk, in the plan's order. Rows whose logits are not finite have no id and a fault.

        ``model_seconds`` is what this rank's thread spent on the step, enqueueing and waiting.
        """
        began = time.perf_counter()
        if self._event is not None:
            self._event.synchronize()
        rows = len(self._plan.chunk_slots)
        num_ids, ids = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        logprobs, faults = {}, {}
        if self._drawn is not None:
            plan_rows = self._batch.order[self._batch.samples]
            fine = np.isfinite(self._drawn.peaks.numpy())
            num_ids[plan_rows] = fine
            ids[plan_rows] = self._drawn.ids.numpy()
            faults = {int(row): "the model's logits are not finite" for row in plan_rows[~fine]}
            if self._drawn.logprobs is not None:
                told = self._drawn.logprobs.by_draw()
                logprobs = {int(plan_rows[draw]): [token] for draw, token in told.items() if fine[draw]}
        return StepResult(
            step_id=self._plan.step_id,
            epochs=self._plan.chunk_epochs,
            num_ids=_array(num_ids),
            ids=_array(ids[num_ids > 0]),
            logprobs=logprobs,
            faults=faults,
            model_seconds=self._seconds + time.perf_counter() - began,
        )


def _to_host(drawn: Drawn) -> Drawn:
    """Copies that are enqueued, not yet done."""
    told = drawn.logprobs
    if told is not None:
        told = Logprobs(told.rows, told.counts, _pinned(told.drawn), _pinned(told.top_ids), _pinned(told.top))
    return Drawn(_pinned(drawn.ids), _pinned(drawn.peaks), told)


def _pinned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _array(values: np.ndarray) -> array:
    result = column()
    result.frombytes(values.astype(np.int32).tobytes())
    return result
