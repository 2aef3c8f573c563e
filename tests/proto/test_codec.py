"""What goes through the wire comes out the same; equal steps are equal bytes."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.proto import codec, errors
from paceline.proto.load import RankMemory, ReplicaLoad
from paceline.proto.model import KVGroup, ModelCard
from paceline.proto.request import Request, SamplingParams, TokenDelta, TokenLogprobs, Usage
from paceline.proto.step import SlotInit, StepPlan, StepResult, column, schema_hash

token = st.integers(0, 2**31 - 1)
params = st.builds(
    SamplingParams,
    seed=st.integers(0, 2**64 - 1),
    n=st.integers(1, 8),
    max_tokens=st.none() | st.integers(1, 10**6),
    temperature=st.floats(0, 2),
    top_k=st.integers(0, 1000),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.1, 2),
    logit_bias=st.dictionaries(token, st.floats(-100, 100), max_size=3),
    stop_ids=st.lists(token, max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.none() | st.integers(0, 20),
)
requests = st.builds(
    Request,
    request_id=st.text(min_size=1, max_size=10),
    prompt_ids=st.lists(token, min_size=1, max_size=20),
    params=params,
    resume=st.lists(st.lists(token, max_size=3).map(tuple), max_size=2).map(tuple),
    tenant=st.text(max_size=5),
    priority=st.integers(-1000, 1000),
    queue_deadline=st.none() | st.floats(0, 1e10),
    first_token_deadline=st.none() | st.floats(0, 1e10),
    deadline=st.none() | st.floats(0, 1e10),
    cache_root=st.just(b"") | st.binary(min_size=32, max_size=32),
    block_hashes=st.lists(st.binary(min_size=32, max_size=32), max_size=3).map(tuple),
    traceparent=st.text(max_size=5),
    attempt=st.integers(0, 9),
)


@given(requests)
def test_a_request_survives_the_wire(request):
    raw = codec.submission_of(request, 7).SerializeToString()
    submission = type(codec.submission_of(request)).FromString(raw)
    assert submission.handle == 7
    assert codec.request_of(submission) == request


deltas = st.builds(
    TokenDelta,
    request_id=st.just("r"),
    choice=st.integers(0, 7),
    offset=st.integers(0, 10**6),
    ids=st.lists(token, max_size=4),
    logprobs=st.none()
    | st.lists(
        st.builds(TokenLogprobs, st.just(-0.5), st.lists(token, max_size=2), st.just([-0.5, -1.25])), min_size=1
    ),
    finish_reason=st.none(),
)
endings = st.builds(
    TokenDelta,
    request_id=st.just("r"),
    choice=st.integers(0, 7),
    offset=st.integers(0, 10**6),
    ids=st.lists(token, max_size=4),
    finish_reason=st.sampled_from(["stop", "length", "abort", "error"]),
    usage=st.builds(Usage, st.integers(0, 99), st.integers(0, 99), st.integers(0, 99)),
    error=st.none() | st.text(min_size=1, max_size=5),
    error_code=st.none() | st.sampled_from(["queue_timeout", "replica_lost"]),
)


@given(st.lists(st.tuples(st.integers(1, 2**63), deltas | endings), max_size=8))
def test_a_frame_of_deltas_survives_the_wire(rows):
    frame = codec.deltas_frame(rows)
    assert codec.deltas_of(type(frame).FromString(frame.SerializeToString()), lambda handle: "r") == rows


def test_a_step_survives_and_equal_steps_are_equal_bytes():
    def plan() -> StepPlan:
        init = SlotInit(
            slot=1, epoch=2, token_ids=column([1, 2]), num_prompt=2, choice=0, params=SamplingParams(seed=2**63)
        )
        return StepPlan(step_id=5, admissions=[init], chunk_slots=column([1]), chunk_lens=column([2]))

    raw = codec.encode_step(plan())
    assert raw == codec.encode_step(plan())
    assert codec.decode_plan(raw) == plan()
    result = StepResult(
        step_id=5,
        epochs=column([2]),
        num_ids=column([1]),
        ids=column([9]),
        logprobs={0: [TokenLogprobs(-0.25, [9], [-0.25])]},
        faults={3: "nan"},
    )
    assert codec.decode_result(codec.encode_step(result)) == result


def test_columns_are_32_bits_on_this_host():
    assert array("i").itemsize == 4


def test_the_schema_hash_names_the_fields_and_their_order():
    assert schema_hash() == schema_hash()
    assert len(schema_hash()) == 16


def test_loads_cards_and_errors_survive_the_wire():
    load = ReplicaLoad(step_id=9, running=3, finished_total={"stop": 4}, tokens_per_second=1.5)
    assert codec.load_of(codec.load_message(load)) == load
    rank = RankMemory(rank=3, weight_bytes=2**40, kv_bytes=2**41, kv_bytes_per_token=2**20)
    assert codec.rank_of(codec.rank_message(rank)) == rank
    group = KVGroup(num_layers=2, num_kv_heads=3, head_dim=64, block_size=16, dtype="bfloat16")
    card = ModelCard(
        name="m",
        architecture="llama",
        fingerprint="f",
        max_model_len=9,
        vocab_size=5,
        kv_groups=(group,),
        eos_ids=(2,),
        generation_defaults={"temperature": 0.5},
    )
    assert codec.card_from_json(codec.card_to_json(card)) == card
    assert card.kv_bytes_per_token == 2 * 2 * 3 * 64 * 2


@pytest.mark.parametrize("leaf", errors.BY_CODE.values())
def test_every_error_comes_back_as_itself(leaf):
    error = codec.error_of(codec.error_message(leaf("why", "field", 1.5)))
    assert type(error) is leaf
    assert (error.message, error.param, error.retry_after) == ("why", "field", 1.5)
