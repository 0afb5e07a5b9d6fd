"""`mugrpo generate`: sample responses to one prompt or to the prompts in a file."""

import argparse

from mugrpo_jax.cli import arguments as shared

SETTINGS = ("samples", "max_tokens", "temperature", "top_k", "top_p", "seed", "dtype")


def add(commands: shared.Commands) -> None:
    """Add `mugrpo generate` and its arguments to the program."""
    parser = shared.add_command(
        commands,
        "generate",
        run,
        help="sample responses to prompts",
        more="A file of prompts has one JSON object per line with the key `prompt` (text), `messages` (a "
        "chat) or `prompt_tokens`; one JSON object is written per response, and an interrupted file is "
        "resumed by the same command. If the model has a chat template, texts become messages of a user.",
        example='mugrpo generate --model runs/first --prompt "12+34="\n'
        "  mugrpo generate --model smollm2-135m --prompts in.jsonl --out out.jsonl --samples 8",
    )
    parser.add_argument(
        "--model",
        required=True,
        help="the folder of a run, a Hugging Face folder, a .gguf file, or a name such as smollm2-135m",
    )
    shared.add_checkpoint(parser)
    prompts = parser.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", metavar="TEXT", help="one prompt; without --out, responses are printed")
    prompts.add_argument("--prompts", type=shared.local_path, metavar="FILE", help="prompts (JSON lines)")
    parser.add_argument(
        "--out", type=shared.local_path, metavar="FILE", help="where to write (JSON lines); see --prompt"
    )
    parser.add_argument("--raw", action="store_true", help="give texts to a chat model without its template")
    parser.add_argument(
        "--samples", type=shared.at_least(1), default=1, help="responses per prompt (default: 1)"
    )
    shared.add_sampling(parser)
    parser.add_argument(
        "--top-k", type=shared.at_least(0), default=0, help="keep the k most likely tokens (default: all)"
    )


def run(arguments: argparse.Namespace) -> None:
    """Execute `mugrpo generate` with the parsed arguments."""
    from mugrpo_jax.compiling.compile_cache import use_compile_cache
    from mugrpo_jax.files import to_path
    from mugrpo_jax.runs.run_folder import read_config
    from mugrpo_jax.sampling import generate, generate_file, sampling_settings
    from mugrpo_jax.sampling.sampler_plan import sampler_dtypes
    from mugrpo_jax.setup.trained_model import chosen_step, load_any_model

    if arguments.out is None and arguments.prompt is None:
        raise ValueError("--out is missing: the responses to --prompts FILE are written to a file")
    use_compile_cache()
    given = {name: getattr(arguments, name) for name in SETTINGS if getattr(arguments, name) is not None}
    prompts = arguments.prompts if arguments.prompt is None else [arguments.prompt]
    model, name = arguments.model, arguments.model
    step = chosen_step(model, step=arguments.step, best=arguments.best)
    if step is not None:
        given = {"max_tokens": read_config(to_path(model)).sampling.max_response_tokens} | given
        dtype = sampler_dtypes(sampling_settings(given).dtype)["dtype"]
        model = load_any_model(model, step=step, dtype=dtype)
        name = f"{name} after {step} updates"
    settings = given | {"raw": arguments.raw, "slots": arguments.slots}
    if arguments.out is not None:
        written = generate_file(model, prompts, arguments.out, name=name, **settings)
        print(f"{written} responses written to {arguments.out}")
        return
    for record in generate(model, prompts, **settings):
        if arguments.samples > 1:
            print(f"--- response {record['sample']}")
        print(record["text"])
