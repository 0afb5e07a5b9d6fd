"""Devices that JAX should not look for, or cannot find."""

import fnmatch
import glob
import importlib.metadata
import importlib.util
import os
import subprocess
import sys

import jax
import pytest

from mugrpo_jax.cli.main import main
from mugrpo_jax.distributed import platforms
from mugrpo_jax.distributed.platforms import missing_platform, without_missing_tpu


@pytest.mark.parametrize(
    ("asked", "variables", "packages", "entry_points", "devices", "wanted"),
    [
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], [], [], "cpu"),  # a laptop: JAX has set the variable
        ("tpu", {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], [], [], None),  # the user knows better
        ("tpu,cpu", {"TPU_SKIP_MDS_QUERY": "true"}, ["libtpu"], [], [], None),  # a TPU host of Kubernetes
        (None, {}, ["libtpu"], [], [], None),  # chips
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, [], [], [], None),  # no libtpu: nothing to silence
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu", "jax_plugins"], [], [], None),  # GPUs may be there
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], ["plugin"], [], None),
        (
            None,
            {"TPU_SKIP_MDS_QUERY": "1", "PJRT_NAMES_AND_LIBRARY_PATHS": "a:a.so"},
            ["libtpu"],
            [],
            [],
            None,
        ),
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], [], ["/dev/nvidiactl"], None),  # JAX warns about it
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], [], ["/dev/dxg"], None),  # a GPU in WSL2
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], [], ["/dev/vfio/0"], None),  # a TPU JAX does not know
        (None, {"TPU_SKIP_MDS_QUERY": "1"}, ["libtpu"], [], ["/dev/vfio/vfio"], "cpu"),  # on any machine
    ],
)
def test_a_tpu_is_not_looked_for_on_a_machine_without_one(
    monkeypatch, asked, variables, packages, entry_points, devices, wanted
):
    set_to = []
    monkeypatch.setattr(jax.config, "update", lambda name, value: set_to.append((name, value)))
    monkeypatch.setattr(type(jax.config), "jax_platforms", asked, raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name if name in packages else None)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: entry_points)
    monkeypatch.setattr(glob, "glob", lambda pattern: fnmatch.filter(devices, pattern))
    for name in ("TPU_SKIP_MDS_QUERY", "PJRT_NAMES_AND_LIBRARY_PATHS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    without_missing_tpu()
    assert set_to == ([("jax_platforms", wanted)] if wanted else [])


def test_every_command_looks_at_the_platforms_first(monkeypatch, capsys):
    called = []
    monkeypatch.setattr(platforms, "without_missing_tpu", lambda: called.append(True))
    assert main(["config", "batch"]) == 0 and called == [True]
    assert "prompts_per_update" in capsys.readouterr().out


def test_devices_that_are_not_there_are_named_in_one_line(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert missing_platform() == ""
    environment = os.environ | {"JAX_PLATFORMS": "nowhere", "MUGRPO_TRACEBACK": "1"}
    command = [sys.executable, "-m", "mugrpo_jax", "generate", "--model", "tiny", "--prompt", "1+1="]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    *traceback, line = done.stderr.strip().splitlines()
    assert traceback[0] == "Traceback (most recent call last):" and done.returncode == 2
    assert line.startswith("mugrpo: JAX_PLATFORMS=nowhere: JAX finds no such device")
