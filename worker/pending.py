"""A step that a rank's device was told to do, and how its result comes back to the host."""

import time
from array import array
from dataclasses import dataclass, field

import numpy as np

from paceline.proto.request import TokenLogprobs
from paceline.proto.step import StepPlan, StepResult
from paceline.worker.batch import Batch
from paceline.worker.logprobs import Logprobs
from paceline.worker.pinned import enqueued_event
from paceline.worker.sampler import Drawn

NOT_FINITE = "the model's logits are not finite"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step left on the device. ``drawn`` is None where no row draws, and on ranks that do not sample.

    prompt_logprobs: by batch row. faults: by draw, what is known before the ids are.
    """

    batch: Batch
    drawn: Drawn | None = None
    prompt_logprobs: Logprobs | None = None
    faults: dict[int, str] = field(default_factory=dict)


class PendingStep:
    """``result`` waits for the step; on a CPU it is done already.

    On a GPU what was drawn is copied to the host right behind the step, into pinned memory, and an event marks that
    point: a later step that is enqueued before somebody asks for this result does not delay it.
    """

    def __init__(self, plan: StepPlan, outcome: Outcome, seconds: float = 0.0):
        """``seconds``: spent on the step so far."""
        self._plan, self._outcome, self._seconds = plan, outcome, seconds
        self._drawn = outcome.drawn and outcome.drawn.pinned()
        self._prompt_logprobs = outcome.prompt_logprobs and outcome.prompt_logprobs.pinned()
        self._event = enqueued_event(outcome.batch.ids)

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
        batch, plan_rows = self._outcome.batch, self._outcome.batch.order
        num_ids, ids = np.zeros(len(plan_rows), np.int32), np.zeros(len(plan_rows), np.int32)
        logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        faults: dict[int, str] = {}
        if self._prompt_logprobs is not None:
            told = self._prompt_logprobs.by_row()
            prompt_logprobs = {int(plan_rows[row]): tokens for row, tokens in told.items()}
            broken = self._prompt_logprobs.rows[~np.isfinite(self._prompt_logprobs.own.numpy())]
            faults = {int(row): NOT_FINITE for row in plan_rows[broken]}
        if self._drawn is not None:
            drawing = plan_rows[batch.samples]
            faults |= {int(drawing[draw]): text for draw, text in self._outcome.faults.items()}
            finite = np.isfinite(self._drawn.peaks.numpy())
            if not finite.all():
                faults |= {int(row): NOT_FINITE for row in drawing[~finite]}
            num_ids[drawing] = 1
            if faults:
                num_ids[list(faults)] = 0
            ids[drawing] = self._drawn.ids.numpy()
            if self._drawn.logprobs is not None:
                told = self._drawn.logprobs.by_row()
                logprobs = {int(drawing[draw]): tokens for draw, tokens in told.items() if num_ids[drawing[draw]]}
        return StepResult(
            step_id=self._plan.step_id,
            epochs=self._plan.chunk_epochs,
            num_ids=_array(num_ids),
            ids=_array(ids[num_ids > 0]),
            logprobs=logprobs,
            prompt_logprobs={row: tokens for row, tokens in prompt_logprobs.items() if row not in faults},
            faults=faults,
            model_seconds=self._seconds + time.perf_counter() - began,
        )


def _array(values: np.ndarray) -> array:
    """values: int32."""
    return array("i", values.tobytes())
