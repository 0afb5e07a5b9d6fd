"""A killed run continues with the same command and ends exactly as if nothing had happened."""

import json
import os
import subprocess
from pathlib import Path

import driven_runs
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
import quick_programs
import yaml
from tiny_run import TINY_RUN

from mugrpo_jax import files, rollouts
from mugrpo_jax.cli.main import STOPPED, main
from mugrpo_jax.runs.run_lock import RunLock
from mugrpo_jax.training import checkpoint_folders, damage

# Rows of one length: every run of a process of its own traces the update once less.
ONE_LENGTH = TINY_RUN.replace("length_multiple: 16", "length_multiple: 32")
# Two runs, each killed again and again. All that a run wrote between its kills is part of the end that is
# compared.
KILLS = {
    "generation": [
        ("scoring", 20),
        ("before a shard", 2),
        ("inside a shard", 2),
        ("before the manifest", 1),
        ("before the manifest", 1),
    ],
    "updates": [
        ("before an update", 9),
        ("after an update", 2),
        ("journal", 4),
        ("journal", 1),
        ("while saving", 2),
        ("while saving", 1),
    ],
}


def run(
    folder: Path,
    point: str = "none",
    count: int = 0,
    *more: str,
    config: str = "config",
    largest_file: int | None = None,
    out: Path | None = None,
    flags: tuple[str, ...] = (),
) -> subprocess.CompletedProcess:
    environment = {
        **os.environ,
        "XLA_FLAGS": quick_programs.flags(),
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    if largest_file is not None:
        environment["LARGEST_FILE"] = str(largest_file)
    settings = [str(folder.parent / f"{config}.yaml"), "--out", str(out or folder)]
    return driven_runs.run([point, str(count), *more, "--", *settings, *flags], environment, timeout=300)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    (folder / "config.yaml").write_text(ONE_LENGTH)
    # Stages so short that a checkpoint spans several: what is lost is done again, on the same rollouts. The
    # loss needs a reference policy, entropies and a proximal policy, which the checkpoint holds.
    sparse = yaml.safe_load(ONE_LENGTH) | {
        "objective": {"name": "decoupled_ppo", "knobs": {"kl_coef": 0.1, "entropy_coef": 0.01}},
        "proximal_every": None,
        "checkpoints": {"every": 5, "keep_best": 0},
        "warm_start": {"updates": 0},
    }
    sparse["batch"] |= {"updates_per_stage": 2, "stages": 6}
    (folder / "sparse.yaml").write_text(yaml.safe_dump(sparse))
    return folder


@pytest.fixture(scope="module")
def base(place):
    done = run(place / "whole")
    assert done.returncode == 0, done.stderr
    return place


def outcome(folder: Path):
    """Everything that must be the same: parameters, metrics without seconds, rollouts."""
    step = max(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdigit())
    options = ocp.CheckpointManagerOptions(step_format_fixed_length=6)
    with ocp.CheckpointManager(files.absolute(folder / "checkpoints"), options=options) as manager:
        state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore()))["state"]
    journal = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for record in journal:
        record.pop("seconds", None)
    groups = [
        rollouts.encode(group)
        for stage in sorted((folder / "rollouts").iterdir())
        for group in rollouts.read_groups(rollouts.open_stage(stage))
    ]
    return step, [np.asarray(leaf) for leaf in jax.tree.leaves(state)], journal, groups


def assert_same(folder: Path, whole: Path) -> None:
    step, state, journal, groups = outcome(folder)
    whole_step, whole_state, whole_journal, whole_groups = outcome(whole)
    assert step == whole_step == 12
    assert all((a == b).all() for a, b in zip(state, whole_state, strict=True))
    assert journal == whole_journal
    assert groups == whole_groups


