"""LineServer: an engine that answers batch lines, in a process of its own on some machine of a cluster."""

import asyncio
import json
import logging
import os
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from jaxinfer.engine.errors import EngineDeadError
from jaxinfer.engine.replicas import num_lost
from jaxinfer.openai.batch_input import BatchLine, parse_line
from jaxinfer.openai.batch_result import line_answer, line_result
from jaxinfer.openai.request import RequestReader
from jaxinfer.serving.engine_thread import AsyncRequest, EngineThread
from jaxinfer.serving.request_stream import RequestStream
from jaxinfer.serving.stats_log import StatsLog
from jaxinfer.startup.args import EngineArgs
from jaxinfer.startup.loading import load_engine

logger = logging.getLogger("jaxinfer")

NUMBER, LINE, RESULT = "number", "line", "result"
"""Columns of what a LineServer takes (the first two) and gives (the first and the last)."""


class LineServer:
    """Answers batches of lines; several calls at a time share the engine's steps, so that it does not run empty
    between two batches. For Ray Data's `map_batches`.

    When the engine has died the process ends, upon which Ray starts the actor again and does its lines again; but not
    before it has answered a batch: else lines that every engine dies of would keep the job going for ever.

    Args:
        args: of the engine, which is loaded here.
        model_name: of the responses; what the field "model" of a request has to be where it is given.
        chat_template: in place of the model's own.

    Raises:
        ValueError, ConnectionError: as `load_engine`.
    """

    def __init__(self, args: EngineArgs, model_name: str, chat_template: str | None) -> None:
        self._parts = load_engine(args, None, None)
        self._thread = EngineThread(self._parts.engine, StatsLog(None))
        self._reader = RequestReader(self._parts.tokenizer, self._parts.defaults, model_name, chat_template)
        self._model_name = model_name
        self._has_answered = False

    async def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Answers lines.

        Args:
            batch: `NUMBER` -> numbers of the lines, `LINE` -> the lines as bytes.

        Returns:
            `NUMBER` -> the same numbers, `RESULT` -> the lines' results as JSON in ASCII.

        Raises:
            EngineDeadError: the engine has died and had not answered a batch.
        """
        numbers = [int(number) for number in batch[NUMBER]]
        lines = [parse_line(number, raw) for number, raw in zip(numbers, batch[LINE], strict=True)]
        try:
            results = await asyncio.gather(*(self._serve(line) for line in lines))
        except EngineDeadError:
            if not self._has_answered:
                raise
            logger.critical("this worker ends, and another does its requests", exc_info=True)
            os._exit(1)
        self._has_answered = True
        return {NUMBER: numbers, RESULT: [json.dumps(result) for result in results]}

    async def _serve(self, line: BatchLine) -> dict[str, Any]:
        streams: list[RequestStream] = []
        try:
            if line.error is not None:
                raise ValueError(line.error)
            request = self._reader.read(line.url, line.body)
            for prompt in request.prompts:
                one = partial(AsyncRequest, uuid.uuid4().hex, prompt, request.params, priority=0)
                streams.append(RequestStream(self._thread, one, self))
            outputs = await asyncio.gather(*streams)
        except (ValueError, TypeError, RecursionError) as error:  # the last for JSON that is nested too deeply
            return line_result(line, 400, error=str(error))
        finally:
            for stream in streams:
                await stream.aclose()
        if num_lost(self._parts.engine):
            self._parts.engine.check_alive()
            raise EngineDeadError("a replica of the engine is dead; its requests are done again")
        return line_answer(line, request, outputs, self._model_name)
