"""Nouns to bytes and back: msgpack for steps (between engine and ranks), protobuf for the router's wire.

The only file beside the services that sees generated classes. It converts; it validates nothing but lengths.
"""

from array import array
from collections.abc import Callable, Iterable

import msgspec

from paceline.proto import errors, replica_pb2
from paceline.proto.hashing import DIGEST_SIZE
from paceline.proto.load import RankMemory, ReplicaLoad
from paceline.proto.model import ModelCard
from paceline.proto.request import Request, SamplingParams, TokenDelta, TokenLogprobs, Usage
from paceline.proto.step import StepPlan, StepResult, column

# -- steps: msgpack ----------------------------------------------------------------------------------------------------


def _column_to_bytes(value):
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(type(value))


def _bytes_to_column(kind, raw):
    if kind is array:
        values = column()
        values.frombytes(raw)
        return values
    raise NotImplementedError(kind)


_encoder = msgspec.msgpack.Encoder(enc_hook=_column_to_bytes)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan, dec_hook=_bytes_to_column)
_result_decoder = msgspec.msgpack.Decoder(StepResult, dec_hook=_bytes_to_column)


def encode_step(step: StepPlan | StepResult) -> bytes:
    """Equal plans give equal bytes, in every process: columns are little-endian int32 on all hosts that we run on."""
    return _encoder.encode(step)


def decode_plan(raw: bytes) -> StepPlan:
    return _plan_decoder.decode(raw)


def decode_result(raw: bytes) -> StepResult:
    return _result_decoder.decode(raw)


# -- the card: JSON ----------------------------------------------------------------------------------------------------


def card_to_json(card: ModelCard) -> str:
    return msgspec.json.encode(card).decode()


def card_from_json(text: str) -> ModelCard:
    return msgspec.json.decode(text, type=ModelCard)


# -- requests: protobuf ------------------------------------------------------------------------------------------------


def submission_of(request: Request, handle: int = 0) -> replica_pb2.Submission:
    params = {name: getattr(request.params, name) for name in SamplingParams.__struct_fields__}
    return replica_pb2.Submission(
        handle=handle,
        request_id=request.request_id,
        attempt=request.attempt,
        prompt_ids=request.prompt_ids,
        resume=[replica_pb2.Ids(ids=ids) for ids in request.resume],
        params=replica_pb2.SamplingParams(**params),
        tenant=request.tenant,
        priority=request.priority,
        queue_deadline_unix=request.queue_deadline,
        first_token_deadline_unix=request.first_token_deadline,
        deadline_unix=request.deadline,
        cache_root=request.cache_root,
        block_hashes=b"".join(request.block_hashes),
        traceparent=request.traceparent,
    )


def request_of(submission: replica_pb2.Submission) -> Request:
    pb = submission.params
    params = SamplingParams(
        seed=pb.seed,
        n=pb.n or 1,
        max_tokens=_given(pb, "max_tokens"),
        temperature=pb.temperature,
        top_k=pb.top_k,
        top_p=pb.top_p or 1.0,  # 0 keeps nothing, so an unset field can only mean "all"
        min_p=pb.min_p,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=pb.repetition_penalty or 1.0,
        logit_bias=dict(pb.logit_bias),
        stop_ids=tuple(pb.stop_ids),
        min_tokens=pb.min_tokens,
        ignore_eos=pb.ignore_eos,
        logprobs=_given(pb, "logprobs"),
        prompt_logprobs=_given(pb, "prompt_logprobs"),
        grammar=pb.grammar,
    )
    hashes = submission.block_hashes
    return Request(
        request_id=submission.request_id,
        prompt_ids=list(submission.prompt_ids),
        params=params,
        resume=tuple(tuple(ids.ids) for ids in submission.resume),
        tenant=submission.tenant,
        priority=submission.priority,
        queue_deadline=_given(submission, "queue_deadline_unix"),
        first_token_deadline=_given(submission, "first_token_deadline_unix"),
        deadline=_given(submission, "deadline_unix"),
        cache_root=submission.cache_root,
        block_hashes=tuple(hashes[i : i + DIGEST_SIZE] for i in range(0, len(hashes), DIGEST_SIZE)),
        traceparent=submission.traceparent,
        attempt=submission.attempt,
    )


def _given(message, field: str):
    return getattr(message, field) if message.HasField(field) else None


# -- deltas: protobuf columns ------------------------------------------------------------------------------------------