@pytest.mark.parametrize("phase", KILLS)
def test_a_killed_run_ends_as_if_nothing_had_happened(base, phase):
    folder = base / f"killed-{phase}"
    committed: dict[Path, int] = {}
    for point, count in KILLS[phase]:
        killed = run(folder, point, count)
        assert killed.returncode == -9, (point, killed.stderr)
        kept = modified(folder, "rollouts")
        assert committed.items() <= kept.items()  # no committed rollout was generated again
        committed = kept
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert_same(folder, base / "whole")
    assert committed.items() <= modified(folder, "rollouts").items()


def test_sigterm_saves_and_ends_cleanly_and_the_same_command_continues(base):
    folder = base / "terminated"
    stopped = run(folder, "before an update", 9, "term")
    assert stopped.returncode == STOPPED and "stopping" in stopped.stdout, stopped.stderr
    assert "mugrpo: stopped before the end, saved after 5 of 12 updates; the same command" in stopped.stderr
    assert (
        folder / "checkpoints" / "000005"
    ).exists()  # 4 warm-up updates, then 5; not a multiple of `every`
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert_same(folder, base / "whole")
    assert kept(folder) == kept(base / "whole")  # not the one that was saved because of the signal


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_an_interrupted_evaluation_is_made_up_for_and_a_damaged_checkpoint_replaced(base):
    folder = base / "interrupted"
    stopped = run(folder, "scoring", 6 + 48 + 2, "term")  # the evaluation inside stage 0, after 3 updates
    assert stopped.returncode == STOPPED, stopped.stderr
    assert "000003" in kept(folder) and "after 3 updates" not in stopped.stdout
    newest = folder / "checkpoints" / "000003" / "cursor" / "metadata"
    newest.write_text(newest.read_text().replace('"updates": 3', '"updates": 2'))
    done = run(folder)
    assert done.returncode == 0, done.stderr
    assert f"{newest}: damaged, its checksum differs from checksums.txt; the checkpoint before" in done.stdout
    assert "held-out accuracy after 3 updates" in done.stdout
    assert_same(folder, base / "whole")
    assert kept(folder) == kept(base / "whole")


@pytest.fixture(scope="module")
def sparse(place):
    folder = place / "sparse-whole"
    done = run(folder, config="sparse")
    assert done.returncode == 0, done.stderr
    return folder


def error(done: subprocess.CompletedProcess) -> str:
    """The one line of a run that was refused."""
    assert done.returncode == 2, done.stderr
    return next(line for line in done.stderr.splitlines() if line.startswith("mugrpo: "))


def test_rollouts_of_stages_behind_the_checkpoint_are_used_again(place, sparse):
    folder = place / "sparse-killed"
    assert {path.name for path in (sparse / "checkpoints").iterdir()} == {"000010", "000012"}
    assert run(folder, "before a reference shard", 3, config="sparse").returncode == -9
    counts = {name: len(list(folder.glob(f"{name}/*/*.arrayrecord"))) for name in ("rollouts", "reference")}
    assert counts == {"rollouts": 3, "reference": 2}
    scored = modified(folder, "reference")
    assert run(folder, "before an update", 10, config="sparse").returncode == -9
    assert scored.items() <= modified(folder, "reference").items()  # those are not computed again either
    assert max(path.name for path in (folder / "checkpoints").iterdir()) == "000005"
    committed = modified(folder, "rollouts")
    assert len(committed) == 5  # of stages 0 to 4: the one under way at the checkpoint, and two after it
    assert run(folder, config="sparse").returncode == 0
    assert committed.items() <= modified(folder, "rollouts").items()
    assert_same(folder, sparse)
    assert stored_reference(folder) == stored_reference(sparse)


def modified(folder: Path, name: str) -> dict[Path, int]:
    """When each committed file of rollouts or of reference log-probs was written."""
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"{name}/*/*.arrayrecord")}


def stored_reference(folder: Path) -> list[str]:
    files = sorted(folder.glob("reference/*/*.arrayrecord"))
    assert len(files) == 6
    return [json.loads(path.with_suffix(".json").read_text())["sha256"] for path in files]


