"""The toy of notebooks 1 and 4: eight prompts, nine tokens, and a policy that is two tables.

It is part of the package, so that the notebooks also run where only the package is installed.

Four prompts are easy: `short .` is right. Four are hard: `work 1 2 3 4 5 6 .` is right. The policy has one
table for the first token, with a row per prompt, and one table for all later tokens, with a row per *previous
token*. All prompts share the second table. So how to work is one shared skill, and each prompt decides
whether to use it. Success is computed exactly, without sampling. The policy is trained as any other.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax import objectives

TOKENS = ("short", "work", "1", "2", "3", "4", "5", "6", ".")
PROMPTS, EASY, GROUP, LENGTH, PROMPTS_PER_UPDATE = 8, 4, 8, 10, 8
END = len(TOKENS) - 1
SHORT, WORK = (0, END), (1, 2, 3, 4, 5, 6, 7, END)

_RIGHT = np.full((PROMPTS, LENGTH), END)
_RIGHT[:EASY, : len(SHORT)], _RIGHT[EASY:, : len(WORK)] = SHORT, WORK
_NEEDED = np.arange(LENGTH) < np.array([len(SHORT)] * EASY + [len(WORK)] * (PROMPTS - EASY))[:, None]

Policy = dict[str, jax.Array]


def first_policy(*, work_easy: float = 0.5, work_hard: float = 0.2, certainty: float = 15.0) -> Policy:
    """A policy that can work, but does so too often on easy prompts and too rarely on hard ones.

    Args:
      work_easy, work_hard: probability that it begins with `work`.
      certainty: logit of the right next token over the others, in the shared table.
    """
    begin = np.full((PROMPTS, len(TOKENS)), -20.0, np.float32)
    works = np.where(np.arange(PROMPTS) < EASY, work_easy, work_hard)
    begin[:, 0], begin[:, 1] = np.log(1 - works), np.log(works)
    follow = np.zeros((len(TOKENS), len(TOKENS)), np.float32)
    for path in (SHORT, WORK):
        follow[path[:-1], path[1:]] = certainty
    return {"begin": jnp.asarray(begin), "follow": jnp.asarray(follow)}


def log_probs(policy: Policy, prompts: jax.Array, tokens: jax.Array) -> jax.Array:
    """`[B, T]`, each token's log-prob given the prompt and the token before it."""
    return jnp.take_along_axis(_all_log_probs(policy, prompts, tokens), tokens[..., None], axis=2)[..., 0]


def _all_log_probs(policy: Policy, prompts: jax.Array, tokens: jax.Array) -> jax.Array:
    """`[B, T, TOKENS]`, the log-probs of all tokens at each place."""
    logits = jnp.concatenate([policy["begin"][prompts][:, None], policy["follow"][tokens[:, :-1]]], axis=1)
    return jax.nn.log_softmax(logits)


def _entropy(policy: Policy, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean entropy of the policy, in nats, over the tokens of the batch."""
    logp = _all_log_probs(policy, batch["prompts"], batch["tokens"])
    return -(jnp.exp(logp) * logp).sum(axis=2).mean(where=batch["mask"])


def sample(policy: Policy, prompts: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Tokens, their log-probs and the mask, each `[B, T]`; tokens after the first `.` are padding."""

    def step(carry: Any, noise: jax.Array) -> Any:
        logits, done = carry
        token = jnp.argmax(logits + noise, axis=1)
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), token[:, None], axis=1)[:, 0]
        return (policy["follow"][token], done | (token == END)), (token, logp, ~done)

    start = (policy["begin"][prompts], jnp.zeros(len(prompts), bool))
    noise = jax.random.gumbel(key, (LENGTH, len(prompts), len(TOKENS)))
    _, steps = jax.lax.scan(step, start, noise)
    return tuple(array.T for array in steps)


def rewards(prompts: jax.Array, tokens: jax.Array) -> jax.Array:
    """1 for the right response to each prompt, 0 for any other."""
    right, needed = jnp.asarray(_RIGHT)[prompts], jnp.asarray(_NEEDED)[prompts]
    return ((tokens == right) | ~needed).all(axis=1).astype(jnp.float32)


def success(policy: Policy) -> jax.Array:
    """`[PROMPTS]`, the exact probability of the right response, without sampling."""
    logp = log_probs(policy, jnp.arange(PROMPTS), jnp.asarray(_RIGHT))
    return jnp.exp(jnp.where(_NEEDED, logp, 0.0).sum(axis=1))


