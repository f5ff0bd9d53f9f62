"""The calculator with async members, which run on the event loop: the same world without a thread for each episode."""

from __future__ import annotations

import functools

from environments import calculator


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
