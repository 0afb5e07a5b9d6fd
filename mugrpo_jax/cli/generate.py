"""`mugrpo generate`: sample responses to the prompts in a file."""

import argparse

from mugrpo_jax.cli import arguments as shared

SETTINGS = ("samples", "max_tokens", "temperature", "top_k", "top_p", "seed", "dtype", "slots")


def add(commands: shared.Commands) -> None:
    """Add `mugrpo generate` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "generate",
        run,
        help="sample responses to the prompts in a file",
        more="Reads one JSON object per line with the key `prompt` (text) or `prompt_tokens`, and writes one "
        "JSON object per response. If it is interrupted, the same command resumes.",
        example="mugrpo generate --model smollm2-135m --prompts in.jsonl --out out.jsonl --samples 8",
    )
    parser.add_argument(
        "--model", required=True, help="a Hugging Face folder, a .gguf file, or a name such as smollm2-135m"
    )
    parser.add_argument(
        "--prompts", type=shared.local_path, required=True, metavar="FILE", help="prompts (JSON lines)"
    )
    parser.add_argument(
        "--out", type=shared.local_path, required=True, metavar="FILE", help="where to write (JSON lines)"
    )
    parser.add_argument(
        "--samples", type=shared.at_least(1), default=1, help="responses per prompt (default: 1)"
    )
    shared.add_sampling(parser)
    parser.add_argument(
        "--top-k", type=shared.at_least(0), default=0, help="keep the k most likely tokens (default: all)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo generate` with the parsed arguments."""
    from mugrpo_jax.runs.compile_cache import use_compile_cache
    from mugrpo_jax.sampling import generate_file

    use_compile_cache()
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    written = generate_file(arguments.model, arguments.prompts, arguments.out, **settings)
    print(f"{written} responses written to {arguments.out}")
