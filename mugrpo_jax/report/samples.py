"""Choose some responses of each stage for the report, and score their tokens after the stage's updates.

The file `samples/stage-000.json` in a run's folder has for each response the reward, the advantage, the text
of each token, its log-probs at sampling and after the updates, the tokens that the veto removes, and the
expected answer.
"""

import functools
import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mugrpo_jax import objectives
from mugrpo_jax.config import RunConfig
from mugrpo_jax.files import make_folder, size, write_atomically
from mugrpo_jax.models import Model, cast, token_logprobs
from mugrpo_jax.models.sharding import batch_sharding
from mugrpo_jax.models.tokenizer import Tokenizer
from mugrpo_jax.report.panel_data import spread
from mugrpo_jax.report.run_history import History
from mugrpo_jax.rollouts import Group, Rollout, RolloutFolder, read_groups, shaped_rewards
from mugrpo_jax.setup.run_setup import RunSetup
from mugrpo_jax.tasks.task import Problem
from mugrpo_jax.training import StepOptions

PAGE_BYTES = 1_500_000  # most bytes of samples on one page
MOST_TOKENS = 2048  # most tokens of one response on a page
MOST_ANSWER = 500  # most characters of an expected answer
_GROUPS = 64  # samples are chosen among so many groups at the start of a stage


class Candidate(NamedTuple):
    """A response that may be chosen as a sample, with its group and its advantage."""

    group: Group
    rollout: Rollout
    advantage: float

    @property
    def tokens(self) -> np.ndarray:
        """Return the tokens of the prompt and the response."""
        return np.concatenate([self.group.prompt, self.rollout.tokens])


class SampleScorer:
    """Computes log-probs of responses under given weights. It compiles one program for the whole run."""

    def __init__(self, policy: RunSetup, options: StepOptions) -> None:
        self.policy = policy
        buckets = policy.buckets()
        longest = buckets.lengths[-1]
        self.shape = buckets.rows(longest), longest
        self._logprobs = jax.jit(
            functools.partial(_logprobs, policy.trainable, options),
            out_shardings=NamedSharding(policy.mesh, P()),
        )

    def __call__(self, params: Any, rows: Sequence[Candidate]) -> list[np.ndarray]:
        """Return for each candidate the log-probs of its response tokens under the weights `params`.

        They are 0 in messages of an environment, as the stored log-probs are, so that the ratio is 1 there.
        """
        found: list[np.ndarray] = []
        for start in range(0, len(rows), self.shape[0]):
            batch = rows[start : start + self.shape[0]]
            tokens = np.zeros(self.shape, np.int32)
            for i, row in enumerate(batch):
                tokens[i, : len(row.tokens)] = row.tokens
            logp = self._score(params, tokens)
            for i, row in enumerate(batch):
                found.append(logp[i, len(row.group.prompt) : len(row.tokens)] * row.rollout.wrote)
        return found

    def _score(self, params: Any, tokens: np.ndarray) -> np.ndarray:
        sharding = batch_sharding(self.policy.mesh)
        placed = jax.make_array_from_callback(tokens.shape, sharding, tokens.__getitem__)
        with jax.set_mesh(self.policy.mesh):
            return np.asarray(self._logprobs(params, placed, self.policy.frozen()))


def _logprobs(model: Model, options: StepOptions, params: Any, tokens: jax.Array, base: Any) -> jax.Array:
    weights = cast(params, jnp.dtype(options.compute_dtype))
    logp, _ = token_logprobs(
        model,
        weights if base is None else weights | {"base": base},
        tokens,
        temperature=options.temperature,
        scan=options.scan,
        backend=options.attention,
    )
    return logp


def pick_samples(scorer: SampleScorer, config: RunConfig, stage: RolloutFolder) -> list[Candidate]:
    """Return the `candidates` in the first groups of a stage, at least as many as fill one forward pass."""
    groups = list(itertools.islice(read_groups(stage), _GROUPS))
    count = max(config.report.samples, scorer.shape[0])
    rewards = shaped_rewards(groups, config.sampling.max_response_tokens, config.overlong_buffer)
    return candidates(groups, rewards, count, config.advantage)


def write_samples(
    scorer: SampleScorer,
    params: Any,
    config: RunConfig,
    rows: Sequence[Candidate],
    path: Path,
    problems: Sequence[Problem] = (),
) -> None:
    """Score candidates on all processes. Process 0 writes the samples from `choose` into the file `path`."""
    count = config.report.samples
    scored = list(zip(rows, scorer(params, rows)))
    if jax.process_index() == 0:
        chosen = choose(scored, count)
        samples = [describe(row, logp, config, scorer.policy.tokenizer) for row, logp in chosen]
        answers = expected_answers(problems, {row.group.problem for row, _ in chosen})
        samples = [sample | {"answer": answers.get(sample["problem"], "")} for sample in samples]
        make_folder(path.parent)
        write_atomically(path, json.dumps(samples, allow_nan=False, separators=(",", ":")))


