"""Compile the programs of a run side by side, in threads: the compiler releases the GIL."""

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from mugrpo_jax.planning.chips import Topology
from mugrpo_jax.planning.programs import CompiledProgram, Program, compile_program
from mugrpo_jax.tasks.processors import usable_processors

_MOST_THREADS = 4  # the compiler may take gigabytes of memory for a large program


def compile_programs(
    programs: Sequence[Program],
    topology: Topology,
    *,
    all_must_fit: bool = False,
    title: str = "",
    progress: bool = False,
) -> tuple[CompiledProgram, ...]:
    """Compile several programs at the same time, and return the results in the order of `programs`.

    With `all_must_fit`, the first program that does not fit is the last result; programs that were not
    started by then are not compiled. If `progress` is True, show a progress bar with this title.
    """
    compiled: list[CompiledProgram] = []
    bar = tqdm(total=len(programs), desc=title, unit="program", disable=not progress)
    # A GPU's compiler times kernels to choose one. Other kernels at the same time would disturb it.
    alone = topology.devices[0].platform == "gpu"
    threads = 1 if alone else min(_MOST_THREADS, usable_processors())
    with bar, warnings.catch_warnings(), ThreadPoolExecutor(threads, "plan") as pool:
        # Programs for absent devices cannot be read back from the compilation cache.
        warnings.filterwarnings("ignore", message="Error reading persistent compilation cache entry")
        futures = [pool.submit(compile_program, program, topology) for program in programs]
        try:
            for future in futures:
                compiled.append(future.result())
                bar.update()
                if all_must_fit and not compiled[-1].fits(topology.chip):
                    break
        finally:
            for future in futures:
                future.cancel()
    return tuple(compiled)
