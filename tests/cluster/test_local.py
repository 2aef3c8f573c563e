"""The executor of a one-rank replica, on a real tiny model: scheduler, executor and rank together."""

import random

import pytest

from paceline.cluster.engine.blocks import BlockPool
from paceline.cluster.engine.config import EngineConfig
from paceline.cluster.engine.scheduler import Scheduler
from paceline.cluster.local import LocalExecutor, load_local
from paceline.proto import hashing
from paceline.proto.errors import StartupError
from paceline.proto.request import Request, SamplingParams
from paceline.worker.config import RankConfig
from tests.cluster.engine.fakes import Drive
from tests.models import tiny_llama_folder

NUM_BLOCKS = 96


def rank_config(folder, **fields) -> RankConfig:
    defaults = {"dtype": "float32", "num_kv_blocks": NUM_BLOCKS, "max_num_seqs": 8, "num_threads": 1}
    return RankConfig(model=str(folder), served_model_name="tiny", **(defaults | fields))


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return load_local(rank_config(tiny_llama_folder(tmp_path_factory.mktemp("tiny"))), lambda phase, seconds: None)


def requests_for(card) -> list[Request]:
    """Greedy and sampled, alone and forked, with a shared prefix, around the borders of blocks."""
    random_ids = random.Random(7)
    shared = [random_ids.randrange(3, card.vocab_size) for _ in range(64)]
    root, requests = hashing.root_of(card), []
    for index, length in enumerate((1, 15, 16, 17, 33, 48, 64, 90)):
        tail = [random_ids.randrange(3, card.vocab_size) for _ in range(length)]
        prompt = shared[: 32 * (index % 2)] + tail
        params = SamplingParams(
            seed=100 + index, n=1 + index % 3, max_tokens=24, temperature=0.0 if index % 4 < 2 else 0.9
        )
        requests.append(
            Request(
                request_id=f"r{index}",
                prompt_ids=prompt,
                params=params,
                cache_root=root,
                block_hashes=hashing.prompt_hashes(root, prompt, card.block_size),
            )
        )
    return requests


def run(loaded, requests: list[Request], num_blocks: int = NUM_BLOCKS, **config) -> Drive:
    """All requests at once through a scheduler of its own. Blocks are handed out in a shuffled order."""
    free_ids = list(range(1, num_blocks + 1))
    random.Random(3).shuffle(free_ids)
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "check": True}
    card = loaded.card
    settings = EngineConfig(
        num_blocks=num_blocks,
        block_size=card.block_size,
        max_model_len=card.max_model_len,
        eos_ids=card.eos_ids,
        **(defaults | config),
    )
    drive = Drive(Scheduler(settings, BlockPool(num_blocks, free_ids)), loaded.executor)
    drive.add(*requests)
    return drive.run()


@pytest.fixture(scope="module")
def alone(loaded) -> dict[tuple[str, int], list[int]]:
    """The ids of each request by itself, one plan at a time, without the prefix cache."""
    emitted = {}
    for request in requests_for(loaded.card):
        emitted |= run(loaded, [request], max_num_batched_tokens=512, enable_prefix_caching=False).emitted
    return emitted


@pytest.mark.parametrize("depth", [1, 2])
def test_ids_do_not_depend_on_depth_or_company(loaded, alone, depth):
    drive = run(loaded, requests_for(loaded.card), depth=depth)
    assert drive.emitted == alone
    assert drive.scheduler.counters.cached > 0  # prompts did share their prefix
    assert drive.scheduler.counters.copies > 0  # and forks their last block


@pytest.mark.parametrize("depth", [1, 2])
def test_ids_survive_preemption(loaded, alone, depth):
    drive = run(loaded, requests_for(loaded.card), num_blocks=14, depth=depth)
    assert drive.emitted == alone
    assert drive.scheduler.counters.preemptions > 0
    assert drive.scheduler.counters.recomputed > 0


def test_results_come_in_the_order_of_plans(loaded):
    requests = requests_for(loaded.card)[:2]
    scheduler = Scheduler(
        EngineConfig(num_blocks=NUM_BLOCKS, block_size=16, max_model_len=loaded.card.max_model_len, depth=2)
    )
    for request in requests:
        scheduler.add(request, 0.0)
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    for plan in plans:
        loaded.executor.submit(plan)
    assert [loaded.executor.collect().step_id for _ in plans] == [plan.step_id for plan in plans]


def test_what_is_loaded_is_told_with_its_phases(tmp_path):
    phases = []
    loaded = load_local(rank_config(tiny_llama_folder(tmp_path)), lambda phase, seconds: phases.append(phase))
    assert isinstance(loaded.executor, LocalExecutor)
    assert loaded.num_blocks == NUM_BLOCKS
    assert loaded.card.name == "tiny"
    assert f"{NUM_BLOCKS} blocks of 16 tokens" in loaded.description
    assert {"open", "weights", "kv pool", "warm-up"} <= set(phases)


def test_a_folder_without_a_model_is_a_startup_error(tmp_path):
    with pytest.raises(StartupError, match=str(tmp_path)):
        load_local(rank_config(tmp_path), lambda phase, seconds: None)
