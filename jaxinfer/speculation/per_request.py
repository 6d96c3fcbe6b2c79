"""What is remembered of each request, for as long as it is unfinished."""

from collections.abc import Callable
from typing import Generic, TypeVar

from jaxinfer.engine.request import Request

T = TypeVar("T")


class PerRequest(Generic[T]):
    """Values by request, made when they are first asked for; those of finished requests are forgotten in time."""

    def __init__(self, make: Callable[[Request], T]) -> None:
        self._make = make
        self._values: dict[Request, T] = {}
        self._limit = 64

    def __getitem__(self, request: Request) -> T:
        value = self._values.get(request)
        if value is None:
            if len(self._values) >= self._limit:
                self._values = {key: kept for key, kept in self._values.items() if not key.is_finished}
                self._limit = 64 + 2 * len(self._values)
            value = self._values[request] = self._make(request)
        return value

    def clear(self) -> None:
        self._values.clear()
