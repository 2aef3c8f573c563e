"""What forbids a start, and how it is said."""

import msgspec
import pytest

from paceline.cluster.messages import Facts, Hello
from paceline.cluster.preflight import Report, problems, table

GIB = 1 << 30
HELLO = Hello(
    index=0,
    host="a",
    node="a",
    ip="10.0.0.1",
    interface="eth0",
    pid=100,
    cores=8,
    devices="",
    free_shared_memory=GIB,
    python="3.11",
    paceline="0.1.0",
    step_schema="schema-1",
)
FACTS = Facts(
    device_kind="cuda",
    device_name="H200",
    free_device_memory=140 * GIB,
    free_host_memory=100 * GIB,
    torch="2.13.0",
    dtype="bfloat16",
    backend="triton",
    model="0123456789abcdef",
)


def gang(*changes: dict) -> list[Report]:
    """One report for each dict of what differs from the usual; each has a GPU of its own unless it says otherwise."""
    reports = []
    for rank, change in enumerate(changes):
        hello = {name: value for name, value in change.items() if name in Hello.__struct_fields__}
        facts = {"device_id": f"GPU-{rank}"} | {name: change[name] for name in change if name not in hello}
        reports.append(Report(rank, msgspec.structs.replace(HELLO, **hello), msgspec.structs.replace(FACTS, **facts)))
    return reports


def found(*changes: dict, tp: int = 2, step_schema: str = "schema-1") -> list[str]:
    return problems(gang(*changes), tensor_parallel_size=tp, step_schema=step_schema)


B = {"host": "b", "node": "b", "ip": "10.0.0.2"}


def test_a_gang_that_agrees_has_no_problem():
    assert found({}, {}) == []
    assert found({}, {}, B, B) == []  # two stages, each on a host


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"torch": "2.9.0"}, ["torch", "2.13.0 on rank 0 (a)", "2.9.0 on rank 1 (b)"]),
        ({"python": "3.12"}, ["Python", "3.11 on rank 0 (a)", "3.12 on rank 1 (b)"]),
        ({"paceline": "0.2.0"}, ["paceline", "0.1.0 on rank 0 (a)", "0.2.0 on rank 1 (b)"]),
        ({"dtype": "float32"}, ["dtype", "bfloat16 on rank 0 (a)", "float32 on rank 1 (b)", "--dtype"]),
        ({"backend": "torch"}, ["attention", "triton on rank 0 (a)", "torch on rank 1 (b)", "--attention-backend"]),
        ({"device_kind": "cpu"}, ["device", "cuda on rank 0 (a)", "cpu on rank 1 (b)", "--device"]),
        ({"model": "fedcba98"}, ["model's files", "0123456789abcdef on rank 0 (a)", "fedcba98 on rank 1 (b)"]),
        ({"step_schema": "schema-2"}, ["step schema", "rank 1 (b)", "schema-2", "schema-1"]),
        ({"trouble": "/models/x does not exist."}, ["rank 1 (b): /models/x does not exist"]),
    ],
)
def test_what_differs_is_named_with_both_values_and_who_has_them(change, told):
    (problem,) = found({}, B | change, tp=1)
    for words in told:
        assert words in problem


def test_ranks_that_agree_but_not_with_their_engine_are_refused():
    (problem,) = found({}, {}, step_schema="schema-0")
    assert "ranks 0 (a), 1 (a)" in problem
    assert "schema-0" in problem


def test_one_trouble_of_many_ranks_is_told_once():
    trouble = {"trouble": "/models/x does not exist."}
    assert found(trouble, trouble) == ["all ranks: /models/x does not exist"]


def test_what_a_rank_in_trouble_could_not_find_out_is_no_difference():
    trouble = {"trouble": "no CUDA here", "model": "", "dtype": "", "backend": "", "device_kind": ""}
    assert found({}, trouble) == ["rank 1 (a): no CUDA here"]


def test_a_stage_on_two_hosts_is_refused():
    (problem,) = found({}, B)
    assert "stage 0 lies on several hosts, ranks 0 (a), 1 (b)" in problem
    assert "--pipeline-parallel-size" in problem
    assert found({}, B, tp=1) == []


def test_two_ranks_on_one_gpu_are_refused_and_two_cpus_are_not():
    (problem,) = found({"device_id": "GPU-7"}, {"device_id": "GPU-7"})
    assert "ranks 0 (a), 1 (a) were given the same H200" in problem
    assert found({"device_id": ""}, {"device_id": ""}) == []


def test_shared_memory_is_counted_for_each_host():
    needs = {"shared_memory_needed": 40 << 20, "free_shared_memory": 64 << 20}
    assert found(needs, needs | B, tp=1) == []
    (problem,) = found(needs, needs)
    assert "/dev/shm on a has 64 MiB free, its 2 ranks need 80 MiB" in problem


def test_a_loopback_address_is_refused_once_there_is_another_host():
    local = {"ip": "127.0.0.1"}
    assert found(local, local) == []
    (problem,) = found(local, B, tp=1)
    assert "rank 0 (a) can be reached from its own host only (127.0.0.1)" in problem


def test_every_problem_is_told():
    assert len(found({}, B | {"torch": "2.9.0", "dtype": "float32"})) == 3


def test_the_table_has_a_line_for_each_rank_with_what_it_found():
    lines = table(gang({}, B | {"trouble": "no CUDA here", "device_name": "", "model": ""})).splitlines()
    assert len(lines) == 3
    for words in (
        "0",
        "a",
        "10.0.0.1 eth0",
        "H200",
        "140.0 GiB",
        "1.0 GiB",
        "2.13.0",
        "bfloat16",
        "triton",
        "01234567",
    ):
        assert words in lines[1]
    assert lines[2].split()[:2] == ["1", "b"]
