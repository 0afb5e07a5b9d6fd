"""The model card of an exported model: `README.md` with the metadata that the Hugging Face Hub reads."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from mugrpo_jax import __version__
from mugrpo_jax.config import RunConfig, WeightedReward
from mugrpo_jax.files import to_path
from mugrpo_jax.runs.journal import read_journal
from mugrpo_jax.runs.run_folder import read_config

BASES = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_USE = """## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{repo}")
model = AutoModelForCausalLM.from_pretrained("{repo}")
```

The licence of the starting model applies.
"""
_USE_ADAPTER = """## Use

```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("{repo}")
```

The licence of the starting model applies.
"""


def model_card(name: str | Path, step: int | None, repo: str, *, adapter: bool = False) -> str:
    """Return the card of a model.

    Args:
      name: the folder of a run, or the name of another model.
      step: the checkpoint of the run; None if the model is not from a run.
      repo: the repository on the Hub, `OWNER/NAME`.
      adapter: whether the repository has only the adapters of a LoRA run.
    """
    if step is None:
        body, source = f"Converted from `{_public(str(name))}` by mugrpo_jax.", str(name)
    else:
        config = read_config(to_path(name))
        body, source = _training(config, step, to_path(name) / "metrics.jsonl"), config.model.source
    about, title = _metadata(source, trained=step is not None, adapter=adapter), repo.partition("/")[2]
    use = _USE_ADAPTER if adapter else _USE
    return f"---\n{about}---\n\n# {title}\n\n{body}\n\n{use.format(repo=repo)}"


def _metadata(source: str, *, trained: bool, adapter: bool) -> str:
    library = "peft" if adapter else "transformers"
    about: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
    about["tags"] = ["mugrpo-jax", *(["grpo", "reinforcement-learning"] if trained else [])]
    base = BASES.get(source, source)
    if _is_hub_name(base):
        about["base_model"] = base
    return yaml.safe_dump(about, sort_keys=False)


def _is_hub_name(source: str) -> bool:
    return _HUB_NAME.fullmatch(source) is not None and not Path(source).exists()


def _public(text: str) -> str:
    """Return a name for others to read: of a path on this machine, only the last part."""
    return text if _is_hub_name(text) or text.startswith("hub:") else Path(text).name


def _reward(reward: str | Sequence[WeightedReward] | None) -> str:
    if reward is None or isinstance(reward, str):
        return "the task's own" if reward is None else f"`{reward}`"
    return " + ".join(f"{part.weight:g} × `{part.name}`" for part in reward)


def _training(config: RunConfig, step: int, journal: Path) -> str:
    batch, task, lora, warm = config.batch, config.task, config.lora, config.warm_start.updates
    plain = {key: value for key, value in task.options.items() if isinstance(value, str | int | float)}
    options = ", ".join(f"{key}: {_public(str(value))}" for key, value in plain.items())
    rows = {
        "starting model": f"`{_public(config.model.source)}`",
        "objective": f"`{config.objective.name}`",
        "task": f"`{task.name}`" + (f" ({options})" if options else ""),
        "reward": _reward(task.reward),
        "updates": f"{step} of {batch.stages} stages × {batch.updates_per_stage}",
        "update": f"{batch.prompts_per_update} prompts × {batch.responses_per_prompt} responses",
        "longest response": f"{config.sampling.max_response_tokens} tokens",
        **({"LoRA": f"rank {lora.rank}, alpha {lora.alpha:g}"} if lora.rank else {}),
        "learning rate": f"{config.optimizer.learning_rate:g} ({config.optimizer.schedule})",
        "warm start": f"{warm} supervised updates" if warm else "none",
        "seed": str(config.seed),
    }
    table = "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows.items())])
    how = "Trained with reinforcement learning on verifiable rewards, in large stages on stale rollouts, by"
    accuracy = _accuracy(step, list(read_journal(journal)))
    return f"{how} mugrpo_jax {__version__}.\n\n{table}\n\n{accuracy}"


def _accuracy(step: int, records: list[dict[str, Any]]) -> str:
    """Return a sentence about the accuracy before training and of this checkpoint, where measured."""
    measured = {record["updates"]: record for record in records if record["kind"] == "evaluation"}
    shown = [
        measured[updates] for updates in sorted({min(measured, default=step), step}) if updates in measured
    ]
    if not shown:
        return "Its accuracy on held-out problems was not measured."
    figures = " and ".join(
        f"{record['accuracy']:.1%} ± {record['standard_error']:.1%} after {record['updates']} updates"
        for record in shown
    )
    return f"Accuracy on {shown[-1]['problems']} held-out problems (mean ± standard error): {figures}."
