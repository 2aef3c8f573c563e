"""What it costs to have ranks in processes of their own: a plan out to each and one result back, without a model."""

import statistics
import time

from paceline.cluster.gang import load_gang
from paceline.proto.step import StepPlan, column
from tests.cluster.fake_rank import ECHO, gang_config, launcher_of

WARM_UP = 50  # steps that do not count


def round_trip(num_ranks: int, num_rows: int, steps: int = 1000) -> float:
    """Median, in microseconds, of submit and collect for a plan of so many rows that decode."""
    config = gang_config(num_ranks)
    launcher = launcher_of(config, ECHO)
    try:
        executor = load_gang(config, launcher, lambda phase, seconds: None, host="127.0.0.1").executor
        times = []
        for step_id in range(WARM_UP + steps):
            began = time.perf_counter()
            executor.submit(decode_plan(step_id, num_rows))
            result = executor.collect()
            times.append(time.perf_counter() - began)
            assert result.step_id == step_id
        executor.close()
    finally:
        launcher.kill()
    return 1e6 * statistics.median(times[WARM_UP:])


def decode_plan(step_id: int, num_rows: int) -> StepPlan:
    rows = column(range(num_rows))
    return StepPlan(
        step_id=step_id,
        chunk_slots=rows,
        chunk_epochs=rows,
        chunk_starts=rows,
        chunk_lens=rows,
        chunk_tokens=rows,
        chunk_takes=rows,
        chunk_writes=rows,
        num_drafts=rows,
    )


if __name__ == "__main__":
    for num_ranks in (2, 4):
        for num_rows in (1, 64):
            print(f"{num_ranks} ranks, {num_rows} rows: {round_trip(num_ranks, num_rows):.0f} µs")
