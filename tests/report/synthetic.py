"""Write folders of synthetic runs, without running anything."""

import json
import math

import numpy as np
import yaml

from mugrpo_jax import config as configs


def write_run(folder, *, stages=3, mu=24, done=None, samples=2, rate=1e-4, seed=0, overrides=()):
    """A run of `stages` stages of `mu` updates, stopped after `done`. The last line of the journal is cut."""
    given = [f"batch.stages={stages}", f"batch.updates_per_stage={mu}", f"optimizer.learning_rate={rate}"]
    config = configs.load(None, [*given, *overrides])
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(configs.to_dict(config), sort_keys=False))
    (folder / "environment.json").write_text(json.dumps({"jax": "0.10.2", "devices": "1 × cpu"}))
    done = stages * mu if done is None else done
    records = [_warm_start(i) for i in (-1, 0)] + [_evaluation(0, stages * mu)]
    rng = np.random.default_rng(seed)
    for stage in range(-(-done // mu)):
        records.append(_stage(stage, mu, stages * mu))
        counted = {"abandoned_ratio": config.abandoned_ratio}
        count = min(mu, done - stage * mu)
        records += [_update(stage, i, mu, stages * mu, rng) | counted for i in range(count)]
        if done >= (stage + 1) * mu:
            records.append(_evaluation((stage + 1) * mu, stages * mu))
            write_samples(folder, stage, samples)
    lines = [json.dumps(record) for record in records]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"kind": "upd')
    return folder


def write_samples(folder, stage, count, tokens=6):
    """Samples of a stage. The first half is right; in the wrong half all tokens after token 2 are vetoed."""
    (folder / "samples").mkdir(exist_ok=True)
    found = []
    for i in range(count):
        wrong = i >= count // 2
        logp = [-0.1] * tokens
        if wrong:
            logp[2] = -12.0
        found.append(
            {
                "problem": f"p{i}",
                "prompt": "1+<b>2</b>=",
                "pieces": [f"t{j} " for j in range(tokens - 1)] + [""],
                "behavior": [-0.2] * tokens,
                "logp": logp,
                "triggers": [2] if wrong else [],
                "vetoed": list(range(3, tokens)) if wrong else [],
                "reward": 0.0 if wrong else 1.0,
                "advantage": -1.0 if wrong else 1.0,
                "finish": "stop",
                "status": "ok",
                "answer": "3 < 4",
            }
        )
    (folder / "samples" / f"stage-{stage:03d}.json").write_text(json.dumps(found))


def _warm_start(updates):
    return {"kind": "warm_start", "updates": updates, "loss": 1.0, "seconds": {"update": 1.0, "elapsed": 1.0}}


def _reward(share):
    return 0.2 + 0.6 * share


def _evaluation(updates, total):
    accuracy = _reward(updates / total)
    seconds = {"evaluate": 2.0, "elapsed": 2.5}
    shared = {"updates": updates, "accuracy": accuracy, "standard_error": 0.02, "problems": 50}
    broken = {"truncated": 0.05, "malformed": 0.1 * updates / total}
    return {"kind": "evaluation", **shared, **broken, "seconds": seconds}


def _stage(stage, mu, total):
    return {
        "kind": "stage",
        "stage": stage,
        "updates": stage * mu,
        "reward": _reward(stage * mu / total),
        "response_length": 100.0 + stage,
        "truncated": 0.1,
        "malformed": 0.05 * stage,
        "equal_groups": 0.25 + 0.01 * stage,
        "responses": 512 * mu,
        "response_tokens": 51200 * mu,
        "status": {"ok": 512 * mu},
        "seconds": {"generate": 12.0, "sample": 9.0, "score_wait": 2.0, "occupancy": 0.93, "elapsed": 13.0},
    }


def _update(stage, i, mu, total, rng):
    share = i / mu
    updates = stage * mu + i + 1
    ratios = {"p05": 1 - 0.6 * share, "p50": 1.0, "p95": 1 + share}
    return {
        "kind": "update",
        "stage": stage,
        "updates": updates,
        "staleness": i,
        "reward": _reward(stage * mu / total) + 0.05 * rng.standard_normal(),
        "response_tokens": 51200.0,
        "tokens": 51200.0,
        "response_length": 100.0 + stage + rng.standard_normal(),
        "vetoed/tokens": 0.02 * share**2,
        "triggered/negative_responses": 0.1 * share,
        "clipped/tokens": 0.01 * share,
        "clipped/positive_tokens": 0.02 * share,
        "clipped/negative_tokens": 0.0,
        "abandoned/negative_responses": 0.1 * share,
        "abandoned/positive_responses": 0.01 * share,
        "negative_pull": 100.0,
        "behind_abandoned/negative_pull": 0.05 * share,
        "before_abandoned_tokens": 10.0 * i,
        "behind_abandoned_tokens": 10.0 * i,
        "ratio/before_abandoned_tokens": 1 - 0.5 * share,
        "ratio/behind_abandoned_tokens": 1 - 0.1 * share,
        **{f"within_{band}/tokens": math.exp(-share / band) - 1e-3 for band in (0.001, 0.01, 0.05)},
        "cap/tokens": math.exp(-share),  # P3O only; a figure of another objective must not draw it
        "entropy/tokens": 0.5 - 0.1 * share,
        "loss": 0.01 * rng.standard_normal(),
        "k3/tokens": 0.05 * share**2,
        "equal_groups": 0.3 + 0.1 * stage,
        "ess/tokens": math.exp(-share),
        "sequence_ess/responses": math.exp(-4 * share),
        **{f"ratio_{name}/positive_tokens": value for name, value in ratios.items()},
        **{f"ratio_{name}/negative_tokens": value / 2 for name, value in ratios.items()},
        "ratio/negative_tokens": 1 - 0.3 * share,
        "gap/tokens": 1e-6 + 0.2 * share,
        "gap_max": 1e-5 + 8 * share,
        "drift": 0.1 * math.sqrt(i + 1),
        "gradient_cosine": 0.1 * math.sin(i + 1),
        "gradient_norm": 0.3 + 0.1 * rng.random(),
        "update_norm": 0.01,
        "skipped": 0.0,
        "seconds": {"update": 0.5, "elapsed": 0.6},
    }
