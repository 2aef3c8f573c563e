"""Phases that follow each other."""

from paceline.proto.laps import Laps


def test_phases_are_told_in_order_and_none_begins_before_the_one_before_has_ended(monkeypatch):
    clock = iter((10.0, 12.0, 12.5))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    told = []
    laps = Laps(lambda phase, seconds: told.append((phase, seconds)))
    laps.lap("ray")
    laps.lap("controller")
    assert told == [("ray", 2.0), ("controller", 0.5)]
