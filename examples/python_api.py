"""Train from Python: start a server, train on the environment of examples/count_up.py, and print the result.

.venv/bin/python -m examples.python_api [STEPS]
"""

import asyncio
import sys

from skyrl_tx_server import ServerConfig, serve
from src.train import TrainerConfig, train

MODEL = "datasets/quickstart/model"


async def main(num_steps: int) -> None:
    server = ServerConfig(base_model=MODEL, port=0, max_context_length=2048, train_tokens_per_batch=2048)
    async with serve(server) as url:
        config = TrainerConfig(
            backend="skyrl-tx",
            skyrl_tx_url=url,
            model_name=server.alias,
            tokenizer=MODEL,
            env="examples.count_up:open_count_up",
            context_limit=2048,
            max_tokens=8,
            max_turns=4,
            batch_size=2,
            group_size=4,
            max_steps=num_steps,
            logs_dir="./runs",
        )
        result = await train(config)
    print(f"{result.end} after step {result.num_steps}: {result.directory}")
    print(f"held-out success: {result.held_out.before} before, {result.held_out.after} after")
    print(f"mean reward of the last step: {result.metrics['env/all/reward/total']:.3f}")
    if result.last_checkpoint is not None:
        print(f"weights: {result.last_checkpoint.sampler_path}")


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2))
