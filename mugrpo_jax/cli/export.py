"""`mugrpo export`: write a model as a Hugging Face folder, and push it to the Hub."""

import argparse

from mugrpo_jax.cli import arguments as shared

SETTINGS = ("step", "best", "dtype", "push", "private", "adapter")


def add(commands: shared.Commands) -> None:
    """Add `mugrpo export` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "export",
        run,
        help="write a run's checkpoint, or another model, as a Hugging Face folder",
        more="`transformers` can load the folder. A run with LoRA is written as one merged model, or with "
        "--adapter as a folder for `peft`. With --push, the folder gets a model card and is uploaded "
        "to the Hugging Face Hub; log in first with `hf auth login`. One process is enough, also for a run "
        "of several hosts; if the weights do not fit on its devices, start the command on several hosts.",
        example="mugrpo export runs/first models/first --best --dtype bfloat16 --push me/first",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="the folder of a run, a Hugging Face folder, a .gguf file, or a name such as smollm2-135m",
    )
    parser.add_argument("out", type=shared.local_path, help="the folder to write")
    shared.add_checkpoint(parser)
    parser.add_argument(
        "--dtype",
        help="float32, bfloat16 or float16 (default: as stored; a run has float32, or with LoRA bfloat16)",
    )
    parser.add_argument(
        "--push", metavar="OWNER/NAME", help="upload the folder to this repository of the Hub"
    )
    parser.add_argument("--private", action="store_true", help="if --push makes the repository: private")
    parser.add_argument(
        "--adapter",
        action="store_true",
        help="of a run with LoRA, write only the adapters, as a folder that peft can load",
    )
    shared.add_hosts(parser)


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo export` with the parsed arguments."""
    from mugrpo_jax.planning.units import count
    from mugrpo_jax.runs import progress
    from mugrpo_jax.setup.trained_model import export

    settings = {name: getattr(arguments, name) for name in SETTINGS}
    with shared.join_hosts(arguments):
        step = export(arguments.model, arguments.out, **settings)
        where = "" if arguments.push is None else f" and pushed to {arguments.push} on the Hugging Face Hub"
        after = "" if step is None else f" from the checkpoint after {count(step, 'update')}"
        progress.say(f"{arguments.out}: written{after}{where}")