def rollouts(policy: Policy, updates: int, key: jax.Array) -> dict[str, jax.Array]:
    """The data of a stage: `[updates, B, ...]`, each response once, in groups of 8 per prompt."""
    rows = updates * PROMPTS_PER_UPDATE * GROUP
    prompts = jnp.repeat(jnp.arange(rows // GROUP) % PROMPTS, GROUP)
    tokens, logp, mask = sample(policy, prompts, key)
    advantages = objectives.group_advantages(rewards(prompts, tokens).reshape(-1, GROUP)).reshape(-1)
    data = {"prompts": prompts, "tokens": tokens, "logp": logp, "mask": mask, "advantages": advantages}
    return {name: array.reshape(updates, -1, *array.shape[1:]) for name, array in data.items()}


@functools.partial(jax.jit, static_argnames=("objective", "updates_per_stage", "stages", "watch"))
def train(
    objective: Any,
    learning_rate: jax.Array | float,
    *,
    updates_per_stage: int,
    stages: int,
    seed: jax.Array | int = 0,
    watch: bool = False,
) -> tuple[Policy, dict[str, jax.Array]]:
    """Train the first policy in stages. Return the last policy and the metrics after every update.

    Metrics, each `[updates]`: `easy` and `hard` success, the share of tokens `vetoed`, the effective sample
    size `ess` of the batch, the size `step` of the update, the `drift` since the stage began and the `cosine`
    of consecutive gradients. With `watch`, also the policy's `entropy`, and `objectives.diagnostics` without
    its quantiles.
    """

    def update(start: Policy, carry: Any, batch: dict[str, jax.Array]) -> Any:
        policy, state, last = carry

        def loss(policy: Policy) -> Any:
            logp = log_probs(policy, batch["prompts"], batch["tokens"])
            inputs = logp, batch["logp"], batch["advantages"], batch["mask"]
            value, metrics = objective(*inputs)
            ess = objectives.effective_sample_size(logp - batch["logp"], batch["mask"])
            more = objectives.diagnostics(*inputs) | {"entropy": _entropy(policy, batch)} if watch else {}
            more = {name: x for name, x in more.items() if not name.startswith("ratio_p")}
            return value, more | {"ess": ess, "vetoed": metrics.get("vetoed/tokens", 0.0)}

        gradient, found = jax.grad(loss, has_aux=True)(policy)
        direction, state = _adam(gradient, state)
        policy = jax.tree.map(lambda p, d: p - learning_rate * d, policy, direction)
        solved = success(policy)
        measured = {
            "easy": solved[:EASY].mean(),
            "hard": solved[EASY:].mean(),
            **found,
            "cosine": objectives.gradient_cosine(last, gradient),
            "step": learning_rate * _norm(direction),
            "drift": _norm(jax.tree.map(jnp.subtract, policy, start)),
        }
        return (policy, state, gradient), measured

    def stage(carry: Any, key: jax.Array) -> Any:
        behavior = carry[0]  # frozen: it samples the whole stage, then the updates move away from it
        data = rollouts(behavior, updates_per_stage, key)
        return jax.lax.scan(functools.partial(update, behavior), carry, data)

    policy = first_policy()
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), stages)
    nothing = jax.tree.map(jnp.zeros_like, policy)
    first: Any = (policy, (0, nothing, nothing), nothing)
    (policy, *_), measured = jax.lax.scan(stage, first, keys)
    return policy, jax.tree.map(lambda array: array.reshape(-1), measured)


def _adam(gradient: Policy, state: Any, beta: float = 0.9) -> tuple[Policy, Any]:
    """The direction of Adam with β₁ = β₂ = `beta`. The state: number of steps and two moving averages."""
    count, mean, square = state
    count = count + 1
    mean = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, mean, gradient)
    square = jax.tree.map(lambda s, g: beta * s + (1 - beta) * g * g, square, gradient)
    unbias = 1 - beta**count
    direction = jax.tree.map(lambda m, s: (m / unbias) / (jnp.sqrt(s / unbias) + 1e-8), mean, square)
    return direction, (count, mean, square)


def _norm(tree: Policy) -> jax.Array:
    return jnp.sqrt(sum(jnp.vdot(leaf, leaf) for leaf in jax.tree.leaves(tree)))
