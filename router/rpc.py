"""gRPC: messages in, a call to the service, messages out: what `rest.py` is for HTTP. It decides nothing of its own.

Errors are statuses, before the first message and after it. A client that cancels, goes away or lets its deadline pass
ends what it asked for. Messages are made in `rpc_shapes.py`, statuses in `rpc_errors.py`; port, keys and health are
`rpc_server.py`.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

import grpc.aio
from grpc.aio import ServicerContext

from paceline.proto import inference_pb2 as pb
from paceline.proto import inference_pb2_grpc
from paceline.proto.errors import InternalError, PacelineError
from paceline.router import access, openai, rpc_shapes, tools
from paceline.router.answer import FAIL_WAIT
from paceline.router.auth import Guard
from paceline.router.config import RouterConfig
from paceline.router.generation import Generation
from paceline.router.keys import NOBODY, Key
from paceline.router.limits import deadlines
from paceline.router.metrics import Metrics
from paceline.router.rest import LARGE_BODY, REQUEST_ID, timeouts
from paceline.router.rpc_errors import status_of
from paceline.router.service import Service
from paceline.router.shapes import size_of
from paceline.router.tokenizer import Tokenizer

log = logging.getLogger("paceline.router")

T = TypeVar("T")


class Visit:
    """One call of a client, and whose it is. ``num_emitted``: tokens of messages that have gone out."""

    key: Key = NOBODY

    def __init__(self, method: str, context: ServicerContext):
        self.metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        given = str(self.metadata.get("x-request-id", ""))
        self.method = method
        self.context = context
        self.request_id = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        self.began = time.perf_counter()
        self.num_emitted = 0


class Front:
    """Around every call: its id, in and out, whose it is, the count of answers, and errors as statuses."""

    def __init__(self, metrics: Metrics, guard: Guard):
        self.metrics = metrics
        self._guard = guard

    async def visit(self, method: str, context: ServicerContext, work: Callable[[Visit], Awaitable[T]]) -> T:
        visit = Visit(method, context)
        access.begin(visit.request_id)
        trailers = (("x-request-id", visit.request_id),)
        context.set_trailing_metadata(trailers)
        http_status = 499  # unless it ends, the client was gone
        self.metrics.began()
        try:
            visit.key = self._guard.admit(method, visit.metadata.get("authorization"))
            answer = await work(visit)
            http_status = 200
            return answer
        except grpc.aio.InternalError as error:
            raise asyncio.CancelledError("the client is gone") from error
        except Exception as error:
            failure = self._failure(error, visit)
            http_status = failure.http_status
            status = status_of(failure, visit.num_emitted)
            await _abort(context, status.code, status.details, (*trailers, *status.trailing_metadata))
            raise AssertionError("abort raises") from error
        finally:
            seconds = time.perf_counter() - visit.began
            self.metrics.ended(method, http_status, seconds)
            access.end(method, http_status, seconds)

    def _failure(self, error: Exception, visit: Visit) -> PacelineError:
        if not isinstance(error, PacelineError):
            log.error("request %s failed", visit.request_id, exc_info=error)
            error = InternalError(f"internal error; request id {visit.request_id}")
        if visit.num_emitted:
            log.warning("request %s: stream broken: %s", visit.request_id, error.code)
            self.metrics.broke(error.code)
        return error


async def _abort(context: ServicerContext, *status: Any) -> None:
    """A client that does not read does not get a status either: after a while the stream is just dropped."""
    try:
        async with asyncio.timeout(FAIL_WAIT):
            await context.abort(*status)
    except (TimeoutError, grpc.aio.InternalError) as error:
        raise asyncio.CancelledError("the client took no status") from error


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self, service: Service, front: Front, config: RouterConfig):
        self._service = service
        self._front = front
        self._metrics = front.metrics
        self._config = config

    async def Generate(self, request: pb.GenerateRequest, context: ServicerContext) -> pb.GenerateResponse:
        return await self._front.visit("Generate", context, lambda visit: self._whole(request.spec, visit))

    async def StreamGenerate(self, request: pb.StreamGenerateRequest, context: ServicerContext) -> None:
        """Writes instead of yielding: a cancel then arrives here at once, and not when a generator is collected."""
        await self._front.visit("StreamGenerate", context, lambda visit: self._stream(request.spec, visit))

    async def Tokenize(self, request: pb.TokenizeRequest, context: ServicerContext) -> pb.TokenizeResponse:
        async def tokenize(visit: Visit) -> pb.TokenizeResponse:
            model, config = self._service.model, self._config
            call = await Tokenizer.off_loop(
                request.ByteSize(),
                lambda: tools.one_prompt(rpc_shapes.prompt_of(request)[1], model.card, config, visit.key),
                LARGE_BODY,
            )
            text, ids = await tools.tokenize(model, call)
            limit = model.card.max_model_len
            return pb.TokenizeResponse(token_ids=ids, count=len(ids), max_model_len=limit, prompt=text)

        return await self._front.visit("Tokenize", context, tokenize)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: ServicerContext) -> pb.DetokenizeResponse:
        async def detokenize(visit: Visit) -> pb.DetokenizeResponse:
            rpc_shapes.check_num_ids(request.token_ids, "tokens", self._config)
            body = {"model": request.model or None, "tokens": list(request.token_ids)}
            return pb.DetokenizeResponse(text=await tools.detokenize(self._service.model, body))

        return await self._front.visit("Detokenize", context, detokenize)

    async def _whole(self, spec: pb.GenerationSpec, visit: Visit) -> pb.GenerateResponse:
        async with self._open(spec, visit) as generation:
            shape = _shape(spec, generation)
            first = True
            async for batch in generation.deltas():
                if first:
                    self._metrics.first_text(visit.method, time.perf_counter() - visit.began)
                    first = False
                await Tokenizer.off_loop(size_of(batch), partial(shape.collect, batch))
            usage = await generation.usage()
        self._metrics.finished(usage)
        return shape.whole(usage)

    async def _stream(self, spec: pb.GenerationSpec, visit: Visit) -> None:
        async with self._open(spec, visit) as generation:
            shape = _shape(spec, generation)
            gaps: list[float] = []
            last = visit.began
            prompt: pb.PromptInfo | None = shape.prompt
            async for batch in generation.deltas():
                now = time.perf_counter()
                if prompt is None:
                    gaps.append(now - last)
                else:
                    self._metrics.first_text(visit.method, now - last)
                last = now
                # Before the prompt, which the first piece may complete.
                choices = await Tokenizer.off_loop(size_of(batch), partial(shape.pieces, batch))
                message = pb.StreamGenerateResponse(prompt=prompt, choices=choices)
                await visit.context.write(message)
                visit.num_emitted, prompt = generation.num_generated, None
            usage = await generation.usage()
            self._metrics.gaps(visit.method, gaps)
            self._metrics.finished(usage)
            await visit.context.write(pb.StreamGenerateResponse(usage=rpc_shapes.usage_of(usage)))

    @asynccontextmanager
    async def _open(self, spec: pb.GenerationSpec, visit: Visit) -> AsyncIterator[Generation]:
        """Refused before the prompt is looked at if there is no room, and never longer than the client waits."""
        model = self._service.model
        self._service.check()
        seconds = timeouts(visit.metadata.get)
        remaining = visit.context.time_remaining()
        if remaining is not None:
            seconds["request"] = min(remaining, seconds.get("request", remaining))
        until = deadlines(self._config, time.time(), **seconds)
        call = await Tokenizer.off_loop(
            spec.ByteSize(), lambda: rpc_shapes.call_of(spec, model.card, self._config, visit.key), LARGE_BODY
        )
        async with self._service.open(call, until) as generation:
            yield generation


def _shape(spec: pb.GenerationSpec, generation: Generation) -> rpc_shapes.Shape:
    return rpc_shapes.Shape(spec, generation.call, generation.model.tokenizer, generation.num_prompt_tokens)


class ModelService(inference_pb2_grpc.ModelServiceServicer):
    def __init__(self, service: Service, front: Front):
        self._service = service
        self._front = front
        self._started = int(time.time())

    async def ListModels(self, request: pb.ListModelsRequest, context: ServicerContext) -> pb.ListModelsResponse:
        async def models(visit: Visit) -> pb.ListModelsResponse:
            return pb.ListModelsResponse(models=[self._model()])

        return await self._front.visit("ListModels", context, models)

    async def GetModel(self, request: pb.GetModelRequest, context: ServicerContext) -> pb.GetModelResponse:
        async def model(visit: Visit) -> pb.GetModelResponse:
            openai.check_model(request.name, self._service.model.card)
            return pb.GetModelResponse(model=self._model())

        return await self._front.visit("GetModel", context, model)

    def _model(self) -> pb.Model:
        card = self._service.model.card
        return pb.Model(
            name=card.name, max_model_len=card.max_model_len, vocab_size=card.vocab_size, created=self._started
        )