def expected_answers(problems: Sequence[Problem], wanted: set[str]) -> dict[str, str]:
    """Return {id of a problem: its right answer} for the wanted problems; a very long answer is cut."""
    found: dict[str, str] = {}
    for problem in problems:
        if len(found) == len(wanted):
            break
        if problem.id in wanted:
            cut = len(problem.answer) > MOST_ANSWER
            found[problem.id] = problem.answer[:MOST_ANSWER] + ("…" if cut else "")
    return found


def candidates(groups: Sequence[Group], rewards: np.ndarray, count: int, advantage: str) -> list[Candidate]:
    """Return up to `count` responses: first the best and worst of each group, then all other responses.

    Groups whose responses all have the same reward come last.
    """
    advantages = np.asarray(objectives.group_advantages(rewards, kind=advantage))
    order = np.argsort(rewards.max(axis=1) == rewards.min(axis=1), kind="stable").tolist()
    ends = [(i, int(end(rewards[i]))) for i in order for end in (np.argmax, np.argmin)]
    others = [(i, j) for i in order for j in range(rewards.shape[1])]
    places = list(dict.fromkeys(ends + others))[:count]
    return [Candidate(groups[i], groups[i].rollouts[j], float(advantages[i, j])) for i, j in places]


def choose(scored: Sequence[tuple[Candidate, np.ndarray]], count: int) -> list[tuple[Candidate, np.ndarray]]:
    """Return `count` items: half with advantage < 0 (smallest ratio first), half > 0, then other items."""

    def lowest(item: tuple[Candidate, np.ndarray]) -> float:
        row, logp = item
        return float((logp - row.rollout.logprobs).min(initial=0.0))

    wrong = sorted((item for item in scored if item[0].advantage < 0), key=lowest)
    right = [item for item in scored if item[0].advantage > 0]
    neither = [item for item in scored if item[0].advantage == 0]
    half = wrong[: count // 2] + right[: count - count // 2]
    rest = wrong[count // 2 :] + right[count - count // 2 :] + neither
    return (half + rest)[:count]


def describe(row: Candidate, logp: np.ndarray, config: RunConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a sample as a dict for JSON. `logp` are the log-probs after the stage's updates."""
    settings = config.objective.settings
    scope, ratio = settings.get("veto", "none"), settings.get("veto_ratio", 1e-4)
    log_ratio = logp - row.rollout.logprobs
    # Pad to the longest possible response, so that jax compiles only one shape.
    padded, mask = np.zeros((2, 1, max(config.sampling.max_response_tokens, len(logp))), np.float32)
    padded[0, : len(logp)], mask[0, : len(logp)] = log_ratio, row.rollout.wrote
    kept = objectives.veto_mask(padded, np.array([row.advantage]), mask, scope=scope, ratio=ratio)
    veto = scope != "none" and row.advantage < 0
    return {
        "problem": row.group.problem,
        "prompt": tokenizer.decode(row.group.prompt.tolist()),
        "pieces": pieces(tokenizer, row.rollout.tokens.tolist()),
        "behavior": _rounded(row.rollout.logprobs),
        "logp": _rounded(logp),
        "triggers": np.flatnonzero(log_ratio < math.log(ratio)).tolist() if veto else [],
        "vetoed": np.flatnonzero(row.rollout.wrote & ~np.asarray(kept)[0, : len(logp)]).tolist(),
        "reward": row.rollout.reward,
        "advantage": round(row.advantage, 4),
        "finish": row.rollout.finish,
        "status": row.rollout.status,
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [round(float(value), 4) for value in np.nan_to_num(values, neginf=-1e4)]


def pieces(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[str]:
    """Return the text of each token; if several tokens form one character, the last one gets it."""
    found, start = [], 0
    for end in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[start:end])
        whole = not text.endswith("\ufffd") or end - start >= 4  # no character has more than four bytes
        found.append(text if whole else "")
        start = end if whole else start
    return found


def page_samples(runs: Sequence[History]) -> tuple[list[dict[str, Any]], int]:
    """Return the samples for a page, and the number of stages left out to keep the page small."""
    shown: list[dict[str, Any]] = []
    left_out = 0
    for i, run in enumerate(runs):
        files = sorted((run.folder / "samples").glob("stage-*.json"))
        total = sum(size(file) for file in files)
        most = max(int(len(files) * PAGE_BYTES / len(runs) / max(total, 1)), 1)
        chosen = spread(files, most) if len(files) > 1 and most > 1 else files[-most:]
        left_out += len(files) - len(chosen)
        for file in chosen:
            stage = int(file.stem.removeprefix("stage-"))
            shown += [_shortened(sample) | {"run": i, "stage": stage} for sample in _read(file)]
    return shown, left_out


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        return json.loads(path.read_text())
    except ValueError:  # the file is damaged; the page shows the samples of other files
        return []


def _shortened(sample: dict[str, Any]) -> dict[str, Any]:
    """Return the sample with only its first `MOST_TOKENS` tokens, to keep the page small."""
    tokens = len(sample["pieces"])
    if tokens <= MOST_TOKENS:
        return sample
    ends = {name: sample[name][:MOST_TOKENS] for name in ("pieces", "behavior", "logp")}
    places = {name: [i for i in sample[name] if i < MOST_TOKENS] for name in ("triggers", "vetoed")}
    return sample | ends | places | {"cut": f"the first {MOST_TOKENS} of {tokens} tokens"}
