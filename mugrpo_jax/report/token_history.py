"""Follow one stored response through the updates of its stage: log-ratios, triggers and greedy texts.

history = token_history(Path("runs/first"), stage=0)
print(history.updates, history.first_triggers)
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mugrpo_jax import models, objectives
from mugrpo_jax.config import ConfigError, RunConfig
from mugrpo_jax.report.samples import Candidate, pieces
from mugrpo_jax.rollouts import Group, RolloutFolder, open_stage, read_groups, shaped_rewards
from mugrpo_jax.runs.run_folder import read_config
from mugrpo_jax.sampling import SamplingSettings, make_request
from mugrpo_jax.setup.devices import loading_mesh
from mugrpo_jax.setup.initial_model import run_model_shape, run_model_tokenizer
from mugrpo_jax.setup.run_setup import RunSetup
from mugrpo_jax.setup.stored_rollouts import stage_folders
from mugrpo_jax.setup.trained_model import trained_model
from mugrpo_jax.training.checkpoints import checkpoint_folders
from mugrpo_jax.training.response_scorer import ResponseScorer

KEEP = "checkpoints.every=16 checkpoints.keep_last=100 checkpoints.keep_stage_starts=true"
_GROUPS = 512  # a response is chosen among so many groups at the start of a stage


@dataclasses.dataclass(frozen=True)
class TokenHistory:
    """One response under the policies of C checkpoints of its stage. It has T tokens.

    Attributes:
      run: the folder of the run.
      stage: the index of the stage.
      response: the number of the response in its stage, from 0, in the order of the prompts.
      prompt: the text of the prompt.
      pieces: the text of each token of the response; the end token has none.
      reward, advantage: of the response.
      threshold: the ratio below which a token is a trigger.
      updates: `[C]`, the number of updates since the start of the stage.
      log_ratio: `[C, T]`, log π − log b, where π is the policy of the checkpoint and b sampled the response.
      triggers: `[C, T]`, True on triggers. Only a response with a negative advantage has triggers.
      texts: the greedy response of each checkpoint's policy to the same prompt.
    """

    run: Path
    stage: int
    response: int
    prompt: str
    pieces: list[str]
    reward: float
    advantage: float
    threshold: float
    updates: np.ndarray
    log_ratio: np.ndarray
    triggers: np.ndarray
    texts: list[str]

    @property
    def first_triggers(self) -> list[int | None]:
        """The position κ of the first trigger at each checkpoint; None if there is no trigger."""
        return [int(row.argmax()) if row.any() else None for row in self.triggers]


def token_history(run: Path, *, stage: int | None = None, response: int | None = None) -> TokenHistory:
    """Compute the history of a response from the checkpoints that a run, or a replay, kept of a stage.

    Args:
      run: the folder of the run or of the replay.
      stage: the index of the stage; None takes the first stage of the run.
      response: the number of the response. None looks at the responses with a negative advantage. It takes
        the one with the longest suffix behind its first trigger at the last checkpoint. If no response has a
        trigger, it takes the one with the smallest ratio.
    """
    config = read_config(run)
    stage = config.stages[0] if stage is None else stage
    rollouts = _rollouts(run, config, stage)
    steps = _kept_steps(run, config, rollouts)
    # Here, so that a wrong number is refused before any weights are read.
    chosen = None if response is None else _response(config, rollouts, response)
    policies = _Policies(run, config)
    if chosen is None:
        response, chosen = _most_abandoned(policies, policies.weights(steps[-1]), config, rollouts)
    assert response is not None
    log_ratio, texts = policies.follow(chosen, steps)
    return TokenHistory(
        run=run,
        stage=stage,
        response=response,
        prompt=policies.setup.tokenizer.decode(chosen.group.prompt.tolist()),
        pieces=pieces(policies.setup.tokenizer, chosen.rollout.tokens.tolist()),
        reward=chosen.rollout.reward,
        advantage=chosen.advantage,
        threshold=config.abandoned_ratio,
        updates=np.array(steps) - _first_step(rollouts),
        log_ratio=log_ratio,
        triggers=_triggers(log_ratio, chosen.advantage, config.abandoned_ratio),
        texts=texts,
    )


class _Policies:
    """The policies of a run's checkpoints, on the devices of this machine."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        # This machine may have other devices than the run had. The sampler needs one slot per device.
        here = dataclasses.replace(
            config,
            model=dataclasses.replace(config.model, attention="auto"),
            mesh=dataclasses.replace(config.mesh, sampling_tensor=1),
            sampling=dataclasses.replace(config.sampling, slots=jax.local_device_count()),
        )
        shape = run_model_shape(config)
        self.run = run
        self.setup = RunSetup(
            here, models.abstract(shape)[0], run_model_tokenizer(config), loading_mesh(shape)
        )
        self._scorer = ResponseScorer(
            self.setup.model, self.setup.step_options(), self.setup.mesh, self.setup.buckets()
        )

    def weights(self, step: int) -> Any:
        """Load the weights of the checkpoint after `step` updates of the run."""
        return trained_model(self.run, step, mesh=loading_mesh).params

    def follow(self, row: Candidate, steps: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return the log-ratios `[C, T]` of a response, and a greedy response of each policy."""
        ratios, texts = [], []
        for step in steps:
            params = self.weights(step)
            ratios += self.log_ratios(params, [row])
            texts.append(self._greedy(params, row.group.prompt))
        return np.stack(ratios), texts

    def log_ratios(self, params: Any, rows: Sequence[Candidate]) -> list[np.ndarray]:
        """Return the log-ratio of each token of some responses."""
        groups = [dataclasses.replace(row.group, rollouts=(row.rollout,)) for row in rows]
        weights = models.cast(params, jnp.dtype(self.setup.config.model.compute_dtype))
        found = self._scorer.start(weights, groups)()
        # In messages of an environment the ratio is 1.
        return [
            (logp - row.rollout.logprobs) * row.rollout.wrote for logp, row in zip(found, rows, strict=True)
        ]

    def _greedy(self, params: Any, prompt: np.ndarray) -> str:
        limit = self.setup.config.sampling.max_response_tokens
        settings = SamplingSettings(temperature=0.0, max_tokens=limit)
        request = make_request(prompt, settings, 0, stop=self.setup.tokenizer.eos_ids)
        with self.setup.sampler(params) as sampler:
            (response,) = sampler.run([request])
        return self.setup.tokenizer.decode(response.tokens.tolist())


def _rollouts(run: Path, config: RunConfig, stage: int) -> RolloutFolder:
    folder = stage_folders(run, stage)[stage]
    if not (folder / "manifest.json").exists():
        raise ConfigError(f"{folder}: the rollouts of stage {stage} are not complete yet")
    return open_stage(folder)


def _first_step(rollouts: RolloutFolder) -> int:
    return int(rollouts.identity["policy_updates"])


def _kept_steps(run: Path, config: RunConfig, rollouts: RolloutFolder) -> list[int]:
    """Return the steps of the checkpoints from the policy that wrote the stage to the stage's end.

    At least two are needed.
    """
    first, stage = _first_step(rollouts), rollouts.identity["stage"]
    stages = stage - rollouts.identity.get("policy_stage", stage) + 1
    last = first + stages * config.batch.updates_per_stage
    found = [int(folder.name) for folder in checkpoint_folders(run / "checkpoints")]
    steps = [step for step in found if first <= step <= last]
    if len(steps) < 2:
        raise ConfigError(
            f"{run}: keeps {len(steps)} of the checkpoints from update {first} to {last}, two or more are "
            f"needed; train, or replay the stage, with {KEEP}"
        )
    return steps


def _candidates(config: RunConfig, groups: Iterable[Group]) -> list[Candidate]:
    """Return all responses of some groups, with the advantages that they have in the updates."""
    groups = list(groups)
    rewards = shaped_rewards(groups, config.sampling.max_response_tokens, config.overlong_buffer)
    advantages = np.asarray(objectives.group_advantages(rewards, kind=config.advantage))
    return [
        Candidate(group, rollout, float(advantage))
        for group, row in zip(groups, advantages)
        for rollout, advantage in zip(group.rollouts, row)
    ]


def _response(config: RunConfig, rollouts: RolloutFolder, number: int) -> Candidate:
    size = config.batch.responses_per_prompt
    count = rollouts.prompts * size
    if not 0 <= number < count:
        raise ConfigError(f"{rollouts.folder}: no response {number}; it has 0 to {count - 1}")
    group = itertools.islice(read_groups(rollouts), number // size, number // size + 1)
    return _candidates(config, group)[number % size]


def _most_abandoned(
    policies: _Policies, params: Any, config: RunConfig, rollouts: RolloutFolder
) -> tuple[int, Candidate]:
    """Return the number and the response that `token_history` takes if the caller names none."""
    every = _candidates(config, itertools.islice(read_groups(rollouts), _GROUPS))
    wrong = {number: row for number, row in enumerate(every) if row.advantage < 0}
    if not wrong:
        raise ConfigError(
            f"{rollouts.folder}: none of the first {len(every)} responses has a negative advantage; "
            "choose a response by its number"
        )
    ratios = dict(zip(wrong, policies.log_ratios(params, list(wrong.values()))))

    def abandoned(number: int) -> tuple[int, float]:
        triggers = ratios[number] < np.log(config.abandoned_ratio)
        suffix = len(triggers) - int(triggers.argmax()) if triggers.any() else 0
        return suffix, -float(ratios[number].min(initial=0.0))

    number = max(wrong, key=abandoned)
    return number, wrong[number]


def _triggers(log_ratio: np.ndarray, advantage: float, threshold: float) -> np.ndarray:
    mask, advantages = np.ones_like(log_ratio), np.full(len(log_ratio), advantage)
    kept = objectives.veto_mask(log_ratio, advantages, mask, scope="trigger", ratio=threshold)
    return ~np.asarray(kept)
