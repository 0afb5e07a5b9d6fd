"""Several processes are one run: same rollouts, same metrics, same parameters; they live and end together."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import driven_runs
import imitated_hosts
import jax
import numpy as np
import optax
import pytest
import quick_programs

from mugrpo_jax import config as configs
from mugrpo_jax import distributed, models, rollouts, training
from mugrpo_jax.cli.main import STOPPED
from mugrpo_jax.setup.trained_model import export, trained_model
from mugrpo_jax.training import CheckpointStore, Cursor

# The tiny run of the launch scripts, with a loss that needs a reference and a proximal policy.
CONFIG = f"""{imitated_hosts.CONFIG}
objective: {{name: decoupled_ppo, knobs: {{kl_coef: 0.1, entropy_coef: 0.01}}}}
proximal_every: 3
"""
PATIENCE = 10  # seconds without a sign of life


def by_flags(count):
    places = imitated_hosts.flags(count)
    return [dataclasses.replace(p, flags=[*p.flags, "--host-timeout", str(PATIENCE)]) for p in places]


def launch(out, processes, *overrides, devices=8, kills=None, own=None):
    """Start a run's processes and wait for them; `kills` and `own` overrides are by process."""
    started, running = time.monotonic(), []
    for i, given in enumerate(processes):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices // len(processes)} "
            + quick_programs.flags(),
            "PYTHONPATH": os.pathsep.join([str(out.parent), str(Path(__file__).parents[2])]),
            "JAX_COMPILATION_CACHE_DIR": str(out.parent / f"programs-{len(processes)}"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }
        point = (kills or {}).get(i, ["none", "0"])
        arguments = [str(out.parent / "hosts.yaml"), "--out", str(out), *given.flags, *overrides]
        arguments = [*point, "--", *arguments, *(own or {}).get(i, [])]
        running.append(driven_runs.DrivenRun(arguments, environment | given.variables))
    try:
        shown = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    codes = [process.returncode for process in running]
    return codes, ["".join(texts) for texts in shown], time.monotonic() - started


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    imitated_hosts.prepare(folder)
    (folder / "hosts.yaml").write_text(CONFIG)
    return folder


@pytest.fixture(scope="module")
def alone(place):
    codes, shown, _ = launch(place / "alone", [imitated_hosts.Place()])
    assert codes == [0], shown
    return place / "alone"


@pytest.fixture(scope="module")
def two_shown(place):
    codes, shown, _ = launch(place / "two", imitated_hosts.slurm(2, 1))
    assert codes == [0, 0], shown
    assert shown[0].startswith("hosts: 2 processes through SLURM, 8 cpu devices, 4 in each process\n")
    return shown


@pytest.fixture(scope="module")
def two(place, two_shown):
    return place / "two"


def groups(folder):
    for stage in sorted((folder / "rollouts").iterdir()):
        yield from rollouts.read_groups(rollouts.open_stage(stage))


def assert_same_rollouts(a, b):
    for mine, theirs in zip(groups(a), groups(b), strict=True):
        assert (mine.index, mine.problem) == (theirs.index, theirs.problem)
        for x, y in zip(mine.rollouts, theirs.rollouts, strict=True):
            assert (x.reward, x.finish, x.status) == (y.reward, y.finish, y.status)
            np.testing.assert_array_equal(x.tokens, y.tokens)
            np.testing.assert_allclose(x.logprobs, y.logprobs, atol=1e-5)


def assert_same_end(a, b, tolerance):
    """Sums over devices are taken in another order, so float32 differs in its last digits.

    Quantiles and effective sample sizes are of micro-batches, whose rows depend on the mesh.
    """
    skipped = ("seconds", "padding", "ratio_p", "ess", "sequence_ess")
    mine, theirs = ((f / "metrics.jsonl").read_text().splitlines() for f in (a, b))
    for x, y in zip(map(json.loads, mine), map(json.loads, theirs), strict=True):
        x, y = ({name: record[name] for name in record if not name.startswith(skipped)} for record in (x, y))
        assert x.keys() == y.keys()
        for name in x:
            if isinstance(x[name], float):
                assert x[name] == pytest.approx(y[name], rel=100 * tolerance, abs=100 * tolerance), name
            else:
                assert x[name] == y[name], name
    weights = [jax.tree.leaves(jax.device_get(trained_model(folder, 8).params)) for folder in (a, b)]
    for x, y in zip(*weights, strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance)