def test_a_damaged_shard_is_named_and_made_again_or_refused(place, sparse):
    folder = place / "sparse-damaged"
    assert run(folder, "before the manifest", 2, config="sparse").returncode == -9
    (complete,) = (folder / "rollouts" / "stage-000").glob("*.arrayrecord")
    (shard,) = (folder / "rollouts" / "stage-001").glob("*.arrayrecord")
    flip(complete)  # its stage has a manifest, and no update of it is in the checkpoint
    shard.with_suffix(".json").write_text("{}")
    assert run(folder, "before an update", 7, config="sparse").returncode == -9  # regenerated, and gone on
    under_way = folder / "rollouts" / "stage-002" / shard.name  # the checkpoint is that of update 5
    under_way.write_bytes(under_way.read_bytes()[:-100])
    message = error(run(folder, config="sparse"))
    assert f"{under_way}: its checksum differs, the file is damaged; restore" in message
    assert "add --back-to 0 to the same command" in message
    assert run(folder, config="sparse", flags=("--back-to", "0")).returncode == 0
    assert_same(folder, sparse)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_full_disk_is_one_line_and_the_same_command_continues(place, sparse):
    folder = place / "sparse-full"
    message = error(run(folder, config="sparse", largest_file=3000))  # enough for the config
    assert "/checkpoints/" in message and "File too large" in message
    message = error(run(folder, config="sparse", largest_file=60_000))  # enough for a checkpoint
    shard = folder / "rollouts" / "stage-000" / "shard-00000.arrayrecord"
    assert f"{shard}: cannot be written (" in message and "File too large" in message
    assert not shard.exists()
    assert run(folder, config="sparse").returncode == 0
    assert_same(folder, sparse)


@pytest.mark.filterwarnings("ignore:Sending a large body")  # aiohttp says it of gcsfs
def test_a_run_in_a_bucket_is_killed_and_ends_like_a_local_run(place, sparse, bucket, capsys):
    out = files.to_path("gs://bucket/run")
    killed = run(place / "local", "while saving", 3, config="sparse", out=out)
    assert killed.returncode == -9, killed.stderr  # the files of update 10 are on their way to the bucket
    finished = checkpoint_folders(out / "checkpoints")
    assert [path.name for path in finished][:2] == ["000000", "000005"]
    assert [damage(path) for path in finished] == [None] * len(finished)
    newest = finished[-1] / "cursor" / "metadata"
    flip(newest)
    with RunLock(out):  # it takes the lock of the process that was killed
        assert main(["train", str(place / "sparse.yaml"), "--out", str(out)]) == 2
    assert f"gs://bucket/run: process {os.getpid()} on" in capsys.readouterr().err
    done = run(place / "local", config="sparse", out=out)
    assert done.returncode == 0, done.stderr
    assert f"{newest}: damaged, its checksum differs from checksums.txt; the checkpoint before" in done.stdout
    assert "continuing at stage" in done.stdout
    assert_same(out, sparse)
    assert stored_reference(out) == stored_reference(sparse)
    assert kept(out) == kept(sparse)
    for path in checkpoint_folders(out / "checkpoints"):
        assert damage(path) is None
        checksums, committed = (
            bucket.objects[f"run/checkpoints/{path.name}/{name}"][1]
            for name in ("checksums.txt", "commit_success.txt")
        )
        assert checksums < committed  # these numbers increase with every upload
    names = set(bucket.objects)
    assert {f"run/{name}" for name in ("report.html", "environment.json", "data.json")} <= names
    assert "run/samples/stage-005.json" in names and "run/lock.json" not in names
    assert f"run/moved_away/checkpoints-{finished[-1].name}-0/cursor/metadata" in names
    assert main(["report", str(out)]) == 0
    assert main(["rollouts", str(out), "--stage", "1"]) == 0
    assert "gs://bucket/run: decoupled_ppo, 12 updates" in (said := capsys.readouterr().out)
    assert "stage 1: 16 responses" in said
    assert not (place / "local").exists()
