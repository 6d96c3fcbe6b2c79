#!/usr/bin/env python3
"""Reinforcement learning with the engine and the optimizer in one process: a small policy gradient.

    python scripts/rl_example.py                    # a tiny random model, less than a minute on a CPU
    python scripts/rl_example.py --model smollm2    # SmolLM2-135M-Instruct, minutes a step on a CPU

Each step the engine writes several answers to each prompt, a rule gives each text a reward (the share of vowels among
its letters), and the optimizer raises the probability of answers that did better than the others to the same prompt:
the clipped surrogate of PPO (arXiv:1707.06347) with advantages relative to the group (arXiv:2402.03300). Then the
engine gets the new parameters, which are arrays that it uses as they are: nothing is copied and nothing is compiled.

The engine is deterministic, and the loss scores with `token_logprobs(..., deterministic=True)`: the two give the same
bits, so in the first inner step the importance ratio of every token is exactly 1, which the run prints and checks.
Needs optax: pip install 'jaxinfer[train]'.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from jaxinfer import LLM, ModelConfig, SamplingParams
from jaxinfer.training import token_logprobs

LETTERS = "abcdefghijklmnopqrstuvwxyz ."
TINY = ModelConfig(
    vocab_size=len(LETTERS),
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
CLIP = 0.2
"""How far an importance ratio may move the loss, as in PPO."""


@dataclass(frozen=True)
class Task:
    """What is trained: a model, its prompts, and how its ids become text."""

    llm: LLM
    config: ModelConfig
    params: Any
    prompts: list[list[int]]
    text: Callable[[Sequence[int]], str]


class Batch(NamedTuple):
    """Rollouts of one step, padded to one length; A answers of T tokens with their prompts.

    Attributes:
        ids: int32[A, T].
        mask: float32[A, T - 1], 1 where ``ids[:, 1:]`` was drawn by the engine.
        logprobs: float32[A, T - 1], the engine's, of what it drew.
        advantages: float32[A].
    """

    ids: jax.Array
    mask: jax.Array
    logprobs: jax.Array
    advantages: jax.Array


def main(argv: Sequence[str] | None = None) -> int:
    """Trains and prints a line a step; 0 when the reward rose and everything held that is claimed above."""
    args = parse_args(argv)
    task = (smollm2_task if args.model == "smollm2" else tiny_task)(args)
    optimizer = optax.adam(args.learning_rate)
    params, opt_state = task.params, optimizer.init(task.params)
    update = make_update(task.config, optimizer)
    compiled, rewards, exact = task.llm.stats().num_compiled, [], True
    print("step  reward  largest |ratio - 1|  swap ms  recompiled  text")
    for step in range(args.steps):
        batch, reward, sample = rollout(task, args, step)
        rewards.append(reward)
        for inner in range(args.inner_steps):
            params, opt_state, ratio = update(params, opt_state, batch)
            if inner == 0:
                exact &= (distance := float(ratio)) == 0.0
        start = time.perf_counter()
        task.llm.update_params(params)
        milliseconds = 1e3 * (time.perf_counter() - start)
        recompiled = task.llm.stats().num_compiled - compiled
        numbers = f"{step:4d}  {reward:6.3f}  {distance:19.1e}  {milliseconds:7.2f}  {recompiled:10d}"
        print(f"{numbers}  {sample!r}", flush=True)
    task.llm.shutdown()
    first, last = (float(np.mean(part)) for part in (rewards[: args.average], rewards[-args.average :]))
    print(f"reward {first:.3f} -> {last:.3f}; {recompiled} recompilations; the first ratios were all 1: {exact}")
    return 0 if last > first and exact and not recompiled else 1


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("tiny", "smollm2"), default="tiny")
    parser.add_argument("--steps", type=int, default=40, help="of rollouts and updates; default 40")
    parser.add_argument("--inner-steps", type=int, default=2, help="updates for each rollout; default 2")
    parser.add_argument("--answers", type=int, default=8, help="to each prompt; default 8")
    parser.add_argument("--max-tokens", type=int, default=16, help="of an answer; default 16")
    parser.add_argument("--learning-rate", type=float, help="of Adam; default 0.01 (smollm2: 0.00001)")
    parser.add_argument("--average", type=int, default=3, help="steps whose rewards are compared at the end; default 3")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.learning_rate is None:
        args.learning_rate = 1e-5 if args.model == "smollm2" else 1e-2
    return args


def tiny_task(args: argparse.Namespace) -> Task:
    """A random model whose tokens are letters."""
    from jaxinfer.models.decoder import init_params

    params = jax.jit(init_params, static_argnums=0)(TINY, jax.random.key(args.seed))
    options: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 64, "num_gpu_blocks_override": 200}
    llm = LLM(model_config=TINY, params=params, deterministic=True, use_tqdm_on_load=False, **options)
    prompts = [[LETTERS.index(letter) for letter in text] for text in ("a b", "the ", "q", "xyz.")]
    return Task(llm, TINY, params, prompts, lambda ids: "".join(LETTERS[index] for index in ids))


def smollm2_task(args: argparse.Namespace) -> Task:
    """SmolLM2-135M-Instruct in float32, asked a few questions."""
    from jaxinfer.cache_dir import default_cache_dir
    from jaxinfer.checkpoint.checkpoint import open_checkpoint
    from jaxinfer.checkpoint.load import load_params
    from jaxinfer.checkpoint.resolve import resolve_model

    path = resolve_model("smollm2-135m-instruct", cache_dir=default_cache_dir())
    checkpoint = open_checkpoint(path)
    params = load_params(checkpoint, "float32")
    llm = LLM(path, params=params, deterministic=True, max_num_seqs=32, max_num_batched_tokens=128, max_model_len=256)
    tokenizer = llm.get_tokenizer()
    texts = ("Name three fruits.", "Where is Paris?", "Tell me a story.", "What is rain?")
    prompts = [tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n") for text in texts]
    return Task(llm, checkpoint.model_config, params, prompts, tokenizer.decode)


def reward_of(text: str) -> float:
    """The share of vowels among the letters; 0 without letters."""
    letters = [letter for letter in text.lower() if letter.isalpha()]
    return sum(letter in "aeiou" for letter in letters) / len(letters) if letters else 0.0


def rollout(task: Task, args: argparse.Namespace, step: int) -> tuple[Batch, float, str]:
    """Answers to all prompts by the engine's present parameters, their mean reward, and one of them."""
    params = SamplingParams(n=args.answers, max_tokens=args.max_tokens, logprobs=0, seed=1000 * args.seed + step)
    outputs = task.llm.generate([{"prompt_token_ids": ids} for ids in task.prompts], params, use_tqdm=False)
    shape = len(outputs) * args.answers, max(map(len, task.prompts)) + args.max_tokens
    ids = np.zeros(shape, np.int32)
    mask, logprobs = np.zeros((2, shape[0], shape[1] - 1), np.float32)
    rewards = np.zeros((len(outputs), args.answers), np.float32)
    texts = []
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    for row, (output, sample) in enumerate(samples):
        assert sample.weight_versions == [(step, len(sample.token_ids))]  # all by the latest parameters
        prompt_ids, drawn_logprobs = output.prompt_token_ids, sample.logprobs
        assert prompt_ids is not None and drawn_logprobs is not None
        start, end = len(prompt_ids), len(prompt_ids) + len(sample.token_ids)
        ids[row, :end] = [*prompt_ids, *sample.token_ids]
        mask[row, start - 1 : end - 1] = 1
        drawn = zip(drawn_logprobs, sample.token_ids, strict=True)
        logprobs[row, start - 1 : end - 1] = [entry[token].logprob for entry, token in drawn]
        texts.append(task.text(sample.token_ids))
        rewards[divmod(row, args.answers)] = reward_of(texts[-1])
    spread = rewards.std(axis=1, keepdims=True) + 1e-4
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / spread).reshape(-1)
    return Batch(*map(jnp.asarray, (ids, mask, logprobs, advantages))), float(rewards.mean()), texts[0]


def make_update(config: ModelConfig, optimizer: optax.GradientTransformation) -> Callable[..., tuple[Any, Any, Any]]:
    """``(params, opt_state, batch) -> (params, opt_state, largest |ratio - 1|)``, jitted. The old parameters are not
    donated: the engine uses them until it gets the new ones."""

    def loss(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
        found = token_logprobs(params, batch.ids, config, deterministic=True)
        ratio = jnp.exp(found - batch.logprobs)
        advantages = batch.advantages[:, None]
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages)
        return -jnp.sum(gain * batch.mask) / jnp.sum(batch.mask), jnp.max(jnp.abs(ratio - 1) * batch.mask)

    @jax.jit
    def update(params: Any, opt_state: Any, batch: Batch) -> tuple[Any, Any, jax.Array]:
        slope, distance = jax.grad(loss, has_aux=True)(params, batch)
        changes, opt_state = optimizer.update(slope, opt_state, params)
        return optax.apply_updates(params, changes), opt_state, distance

    return update


if __name__ == "__main__":
    sys.exit(main())
