"""A gang whose ranks are real processes but compute nothing: they keep what plans say, and one draws scripted ids.

How a rank misbehaves rides in its config's ``model``: lines of "RANK,WHAT,PHASE", as in "1,hang,weights".
"""

import hashlib
import os
import signal
import time
from pathlib import Path

import msgspec

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.gang import PHASES
from paceline.cluster.messages import Assign, Facts, Go, Ready
from paceline.cluster.spawn import ChildLauncher
from paceline.proto.codec import encode_step
from paceline.proto.errors import StartupError
from paceline.proto.load import RankMemory
from paceline.proto.step import StepPlan, StepResult
from paceline.worker.config import RankConfig
from tests.cluster.engine.fakes import FakeExecutor

WORK = "tests.cluster.fake_rank:FakeRank"
ECHO = "tests.cluster.fake_rank:EchoRank"
NUM_BLOCKS = 512
STEP = "step"  # the phase of plans: "1 die step 5" is at the plan of that number


class Done:
    def __init__(self, result: StepResult):
        self._result = result

    def is_done(self) -> bool:
        return True

    def result(self) -> StepResult:
        return self._result


class FakeRank:
    """A `rank_process.Work`. Into ``dump_dir`` each rank writes the hash of all plans that it was given, when it is
    closed, and an empty file when it meets the others."""

    def look(self, assign: Assign) -> Facts:
        config = self._config = assign.config
        self._rank, self._threads = assign.rank, assign.num_threads
        last_stage = (config.pipeline_parallel_size - 1) * config.tensor_parallel_size
        self.samples = assign.rank == last_stage
        self._executor, self._plans = FakeExecutor(), hashlib.sha256()
        facts = Facts(device_kind="cpu", device_name="fake", torch="2", dtype="float32", backend="fake", model="m")
        if (word := self._misbehave("pre-flight")) and "=" in word:
            name, value = word.split("=")
            facts = msgspec.structs.replace(facts, **{name: value})
        return facts

    def join(self, go: Go, interface: str) -> None:
        if self._config.dump_dir:
            Path(self._config.dump_dir, f"met-{self._rank}").touch()
        self._misbehave("groups")

    def load(self, on_phase) -> Ready:
        for phase in PHASES[3:]:
            self._misbehave(phase)
            on_phase(phase, float(self._rank))
        card = None
        if self.samples:
            from tests.cluster.drive import CARD as card
        return Ready(
            memory=RankMemory(rank=self._rank, weight_bytes=10 + self._rank, kv_bytes=20, kv_bytes_per_token=2),
            num_blocks=NUM_BLOCKS - self._rank,
            description=f"a fake of {self._threads} threads",
            card=card,
        )

    def execute(self, plan: StepPlan) -> Done:
        self._plans.update(encode_step(plan))
        self._misbehave(STEP, plan.step_id)
        self._executor.submit(plan)
        return Done(self._executor.collect())

    def close(self) -> None:
        if self._config.dump_dir:
            Path(self._config.dump_dir, f"plans-{self._rank}").write_text(self._plans.hexdigest())

    def _misbehave(self, phase: str, step_id: int = 0) -> str:
        for line in self._config.model.splitlines():
            rank, what, where, *more = line.split(",")
            if int(rank) != self._rank or where != phase or (more and int(more[0]) != step_id):
                continue
            if what == "hang":
                time.sleep(1000)
            elif what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            elif what == "refuse":
                raise StartupError("there is no such thing here")
            elif what == "break":
                raise RuntimeError("the device is gone")
            elif what == "slow":
                time.sleep(0.005)
            else:
                return what
        return ""


class EchoRank(FakeRank):
    """Looks at nothing: for measurements of all that is not a rank's work."""

    def execute(self, plan: StepPlan) -> Done:
        rows = plan.chunk_slots
        return Done(StepResult(step_id=plan.step_id, epochs=rows, num_ids=rows, ids=rows))


def gang_config(
    tensor: int = 2, pipeline: int = 1, *, misbehaviour: str = "", dump_dir: Path | None = None, **settings
) -> ReplicaConfig:
    """``misbehaviour``: lines "RANK,WHAT,PHASE" or "RANK,WHAT,step,STEP_ID"."""
    rank = RankConfig(
        model=misbehaviour,
        served_model_name="fake",
        max_num_seqs=16,
        max_num_batched_tokens=512,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        num_threads=1,
        dump_dir=str(dump_dir) if dump_dir else None,
    )
    return ReplicaConfig(rank=rank, **settings)


def launcher_of(config: ReplicaConfig, work: str = WORK) -> ChildLauncher:
    return ChildLauncher(config.rank.num_ranks, work)
