"""What the agent behind a URL is asked, and what its answers are worth: the part of a job that is not the agent."""

from environments.calculator import Calculator, evaluate


class Questions:
    tasks, eval_tasks = Calculator.tasks, Calculator.eval_tasks
    limits = {"max_turns": 4}  # noqa: RUF012 - never changed
    reward_range = (0.0, 1.0)

    def get_reward(self, task: dict[str, str], result: dict[str, str]) -> float:
        """``result``: the JSON that the service answered with."""
        return float(result["answer"].strip() == str(evaluate(task["expression"])))
