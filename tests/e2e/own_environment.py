"""What a user writes: one file that imports nothing of ours. Sums of two numbers, with a tool."""

import random


class Sums:
    """Use the calculator. Then answer with the number only."""

    tasks = [{"left": left, "right": right} for left in range(10, 60) for right in range(10, 99, 7)]  # noqa: RUF012
    eval_tasks = random.Random(0).sample([{"left": n, "right": 99 - n // 2} for n in range(60, 99)], 30)
    reward_range = (0.0, 1.0)

    def reset(self, left: int, right: int) -> str:
        self.total, self.answer = left + right, ""
        return f"What is {left} + {right}?"

    def calculate(self, expression: str) -> str:
        """Compute an expression.

        Args:
            expression: numbers joined by + - *
        """
        left, right = expression.split("+")
        return str(int(left) + int(right))

    def on_message(self, text: str) -> None:
        self.answer = text

    def get_reward(self) -> float:
        return float(self.answer.strip() == str(self.total))
