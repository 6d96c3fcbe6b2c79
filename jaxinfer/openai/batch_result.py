"""What a batch line comes to: a line of the output."""

import time
import uuid
from collections.abc import Sequence
from typing import Any

from jaxinfer.engine.outputs import RequestOutput
from jaxinfer.openai.batch_input import BatchLine
from jaxinfer.openai.batch_output import LINE_ID
from jaxinfer.openai.request import ApiRequest
from jaxinfer.openai.response import response_body


def line_answer(
    line: BatchLine, request: ApiRequest, outputs: Sequence[RequestOutput], model_name: str
) -> dict[str, Any]:
    """The result of a line that was served.

    Args:
        line: of the input.
        request: what it asks for.
        outputs: the finished output of each of its prompts, in order.
        model_name: of the response.

    Returns:
        With status_code 200, or 500 where the computation of a prompt failed.
    """
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        return line_result(line, 500, error=errors[0])
    body = response_body(request, outputs, body_id=uuid.uuid4().hex, created=int(time.time()), model=model_name)
    return line_result(line, 200, body=body)


def line_result(line: BatchLine, status: int, body: Any = None, error: str | None = None) -> dict[str, Any]:
    """An output line. `id` comes first: see `BatchOutput`."""
    return {
        "id": f"{LINE_ID}{line.number}" if line.custom_id is None else f"jaxinfer-{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": {"status_code": status, "request_id": f"jaxinfer-batch-{uuid.uuid4().hex}", "body": body},
        "error": error,
    }
