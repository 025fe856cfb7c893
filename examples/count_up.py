"""A message environment (one that exchanges text messages with the agent) in which the agent counts up: each
answer must be the next number.

./run_skyrl_tx.sh model_name=datasets/quickstart/model env=examples.count_up:open_count_up max_turns=4
"""

from pathlib import Path

from src.config import TrainerConfig
from src.core.trajectory import Task
from src.envs.episodes import EnvSpec, EpisodeTasks, episodes
from src.envs.message_env import ResetResult, StepResult
from src.policy.chat import Chat

NUM_TURNS = 3


class CountUp:
    """One episode. Each correct number gives a reward of 1/3. A wrong answer ends the episode.

    A wrong answer earns at most 0.1, and a shorter wrong answer earns more. The rewards of a group therefore
    differ even if the model cannot count yet, so that the model can learn.
    """

    def __init__(self, task: Task, seed: int) -> None:
        self.number = int(task.id.removeprefix("from-"))
        self.last = self.number + NUM_TURNS

    async def start(self) -> ResetResult:
        return ResetResult(messages=[{"role": "user", "content": f"Count up. I say {self.number}."}])

    async def step(self, answer: str) -> StepResult:
        self.number += 1
        if answer.strip() != str(self.number):
            return StepResult(reward=0.1 / (1 + len(answer)), is_done=True)
        message = {"role": "user", "content": "Next."}
        return StepResult(reward=1 / NUM_TURNS, is_done=self.number == self.last, messages=[message])

    async def close(self) -> None:
        """There is nothing to release."""


def open_count_up(config: TrainerConfig, chat: Chat) -> EpisodeTasks:
    """Return the tasks. The share `eval_split` of the tasks is held out."""
    tasks = [
        Task(id=f"from-{n}", path=Path(__file__), instruction=f"Count up from {n}.", domain="count")
        for n in range(10)
    ]
    return episodes(config, chat, EnvSpec(tasks=tasks, make=CountUp))
