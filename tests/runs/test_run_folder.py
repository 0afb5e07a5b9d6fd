"""The folder of a run: which config may continue it."""

import pytest

from mugrpo_jax import config as configs
from mugrpo_jax.config import ConfigError
from mugrpo_jax.runs.run_folder import RunFolder


def test_a_run_may_continue_with_other_display_settings_and_nothing_else(tmp_path):
    RunFolder(tmp_path, configs.load(None))
    other = configs.load(None, ["tracking.tensorboard=true", "report.samples=0"])
    RunFolder(tmp_path, other)
    assert other.fingerprint() == configs.load(None).fingerprint()
    with pytest.raises(ConfigError, match=r"another config: seed"):
        RunFolder(tmp_path, configs.load(None, ["seed=1"]))


def test_a_run_that_is_older_than_a_key_continues_with_its_default(tmp_path):
    folder = RunFolder(tmp_path, configs.load(None)).folder
    path = folder / "config.yaml"
    lines = path.read_text().splitlines(keepends=True)
    older = [line for line in lines if "overlong_buffer" not in line and "equal_groups" not in line]
    assert len(lines) - len(older) == 2
    path.write_text("".join(older))
    RunFolder(tmp_path, configs.load(None))
    with pytest.raises(ConfigError, match=r"config: batch.equal_groups \('keep' there, 'skip' here\)"):
        RunFolder(tmp_path, configs.load(None, ["batch.equal_groups=skip"]))
