"""An OpenEnv 0.10 server, written as its authors write one: ``openenv_server.py PORT CAPACITY``."""

# /// script
# dependencies = ["openenv==0.10.0"]
# ///

import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Add(Action):
    """Add to the total."""

    amount: int


class Total(Observation):
    text: str
    total: int


class Adder(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.total, self.goal = 0, 0

    def reset(self, seed=None, episode_id=None, **others):
        self.total, self.goal = 0, seed or 0
        return Total(text=f"Reach {self.goal}.", total=0, done=False, reward=None)

    def step(self, action, **others):
        if action.amount < 1:
            raise ValueError("amounts are positive")
        self.total += action.amount
        done = self.total >= self.goal
        reward = float(self.total == self.goal) if done else None
        return Total(text=f"It is {self.total}.", total=self.total, done=done, reward=reward)

    @property
    def state(self):
        return State(episode_id="", step_count=0)


if __name__ == "__main__":
    app = create_fastapi_app(Adder, Add, Total, max_concurrent_envs=int(sys.argv[2]))
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
