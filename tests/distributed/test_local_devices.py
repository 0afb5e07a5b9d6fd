"""Which GPUs of its node a process takes."""

import pytest

from mugrpo_jax.config import ConfigError
from mugrpo_jax.distributed import launch, local_devices
from mugrpo_jax.distributed.launchers import Launch
from mugrpo_jax.distributed.local_devices import choose_devices, view_devices


def slurm(node, visible=None, on_node=None, **more):
    found = {"SLURM_NODEID": str(node)} | more
    return found | (
        {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible, "SLURM_GPUS_ON_NODE": on_node}
    )


FOUR = "0,1,2,3"
CASES = {
    "no GPU": ([{}, {}], [None, None]),
    "SLURM, one task per node": ([slurm(0, FOUR, "4"), slurm(1, FOUR, "4")], [None, None]),
    "SLURM, one task per GPU": ([slurm(0, FOUR, "4")] * 4, [[0], [1], [2], [3]]),
    "SLURM, two tasks per node": ([slurm(0, FOUR, "4")] * 2, [[0, 1], [2, 3]]),
    "SLURM, one task per GPU on two nodes": (
        [slurm(0, "0,1", "2")] * 2 + [slurm(1, "0,1", "2")] * 2,
        [[0], [1], [0], [1]],
    ),
    "SLURM, tasks dealt out in turn": ([slurm(i % 2, "0,1", "2") for i in range(4)], [[0], [0], [1], [1]]),
    "SLURM, a different number on each node": (
        [slurm(0, FOUR, "4"), slurm(1, FOUR, "4"), slurm(1, FOUR, "4")],
        [None, [0, 1], [2, 3]],
    ),
    "SLURM --gpus-per-task, each task sees its GPU as 0": ([slurm(0, "0", "4")] * 4, [None] * 4),
    "SLURM --gpus-per-task, only the option is known": (
        [slurm(0, "0", "1", SLURM_GPUS_PER_TASK="h100:1")] * 4,
        [None] * 4,
    ),
    "SLURM --gpus-per-task --gpu-bind=none": (
        [slurm(0, FOUR, "4", SLURM_GPUS_PER_TASK="1")] * 4,
        [[0], [1], [2], [3]],
    ),
    "mpirun, all ranks see all": ([{"CUDA_VISIBLE_DEVICES": FOUR}] * 2, [[0, 1], [2, 3]]),
    "mpirun, a wrapper gave each rank two": (
        [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "2,3"}],
        [None, None],
    ),
    "names instead of numbers": ([{"CUDA_VISIBLE_DEVICES": "GPU-8932f937,GPU-d72e"}] * 2, [[0], [1]]),
    "hidden": ([{"CUDA_VISIBLE_DEVICES": ""}] * 2, [None, None]),
    "hidden by -1": ([{"CUDA_VISIBLE_DEVICES": "0,1,-1,2"}] * 2, [[0], [1]]),
    "a machine with GPUs, but the user wants CPUs": (
        [{"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}] * 2,
        [None, None],
    ),
    "the user names GPUs": ([{"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cuda,cpu"}] * 2, [[0], [1]]),
    "AMD": ([{"ROCR_VISIBLE_DEVICES": "0,1"}] * 2, [[0], [1]]),
    "the user has chosen": ([slurm(0, FOUR, "4", JAX_LOCAL_DEVICE_IDS="3")] * 2, [None, None]),
}


@pytest.mark.parametrize("case", CASES)
def test_processes_of_a_node_divide_its_gpus(case, monkeypatch):
    monkeypatch.setattr(local_devices.glob, "glob", lambda pattern: [])
    environments, expected = CASES[case]
    views = [view_devices(environment) for environment in environments]
    assert [choose_devices(views, process) for process in range(len(views))] == expected


def test_without_a_list_the_device_files_are_counted(monkeypatch):
    monkeypatch.setattr(local_devices.glob, "glob", lambda pattern: [f"/dev/nvidia{i}" for i in range(8)])
    assert choose_devices([view_devices({})] * 4, 1) == [2, 3]


@pytest.mark.parametrize(
    ("environment", "processes", "message"),
    [
        (
            slurm(0, FOUR, "4"),
            3,
            "3 processes on one node cannot divide its 4 GPUs evenly; start 1 or 2 or 4 ",
        ),
        (slurm(0, "0", "1"), 2, "2 processes on one node cannot divide its 1 GPU evenly; start 1 per node"),
    ],
)
def test_gpus_that_cannot_be_divided_are_an_error(environment, processes, message):
    with pytest.raises(ConfigError, match=message):
        choose_devices([view_devices(environment)] * processes, 0)


def test_jax_is_given_the_devices_of_this_process(monkeypatch):
    """JAX ignores the choice on a CPU, so this looks at what JAX is told."""

    class Link:
        launch = Launch("SLURM", "here", 1, 4, 2)

        def gather(self, name, value):
            return [view_devices(slurm(i // 2, "0,1", "2")) for i in range(4)]

        def jax_address(self):
            return "127.0.0.1:5"

    told = {}
    monkeypatch.setattr(launch.jax.distributed, "initialize", lambda **settings: told.update(settings))
    launch._initialize_jax(Link(), 10)
    assert told["local_device_ids"] == [0]
    assert (told["num_processes"], told["process_id"]) == (4, 2)
    assert told["coordinator_address"] == told["coordinator_bind_address"] == "127.0.0.1:5"
    assert told["cluster_detection_method"] == "deactivate"  # JAX would take the device of SLURM_LOCALID


def test_processes_with_different_devices_are_refused(monkeypatch):
    class Link:
        def gather(self, name, value):
            return [value, "7 gpu"]

    monkeypatch.setattr(launch.HostLink, "current", Link())
    count = launch.jax.local_device_count()
    with pytest.raises(
        ConfigError, match=f"process 1 has 7 gpu devices, but process 0 has {count} cpu devices"
    ):
        launch._announce(Launch("SLURM", "here", 1, 2, 0))