def deltas_frame(rows: Iterable[tuple[int, TokenDelta]]) -> replica_pb2.Deltas:
    """Rows are (handle, delta)."""
    frame = replica_pb2.Deltas()
    handles, choices, offsets, num_ids, ids = [], [], [], [], []
    for row, (handle, delta) in enumerate(rows):
        handles.append(handle)
        choices.append(delta.choice)
        offsets.append(delta.offset)
        num_ids.append(len(delta.ids))
        ids.extend(delta.ids)
        if delta.finish_reason is not None:
            usage = delta.usage or Usage(0, 0, 0)
            frame.endings.add(
                row=row,
                finish_reason=delta.finish_reason,
                num_prompt=usage.num_prompt,
                num_cached=usage.num_cached,
                num_generated=usage.num_generated,
                error=delta.error or "",
                error_code=delta.error_code or "",
            )
        if delta.logprobs is not None:
            _put_logprobs(frame.logprobs.add(row=row), delta.logprobs)
        if delta.prompt_logprobs is not None:
            _put_logprobs(frame.prompt_logprobs.add(row=row), delta.prompt_logprobs)
    frame.handles.extend(handles)
    frame.choices.extend(choices)
    frame.offsets.extend(offsets)
    frame.num_ids.extend(num_ids)
    frame.ids.extend(ids)
    return frame


def deltas_of(frame: replica_pb2.Deltas, request_id_of: Callable[[int], str]) -> list[tuple[int, TokenDelta]]:
    """(handle, delta) for every row of the frame, in its order."""
    endings = {ending.row: ending for ending in frame.endings}
    logprobs, prompt_logprobs = _logprobs_by_row(frame.logprobs), _logprobs_by_row(frame.prompt_logprobs)
    ids, at, deltas = list(frame.ids), 0, []
    columns = zip(frame.handles, frame.choices, frame.offsets, frame.num_ids, strict=True)
    for row, (handle, choice, offset, count) in enumerate(columns):
        ending = endings.get(row)
        delta = TokenDelta(
            request_id=request_id_of(handle),
            choice=choice,
            offset=offset,
            ids=ids[at : at + count],
            logprobs=logprobs.get(row),
            prompt_logprobs=prompt_logprobs.get(row),
            finish_reason=ending.finish_reason if ending else None,
            usage=Usage(ending.num_prompt, ending.num_cached, ending.num_generated) if ending else None,
            error=(ending.error or None) if ending else None,
            error_code=(ending.error_code or None) if ending else None,
        )
        at += count
        deltas.append((handle, delta))
    return deltas


def _put_logprobs(row: replica_pb2.RowLogprobs, told: Iterable[TokenLogprobs]) -> None:
    for token in told:
        row.tokens.add(logprob=token.logprob, top_ids=token.top_ids, top_logprobs=token.top_logprobs)


def _logprobs_by_row(rows: Iterable[replica_pb2.RowLogprobs]) -> dict[int, list[TokenLogprobs]]:
    return {
        row.row: [TokenLogprobs(t.logprob, list(t.top_ids), list(t.top_logprobs)) for t in row.tokens] for row in rows
    }


# -- load and errors ---------------------------------------------------------------------------------------------------


def load_message(load: ReplicaLoad) -> replica_pb2.Load:
    return replica_pb2.Load(**{name: getattr(load, name) for name in ReplicaLoad.__struct_fields__})


def load_of(message: replica_pb2.Load) -> ReplicaLoad:
    values = {name: getattr(message, name) for name in ReplicaLoad.__struct_fields__}
    return ReplicaLoad(**values | {"finished_total": dict(message.finished_total)})


def rank_message(rank: RankMemory) -> replica_pb2.RankMemory:
    return replica_pb2.RankMemory(**{name: getattr(rank, name) for name in RankMemory.__struct_fields__})


def rank_of(message: replica_pb2.RankMemory) -> RankMemory:
    return RankMemory(**{name: getattr(message, name) for name in RankMemory.__struct_fields__})


def error_message(error: errors.PacelineError) -> replica_pb2.ErrorInfo:
    return replica_pb2.ErrorInfo(
        code=error.code, message=error.message, param=error.param, retry_after=error.retry_after
    )


def error_of(message: replica_pb2.ErrorInfo) -> errors.PacelineError:
    return errors.from_wire(
        message.code,
        message.message,
        message.param if message.HasField("param") else None,
        message.retry_after if message.HasField("retry_after") else None,
    )