def test_two_processes_that_slurm_started_are_one(alone, two):
    assert_same_rollouts(alone, two)
    assert_same_end(alone, two, 1e-5)
    moved = trained_model(two, 8).params["embed"] - trained_model(two, 0).params["embed"]
    assert np.abs(moved).max() > 1e-2


def test_each_process_reads_only_the_rows_of_its_own_devices(two_shown):
    read = [int(re.search(r"rows read: (\d+)", text)[1]) for text in two_shown]
    assert sum(read) == 2 * 4 * 2 * 4  # every response of the run once
    assert max(read) < 0.6 * sum(read)


def test_two_processes_export_one_folder(two, place):
    """Each process holds half of the weights; together they write what one process would write."""
    running = []
    settings = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    settings |= {"XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {quick_programs.flags()}"}
    for given in by_flags(2):
        flags = given.flags
        command = [sys.executable, "-m", "mugrpo_jax", "export", str(two), str(place / "out"), *flags]
        running.append(
            subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE, text=True)
        )
    try:
        shown = [process.communicate(timeout=240)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0]
    assert [f"{place / 'out'}: written" in text for text in shown] == [True, False]
    export(two, place / "one")
    names = sorted(path.name for path in (place / "one").iterdir())
    assert names == sorted(path.name for path in (place / "out").iterdir())
    for name in names:
        assert (place / "out" / name).read_bytes() == (place / "one" / name).read_bytes()


def test_four_processes_on_another_mesh_are_one(alone, place):
    mesh = ["mesh.data=2", "mesh.fsdp=2", "mesh.tensor=2", "mesh.sampling_tensor=2"]
    codes, shown, _ = launch(place / "four", imitated_hosts.variables(4), *mesh)
    assert codes == [0] * 4, shown
    assert_same_rollouts(alone, place / "four")
    assert_same_end(alone, place / "four", 1e-5)
    assert "stage 1: 32 responses" in shown[0]  # only the first speaks
    assert not any("responses" in text or "it/s" in text for text in shown[1:])


def test_two_processes_sample_as_one_from_several_policies_with_a_cache_in_int8(alone, place):
    other = f"{{source: {alone}@3, share: 0.5, temperature: 1.3}}"
    keys = [
        f"sampling.behaviors=[{{source: current, share: 0.5}}, {other}]",
        *("sampling.cache_dtype=int8", "batch.stages=1", "batch.updates_per_stage=2"),
        *("evaluation.problems=0", "checkpoints.every=2"),
    ]
    for name, hosts in (("mixed", [imitated_hosts.Place()]), ("mixed-two", by_flags(2))):
        codes, shown, _ = launch(place / name, hosts, *keys)
        assert codes == [0] * len(hosts), shown
    assert_same_rollouts(place / "mixed", place / "mixed-two")
    names = {rollout.behavior for group in groups(place / "mixed-two") for rollout in group.rollouts}
    assert len(names) == 2


def test_two_processes_train_on_what_a_sampler_of_its_own_writes(alone, place):
    out = place / "waiting"
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": quick_programs.flags()}
    environment["PYTHONPATH"] = os.pathsep.join([str(place), str(Path(__file__).parents[2])])
    program = "import sys; from mugrpo_jax.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "sample", str(out), "--watch", "--wait-limit", "100"]
    sampler = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        codes, shown, _ = launch(out, by_flags(2), "--rollouts", "wait")
        assert codes == [0, 0], shown
        _, said = sampler.communicate(timeout=60)
        assert sampler.returncode == 0, said
    finally:
        sampler.kill()
    assert_same_rollouts(alone, out)
    assert_same_end(alone, out, 1e-5)


