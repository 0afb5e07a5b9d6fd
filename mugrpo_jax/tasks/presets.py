"""The benchmarks of the paper and GSM8K: where they are on the Hub and how to read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mugrpo_jax.tasks.base import Message, Task
from mugrpo_jax.tasks.sources import Columns, dataset_task
from mugrpo_jax.tasks.word_problems import INSTRUCTION


def _user(text: str) -> tuple[Message, ...]:
    return ({"role": "user", "content": text},)


_BOXED = "\n\nReason step by step, and put the final answer in \\boxed{{}}."


@dataclass(frozen=True)
class Preset:
    """A published set of problems: its columns, its reward and its sources on the Hub."""

    columns: Columns
    train: str | None = None
    test: str | None = None
    reward: str = "math"


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gsm8k": Preset(
            Columns(_user("{question}\n" + INSTRUCTION), answer_part="hashes", solution="answer"),
            train="hub:openai/gsm8k/main:train",
            test="hub:openai/gsm8k/main:test",
        ),
        "math500": Preset(
            Columns(_user("{problem}" + _BOXED), solution="solution"), test="hub:HuggingFaceH4/MATH-500:test"
        ),
        "amc23": Preset(Columns(_user("{question}" + _BOXED)), test="hub:math-ai/amc23:test"),
        "amc24": Preset(Columns(_user("{problem}" + _BOXED)), test="hub:rawsh/2024_AMC12:train"),
        "aime24": Preset(
            Columns(_user("{problem}" + _BOXED), solution="solution"),
            test="hub:HuggingFaceH4/aime_2024:train",
        ),
        "aime25": Preset(Columns(_user("{problem}" + _BOXED)), test="hub:math-ai/aime25:test"),
        "deepscaler": Preset(
            Columns(_user("{problem}" + _BOXED)), train="hub:agentica-org/DeepScaleR-Preview-Dataset:train"
        ),
    }
)


def preset_task(
    name: str, *, folder: str | None = None, train: str | None = None, test: str | None = None
) -> Task:
    """The task of a preset, from the Hub or from local files.

    Args:
      name: a key of `PRESETS`.
      folder: a folder with `train` and `test` as `.jsonl` or `.parquet`, of which at least one is there.
      train: a source in place of the preset's own.
      test: likewise.
    """
    preset = PRESETS[name]
    if folder is not None:
        train, test = train or _in_folder(folder, "train"), test or _in_folder(folder, "test")
        if train is None and test is None:
            raise ValueError(
                f"{folder}: no train or test in it; possible: train.jsonl, test.jsonl or .parquet"
            )
    elif train is None and test is None:
        train, test = preset.train, preset.test
    return dataset_task(name=name, train=train, test=test, columns=preset.columns, reward=preset.reward)


def _in_folder(folder: str, split: str) -> str | None:
    paths = [Path(folder) / f"{split}{suffix}" for suffix in (".jsonl", ".parquet")]
    return next((str(path) for path in paths if path.is_file()), None)
