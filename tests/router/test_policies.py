import random
from collections import Counter

import pytest

from paceline.proto.errors import StartupError
from paceline.proto.load import ReplicaLoad
from paceline.proto.request import Request, SamplingParams
from paceline.router.policies import POLICIES, least_loaded, policy_of

REQUEST = Request(request_id="r", prompt_ids=[5], params=SamplingParams(seed=1))


class Replica:
    def __init__(self, replica_id, in_flight=0, **load):
        self.replica_id, self.in_flight, self.load = replica_id, in_flight, ReplicaLoad(**load)


def picks(policy, replicas, count):
    return [policy(replicas, REQUEST).replica_id for _ in range(count)]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_picks_the_only_one(name):
    assert picks(policy_of(name, random.Random(1)), [Replica("a", 9)], 3) == ["a"] * 3


def test_round_robin_takes_turns_in_whatever_order_they_are_listed():
    policy = policy_of("round_robin", random.Random(1))
    a, b, c = Replica("a"), Replica("b", 50), Replica("c")
    assert picks(policy, [c, a, b], 4) == ["a", "b", "c", "a"]
    assert picks(policy, [c, a], 2) == ["c", "a"]  # b has gone
    assert picks(policy, [b, c, a], 2) == ["b", "c"]  # and come back


def test_least_loaded_goes_by_choices_ahead_then_tokens_then_id():
    def pick(*replicas):
        both = {least_loaded(list(order), REQUEST).replica_id for order in (replicas, replicas[::-1])}
        assert len(both) == 1, "the order of the list must not matter"
        return both.pop()

    assert pick(Replica("a", 2), Replica("b", 1)) == "b"
    assert pick(Replica("a", 0, running=4, waiting=1), Replica("b", 3)) == "b"
    assert pick(Replica("a", 1, queued_tokens=900), Replica("b", 1, queued_tokens=10)) == "b"
    assert pick(Replica("b"), Replica("a")) == "a"


def test_least_loaded_fills_the_valleys():
    policy = policy_of("least_loaded", random.Random(1))
    replicas = [Replica(name, in_flight) for name, in_flight in (("a", 3), ("b", 0), ("c", 1))]
    for _ in range(8):
        policy(replicas, REQUEST).in_flight += 1
    assert [replica.in_flight for replica in replicas] == [4, 4, 4]


def test_power_of_two_never_takes_the_worst_and_spreads():
    policy = policy_of("power_of_two", random.Random(7))
    counts = Counter(picks(policy, [Replica("a", 0), Replica("b", 1), Replica("c", 2), Replica("d", 3)], 2000))
    assert counts["d"] == 0
    assert counts["a"] > counts["b"] > counts["c"] > 200


def test_power_of_two_depends_on_its_draws_alone():
    replicas = [Replica(name) for name in "abcdef"]
    runs = [picks(policy_of("power_of_two", random.Random(3)), order, 50) for order in (replicas, replicas[::-1])]
    assert runs[0] == runs[1]


def test_an_unknown_name_says_which_there_are():
    with pytest.raises(StartupError, match="least_loaded, power_of_two, round_robin"):
        policy_of("fastest", random.Random(1))
