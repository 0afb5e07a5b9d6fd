"""`mugrpo rollouts import`: make a stage from files of responses, also of other systems."""

import argparse

from mugrpo_jax.cli import arguments as shared

_SYSTEMS = ("auto", "mugrpo", "verl", "trl", "prime-rl", "vllm")


def add(commands: shared.Commands) -> None:
    """Add `mugrpo rollouts import` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "rollouts import",
        run,
        help="make a stage from JSON Lines or Parquet files, also of other systems",
        more="Reads what `mugrpo rollouts export` writes, and what verl, TRL, prime-rl and vLLM write, if it "
        "has token ids and log-probs. All rows are checked before anything is written. Train on the stage "
        "with `mugrpo replay STAGE --config CONFIG`.",
        example="mugrpo rollouts import step_1.jsonl --from verl --model Qwen/Qwen3-0.6B --out stages/verl",
    )
    parser.add_argument(
        "files", nargs="+", type=shared.local_path, metavar="FILE", help=".jsonl or .parquet files"
    )
    parser.add_argument(
        "--out", type=shared.local_path, required=True, metavar="STAGE", help="the new stage's folder"
    )
    parser.add_argument(
        "--from",
        dest="system",
        choices=_SYSTEMS,
        default="auto",
        help="who wrote the files (default: auto, which tells by the fields of each row)",
    )
    parser.add_argument(
        "--model",
        help="model or run with the tokenizer of the responses, to check their tokens; not needed for files "
        "of `mugrpo rollouts export`",
    )
    parser.add_argument(
        "--behavior",
        help="name of the policy that wrote them (default: that of the system); rows of `mugrpo rollouts "
        "export` name it already, and are refused if the name is another one",
    )
    parser.add_argument("--skip-bad", action="store_true", help="leave out what cannot be used, and count it")


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo rollouts import` with the parsed arguments."""
    from mugrpo_jax.rollouts.import_rollouts import import_rollouts
    from mugrpo_jax.setup.stored_rollouts import shape_of, tokenizer_of

    model = arguments.model
    print(
        import_rollouts(
            arguments.files,
            arguments.out,
            system=arguments.system,
            behavior=arguments.behavior,
            skip_bad=arguments.skip_bad,
            vocab_size=None if model is None else shape_of(model).vocab_size,
            eos_ids=() if model is None else tokenizer_of(model).eos_ids,
        )
    )
