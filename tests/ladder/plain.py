"""The smallest world: a digit, and no tools of its own. What makes it large comes from ``world``."""


class Plain:
    tasks = [{"digit": digit} for digit in range(8)]  # noqa: RUF012 - never changed

    def reset(self, digit: int) -> str:
        return str(digit)

    def get_reward(self) -> float:
        return 0.0
