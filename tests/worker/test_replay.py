"""A rank that fails leaves a dump, and the dump runs again."""

import pytest
from llguidance import LLMatcher

from paceline.proto.errors import StartupError
from paceline.proto.request import SamplingParams
from paceline.worker import rank as rank_module
from paceline.worker.dump import read_dump
from paceline.worker.replay import replay
from tests.models import tiny_llama_folder
from tests.worker.drive import Driver, Row, rank_of

SEEDED = SamplingParams(seed=5, temperature=0.9)
BOUND = SamplingParams(seed=6, grammar=LLMatcher.grammar_from_regex("[0-9a-f]+"))
PROMPT = [(i * 11) % 384 for i in range(21)]


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_llama_folder(tmp_path_factory.mktemp("replay") / "model")


def crash(driver, tmp_path):
    """Fails the next step of the driver's sequence 0. Returns the dump."""

    def fail(plan):
        raise Broken("a kernel fell over")

    object.__setattr__(driver.rank, "runner", type("Runner", (), {"run": staticmethod(fail)}))
    with pytest.raises(Broken):
        driver.step(Row(0, 30, 1))
    [dump] = tmp_path.glob("*.dump")
    return dump


@pytest.mark.parametrize("params", [SEEDED, BOUND], ids=["seeded", "grammar"])
def test_a_failing_step_is_raised_and_its_plans_run_again_to_the_same_ids(folder, tmp_path, params):
    driver = Driver(rank_of(folder, dump_dir=str(tmp_path)))
    driver.generate(3, PROMPT[:9], 4)
    driver.admit(0, PROMPT, params)
    drawn = list(driver.prefill(0, 21, 8).ids) + [driver.step(Row(0, 21 + i, 1)).ids[0] for i in range(9)]
    dump = crash(driver, tmp_path)
    header, plans = read_dump(dump)
    assert header.error == "Broken: a kernel fell over"
    assert header.num_kv_blocks == 128
    assert plans[-1].step_id == driver.step_id
    steps = list(replay(dump))
    assert [step.step_id for step in steps] == [plan.step_id for plan in plans]
    assert [step.ids[0] for step in steps if 0 in step.ids][: len(drawn)] == drawn
    assert not any(step.num_left_out for step in steps)


def test_only_the_last_plans_are_kept_and_older_sequences_are_left_out(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(rank_module, "KEPT_PLANS", 6)
    driver = Driver(rank_of(folder, dump_dir=str(tmp_path)))
    driver.admit(1, PROMPT)
    driver.prefill(1, 21)
    driver.admit(0, PROMPT, SEEDED)
    drawn = list(driver.prefill(0, 21).ids)
    for i in range(4):
        result = driver.step(Row(1, 21 + i, 1), Row(0, 21 + i, 1))
        drawn.append(result.ids[1])
    steps = list(replay(crash(driver, tmp_path)))
    assert len(steps) == 6
    assert [step.num_left_out for step in steps] == [0, 1, 1, 1, 1, 0]
    assert [step.ids[0] for step in steps][:5] == drawn


def test_no_dump_is_written_where_none_is_wanted(folder, tmp_path):
    driver = Driver(rank_of(folder))
    driver.admit(0, PROMPT)
    driver.epochs[0] += 1
    with pytest.raises(AssertionError, match="another epoch"):
        driver.step(Row(0, 0, 21))
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_a_dump_is_refused(folder, tmp_path):
    junk = tmp_path / "junk"
    junk.write_bytes(b"\x05\x00\x00\x00hello")
    with pytest.raises(StartupError, match="not a dump"):
        read_dump(junk)
    driver = Driver(rank_of(folder, dump_dir=str(tmp_path)))
    driver.admit(0, PROMPT)
    dump = crash(driver, tmp_path)
    dump.write_bytes(dump.read_bytes()[:-3])
    with pytest.raises(StartupError, match="cut short"):
        read_dump(dump)
