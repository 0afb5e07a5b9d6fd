"""List known datasets, which are the paper's benchmarks and GSM8K, and make tasks from the datasets."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from mugrpo_jax.tasks.dataset_files import Columns, dataset_task
from mugrpo_jax.tasks.task import Task, as_prompt
from mugrpo_jax.tasks.word_problems import INSTRUCTION


@dataclass(frozen=True)
class Preset:
    """A published dataset: its columns, the Hub sources of its problems (None if absent), and its reward."""

    columns: Columns
    train: str | None = None
    test: str | None = None
    reward: str = "math"


def _boxed(column: str, solution: str | None = None) -> Columns:
    """Make `Columns` for a dataset whose problems are in `column`. The prompt asks for a boxed answer."""
    ask = "\n\nReason step by step, and put the final answer in \\boxed{{}}."
    return Columns(as_prompt(f"{{{column}}}{ask}", chat=True), solution=solution)


PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        "gsm8k": Preset(
            Columns(
                as_prompt("{question}\n" + INSTRUCTION, chat=True), answer_part="hashes", solution="answer"
            ),
            train="hub:openai/gsm8k/main:train",
            test="hub:openai/gsm8k/main:test",
        ),
        "math500": Preset(_boxed("problem", "solution"), test="hub:HuggingFaceH4/MATH-500:test"),
        "amc23": Preset(_boxed("question"), test="hub:math-ai/amc23:test"),
        "amc24": Preset(_boxed("problem"), test="hub:rawsh/2024_AMC12:train"),
        "aime24": Preset(_boxed("problem", "solution"), test="hub:HuggingFaceH4/aime_2024:train"),
        "aime25": Preset(_boxed("problem"), test="hub:math-ai/aime25:test"),
        "deepscaler": Preset(_boxed("problem"), train="hub:agentica-org/DeepScaleR-Preview-Dataset:train"),
    }
)


def preset_task(
    name: str, *, folder: str | None = None, train: str | None = None, test: str | None = None
) -> Task:
    """Load the preset `PRESETS[name]` as a task, from the Hub or from local files.

    `folder` is a folder with `train.jsonl`, `test.jsonl` or both, or with `.parquet` files of these names.
    `train` and `test` are sources of problems, as in `dataset_files`. If `folder`, `train` and `test`
    are all None, the problems are loaded from the preset's sources on the Hub.
    """
    preset = PRESETS[name]
    if folder is not None:
        train, test = train or _in_folder(folder, "train"), test or _in_folder(folder, "test")
        if train is None and test is None:
            files = "train.jsonl, test.jsonl or .parquet"
            raise ValueError(f"{folder}: no train or test in it; possible: {files}")
    elif train is None and test is None:
        train, test = preset.train, preset.test
    return dataset_task(name=name, train=train, test=test, columns=preset.columns, reward=preset.reward)


def _in_folder(folder: str, split: str) -> str | None:
    paths = [Path(folder) / f"{split}{suffix}" for suffix in (".jsonl", ".parquet")]
    return next((str(path) for path in paths if path.is_file()), None)
