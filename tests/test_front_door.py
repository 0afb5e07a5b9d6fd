"""`import mugrpo_jax` is fast and offers the few names that most programs need."""

import os
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import pytest

import mugrpo_jax
from mugrpo_jax import config, loop, models, objectives, sampling


def python(*arguments):
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_import_loads_nothing_heavy():
    code = """
import sys, time
before, started = set(sys.modules), time.process_time()
import mugrpo_jax
seconds, new = time.process_time() - started, set(sys.modules) - before
assert {"generate", "load_config", "load_model", "objectives", "train"} <= set(dir(mugrpo_jax))
heavy = {"jax", "numpy", "flax", "yaml", "transformers"} & set(sys.modules)
assert not heavy, heavy
assert {name for name in new if name.startswith("mugrpo_jax.")} == set(), new
print(seconds)
"""
    assert min(float(python("-c", code)) for _ in range(3)) < 0.2


def test_names_are_loaded_when_they_are_first_used():
    assert mugrpo_jax.generate is sampling.generate
    assert mugrpo_jax.load_config is config.load
    assert mugrpo_jax.load_model is models.load_model
    assert mugrpo_jax.objectives is objectives
    assert mugrpo_jax.train is loop.stages.train
    assert all(hasattr(mugrpo_jax, name) for name in mugrpo_jax.__all__)
    with pytest.raises(AttributeError, match="module 'mugrpo_jax' has no attribute 'trian'"):
        mugrpo_jax.trian  # noqa: B018


def test_submodules_can_be_imported_first():
    python("-c", "from mugrpo_jax import objectives, config; objectives.mu_grpo, config.load")
    python("-c", "from mugrpo_jax import load_config; assert load_config(None).seed == 0")


def test_the_module_is_the_program():
    assert python("-m", "mugrpo_jax", "--version") == f"mugrpo {mugrpo_jax.__version__}\n"
    assert "usage: mugrpo " in python("-m", "mugrpo_jax", "--help")


def test_the_help_is_fast():
    seconds = []
    for _ in range(3):
        before = os.times()
        python("-m", "mugrpo_jax", "--help")
        after = os.times()  # time of the processor, which other programs on this machine do not change much
        seconds.append(sum(after[2:4]) - sum(before[2:4]))
    assert min(seconds) < 0.3


def test_types_are_shipped():
    assert (resources.files("mugrpo_jax") / "py.typed").is_file()
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert settings["tool"]["setuptools"]["package-data"]["mugrpo_jax"] == ["py.typed"]
