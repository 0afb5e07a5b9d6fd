"""The config of a run: frozen dataclasses, read from YAML files and overrides such as `batch.stages=2`."""

from mugrpo_jax.config.environment import EnvironmentSection as EnvironmentSection
from mugrpo_jax.config.loading import changed as changed
from mugrpo_jax.config.loading import load as load
from mugrpo_jax.config.nested_dicts import build as build
from mugrpo_jax.config.nested_dicts import differing_keys as differing_keys
from mugrpo_jax.config.nested_dicts import to_dict as to_dict
from mugrpo_jax.config.nested_dicts import value_of as value_of
from mugrpo_jax.config.run_config import AUTO as AUTO
from mugrpo_jax.config.run_config import CHOSEN_AT_START as CHOSEN_AT_START
from mugrpo_jax.config.run_config import MOST_CHOSEN_TOKENS as MOST_CHOSEN_TOKENS
from mugrpo_jax.config.run_config import UNTIL_RESPONSES as UNTIL_RESPONSES
from mugrpo_jax.config.run_config import RunConfig as RunConfig
from mugrpo_jax.config.sections import BatchSection as BatchSection
from mugrpo_jax.config.sections import CheckpointsSection as CheckpointsSection
from mugrpo_jax.config.sections import OptimizerSection as OptimizerSection
from mugrpo_jax.config.sections import ReportSection as ReportSection
from mugrpo_jax.config.sections import WeightedReward as WeightedReward
from mugrpo_jax.config.settings import ConfigError as ConfigError
from mugrpo_jax.config.settings import Section as Section
