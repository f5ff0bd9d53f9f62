"""The demos' worlds with async members, which run on the event loop: the same without a thread for each episode."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from environments import calculator, search_qa

if TYPE_CHECKING:
    from gspo_core.env import Context


class Calculator(calculator.Calculator):
    __doc__ = calculator.Calculator.__doc__

    @functools.wraps(calculator.Calculator.reset)
    async def reset(self, expression: str) -> str:  # type: ignore[override]
        return super().reset(expression)

    @functools.wraps(calculator.Calculator.calculate)
    async def calculate(self, expression: str) -> str:  # type: ignore[override]
        return super().calculate(expression)

    @functools.wraps(calculator.Calculator.on_message)
    async def on_message(self, text: str) -> None:  # type: ignore[override]
        super().on_message(text)

    @functools.wraps(calculator.Calculator.get_reward)
    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward()


class SearchQA(search_qa.SearchQA):
    __doc__ = search_qa.SearchQA.__doc__

    @functools.wraps(search_qa.SearchQA.reset)
    async def reset(  # type: ignore[override]
        self, question: str, answer: str, path: list[str], ctx: Context | None = None
    ) -> str:
        return super().reset(question, answer, path, ctx)

    @functools.wraps(search_qa.SearchQA.search)
    async def search(self, query: str, limit: int = 5) -> list[dict[str, str]]:  # type: ignore[override]
        return super().search(query, limit)

    @functools.wraps(search_qa.SearchQA.read)
    async def read(self, title: str) -> str:  # type: ignore[override]
        return super().read(title)

    @functools.wraps(search_qa.SearchQA.on_message)
    async def on_message(self, text: str) -> None:  # type: ignore[override]
        super().on_message(text)

    @functools.wraps(search_qa.SearchQA.get_reward)
    async def get_reward(self) -> float:  # type: ignore[override]
        return super().get_reward()

    @functools.wraps(search_qa.SearchQA.close)
    async def close(self) -> None:  # type: ignore[override]
        super().close()