def test_a_host_that_dies_ends_the_others_and_the_same_command_continues(two, place):
    out = place / "killed"
    for phase, dead, kill in (
        ("generation", 1, ["before a shard", "2"]),
        ("updates", 1, ["before an update", "3"]),
        ("checkpoint", 0, ["while saving", "2"]),
    ):
        codes, shown, seconds = launch(out, by_flags(2), kills={dead: kill})
        assert codes[dead] == -9, (phase, shown)
        assert seconds < 120 + 2 * PATIENCE
        assert codes[1 - dead] == distributed.GONE, (phase, codes, shown)
        assert f"mugrpo: another host is gone: process {dead}, its connection" in shown[1 - dead]
        assert "Terminating process" not in shown[1 - dead]  # JAX's own end, with a stack trace
    # A stop asked of one stops both, after the same update, with a checkpoint.
    codes, shown, _ = launch(out, by_flags(2), kills={1: ["before an update", "1", "term"]})
    assert codes == [STOPPED] * 2, shown
    assert sum("stopping" in text for text in shown) >= 1
    assert not (out / "checkpoints" / "000008").exists()
    # What two processes began, one ends, on other devices.
    codes, shown, _ = launch(out, [imitated_hosts.Place()], "mesh.fsdp=2", "mesh.tensor=2", devices=4)
    assert codes == [0], shown
    assert "continuing at stage" in shown[0]
    assert_same_rollouts(out, two)
    assert_same_end(out, two, 1e-5)


def test_hosts_that_disagree_all_stop_and_name_the_key(two, place):
    codes, shown, _ = launch(place / "disagree", imitated_hosts.open_mpi(2, 5), own={1: ["seed=7"]})
    assert codes == [2, 2], shown
    assert "hosts: 2 processes through Open MPI, 8 cpu devices, 4 in each process" in shown[0]
    for text in shown:
        assert "hosts disagree on the config: seed (7 there, 0 here)" in text
    assert not (place / "disagree").exists()
    # A run that was started has chosen values for keys that say `auto`. The user did not give those.
    codes, shown, _ = launch(two, imitated_hosts.open_mpi(2, 5), own={1: ["seed=7"]})
    assert codes == [2, 2] and "config: seed (7 there, 0 here) (there: process 1" in shown[0], shown


def test_a_failure_of_one_host_is_named_on_all(place):
    missing = ["task.name=dataset", "task.options={train: there.jsonl}"]
    (place / "there.jsonl").unlink(missing_ok=True)
    codes, shown, _ = launch(place / "failed", imitated_hosts.gke(2, 1), *missing)
    assert codes == [2, 2], shown
    assert "hosts: 2 processes through GKE, 2 slices, 8 cpu devices, 4 in each process" in shown[0]
    assert all("there.jsonl: no such file" in text for text in shown)


# -- finding each other


def test_a_host_alone_gives_up_in_words(place):
    hosts = by_flags(2)[:1]
    hosts[0].flags[-1] = "3"  # seconds of --host-timeout
    codes, shown, _ = launch(place / "waiting", hosts)
    assert codes == [distributed.GONE]
    assert "process 1 of 2 did not come within 3 s; start all of them" in shown[0]


# -- checkpoints


def test_a_checkpoint_of_one_mesh_is_restored_on_another(tmp_path):
    shape = models.ModelConfig(
        vocab_size=32,
        hidden_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        intermediate_size=16,
    )
    optimizer = training.make_optimizer(configs.OptimizerSection(), 10, models.Decoder(shape))

    def spread(mesh):
        model, params = models.create(shape, mesh=mesh)
        return training.make_state(params, optimizer, mesh, model, track_drift=True)

    state = spread(models.make_mesh(fsdp=8))
    noise = iter(jax.random.split(jax.random.key(0), 100))
    state = jax.tree.map(
        lambda x: x + jax.random.normal(next(noise), x.shape) if x.dtype == np.float32 else x + 3, state
    )
    store = CheckpointStore(tmp_path / "checkpoints", configs.CheckpointsSection())
    store.save(state, Cursor(stage=1, updates=5))
    store.wait()
    devices = jax.devices()
    for mesh in (
        models.make_mesh(fsdp=2, tensor=2, devices=devices[4:]),
        models.make_mesh(devices=devices[5:6]),
    ):
        target = spread(mesh)
        found, cursor = store.restore(target)
        assert cursor == Cursor(stage=1, updates=5)
        for a, b, c in zip(*map(jax.tree.leaves, (found, state, target)), strict=True):
            assert a.sharding == c.sharding
            np.testing.assert_array_equal(a, b)
    store.close()
    assert float(optax.tree.norm(state.params)) > 1
