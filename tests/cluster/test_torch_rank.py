"""A gang of real ranks in child processes: the door from rank_process.py to torch."""

import msgspec
import pytest

from paceline.cluster.config import ReplicaConfig
from paceline.cluster.gang import load_gang
from paceline.cluster.local import load_local
from paceline.cluster.messages import Assign
from paceline.cluster.spawn import ChildLauncher
from paceline.cluster.torch_rank import TorchRank
from paceline.proto.errors import ReplicaLost
from paceline.worker.config import RankConfig
from tests.cluster.engine.fakes import Drive, make_request, make_scheduler
from tests.models import tiny_llama_folder


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> RankConfig:
    """Of two ranks."""
    return RankConfig(
        model=str(tiny_llama_folder(tmp_path_factory.mktemp("model") / "tiny")),
        served_model_name="tiny",
        device="cpu",
        dtype="float32",
        num_threads=1,
        num_kv_blocks=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        tensor_parallel_size=2,
    )


def drive_of(executor, max_tokens: int) -> Drive:
    drive = Drive(make_scheduler(64, depth=2, max_model_len=256), executor)
    for i in range(3):
        drive.add(make_request(f"r{i}", prompt=[5 + i, 6, 7 * i, 9], max_tokens=max_tokens, named=False))
    return drive


def look(config: RankConfig, rank: int = 0):
    assign = Assign(rank=rank, local_rank=rank, num_threads=1, config=config, log_format="console", log_level="info")
    return TorchRank().look(assign)


def test_two_ranks_draw_the_ids_of_one_and_when_one_is_killed_both_end(config):
    alone = drive_of(load_local(msgspec.structs.replace(config, tensor_parallel_size=1), print).executor, 30).run()
    launcher = ChildLauncher(2)
    try:
        loaded = load_gang(ReplicaConfig(rank=config), launcher, lambda phase, seconds: None, host="127.0.0.1")
        assert drive_of(loaded.executor, 30).run().emitted == alone.emitted
        assert [held.rank for held in loaded.ranks] == [0, 1]
        assert loaded.num_blocks == 64
        drive = drive_of(loaded.executor, 200)
        drive.step()
        launcher.children[1].kill()
        with pytest.raises(ReplicaLost, match=r"^rank 1 .*SIGKILL"):
            drive.run()
        loaded.executor.close()
        assert None not in [child.returncode for child in launcher.children]
    finally:
        launcher.kill()


def test_what_a_rank_finds_is_the_same_on_all_but_for_its_place(config):
    first, second = look(config), look(config, 1)
    assert first.trouble == ""
    assert (first.device_kind, first.dtype, first.shared_memory_needed) == ("cpu", "float32", 0)
    assert len(first.model) == 64
    assert first.port > 0
    assert second.port == 0
    assert msgspec.structs.replace(
        second, port=first.port, free_device_memory=0, free_host_memory=0
    ) == msgspec.structs.replace(first, free_device_memory=0, free_host_memory=0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "/models/none"}, "/models/none does not exist"),
        ({"tensor_parallel_size": 99}, "--tensor-parallel-size 99"),
        ({"attention_backend": "none"}, "none"),
        ({"device": "abacus"}, "--device abacus"),
    ],
)
def test_what_a_rank_cannot_do_is_a_trouble_that_it_tells(config, change, words):
    assert words in look(msgspec.structs.replace(config, **change)).trouble
