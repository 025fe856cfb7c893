"""GRPO in one file on the tinker SDK: the model learns to write the letter "e".

python examples/grpo_loop.py http://localhost:8000 MODEL [STEPS]
"""

import asyncio
import sys

import numpy as np
import tinker
from tinker import types

GROUP_SIZE, LORA_RANK, LEARNING_RATE, MAX_TOKENS = 8, 8, 1e-3, 16
PROMPTS = ["Write a word.", "Write a name.", "Write a place.", "Write a colour."]


def reward(text: str) -> float:
    """Return the share of the letter "e" among the characters of the completion."""
    return text.count("e") / max(len(text), 1)


def datum(prompt: list[int], sequence: types.SampledSequence, advantage: float) -> types.Datum:
    """Return one training sequence: the prompt and the completion. Each loss input has one value per target,
    and the targets are all tokens except the first. The advantages of the prompt's tokens are 0."""
    tokens = prompt + list(sequence.tokens)
    num_prompt, num_sampled = len(prompt) - 1, len(sequence.tokens)
    inputs = {
        "target_tokens": np.array(tokens[1:]),
        "logprobs": np.array([0.0] * num_prompt + list(sequence.logprobs or []), np.float32),
        "advantages": np.array([0.0] * num_prompt + [advantage] * num_sampled, np.float32),
    }
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={name: types.TensorData.from_numpy(array) for name, array in inputs.items()},
    )


async def main(base_url: str, model: str, num_steps: int) -> list[float]:
    """Train for `num_steps` steps. Return the mean reward of each step."""
    with tinker.ServiceClient(base_url=base_url) as service:
        training = await service.create_lora_training_client(base_model=model, rank=LORA_RANK)
        tokenizer = training.get_tokenizer()
        prompts = [tokenizer.encode(prompt) for prompt in PROMPTS]
        mean_rewards = []
        for step in range(num_steps):
            sampler = await training.save_weights_and_get_sampling_client()
            params = types.SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0)
            requests = [sampler.sample(types.ModelInput.from_ints(p), GROUP_SIZE, params) for p in prompts]
            groups = [result.sequences for result in await asyncio.gather(*requests)]
            rewards_PG = np.array(
                [[reward(str(tokenizer.decode(s.tokens))) for s in group] for group in groups]
            )
            advantages_PG = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
            data = [
                datum(prompt, sequence, advantage)
                for prompt, group, advantages in zip(prompts, groups, advantages_PG, strict=True)
                for sequence, advantage in zip(group, advantages, strict=True)
            ]
            gradient = training.forward_backward(data, loss_fn="importance_sampling")
            update = training.optim_step(types.AdamParams(learning_rate=LEARNING_RATE))
            await asyncio.gather(gradient, update)
            mean_rewards.append(float(rewards_PG.mean()))
            print(f"step {step}: mean reward {mean_rewards[-1]:.3f}", flush=True)
    return mean_rewards


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 20))
