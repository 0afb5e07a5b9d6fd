"""Generate responses to text prompts. `generate` returns them in a list, `generate_file` writes a file:

    for record in generate("smollm2-135m", ["1 + 1 ="], samples=8, max_tokens=32):
        print(record["text"])
    generate_file("smollm2-135m", "in.jsonl", "out.jsonl", samples=8, max_tokens=32)

If `generate_file` is interrupted, the same call resumes: it samples only the missing responses.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from tqdm.auto import tqdm

from mugrpo_jax import files
from mugrpo_jax.models import ModelConfig, Tokenizer
from mugrpo_jax.models.io.loading import LoadedModel, load_model, model_shape, model_tokenizer
from mugrpo_jax.sampling.requests import (
    NO_RUN,
    Request,
    Response,
    SamplingSettings,
    encode_prompt,
    make_request,
)
from mugrpo_jax.sampling.sampler import Sampler
from mugrpo_jax.sampling.sampler_plan import SamplerPlan, plan_for_requests

Prompt = str | Sequence[int]
Name = tuple[int, int]  # (index of the prompt, number of the sample)


def generate(
    model: str | Path | LoadedModel,
    prompts: str | Sequence[Prompt],
    *,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Sample responses to some prompts and return them as a list.

    Args:
      model: a name or folder for `load_model`, or a model that `load_model` returned.
      prompts: one text, or a list in which each prompt is a text or a list of token ids.
      slots: how many sequences are decoded at the same time; None uses as many as fit in the memory.
      mesh: the devices to use; None uses the default device.
      progress: whether to show a progress bar.
      **settings: fields of `SamplingSettings`.

    Returns:
      One dict per response, sorted by `index` (of the prompt) and `sample` (number of the response). The
      other keys are `prompt`, `text`, `finish_reason`, `prompt_tokens`, `tokens` and `logprobs`.
    """
    prompts = [prompts] if isinstance(prompts, str) else prompts
    records = _records(
        model, prompts, SamplingSettings(**settings), (), slots=slots, mesh=mesh, progress=progress
    )
    return sorted(records, key=lambda record: (record["index"], record["sample"]))


def generate_file(
    model: str | Path,
    prompts: str | Path,
    out: str | Path,
    *,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    **settings: Any,
) -> int:
    """Sample responses to the prompts in a file, write them to another file, and return their number.

    If the process is killed, the same call resumes: it samples the missing responses, and returns how many
    it has written itself. The arguments that are not listed here are those of `generate`.

    Args:
      prompts: a JSONL file. Each line has the key `prompt` (text) or `prompt_tokens` (token ids).
      out: the JSONL file to write. Each line is one response with the keys from `generate`; lines are in the
        order in which the responses finish. The settings are stored in `OUT.settings.json`, and a later call
        with other settings raises an error.
    """
    if jax.process_count() > 1:
        raise ValueError("generate: runs on one host; split the prompts into a file for each")
    prompts, out, chosen = Path(prompts), Path(out), SamplingSettings(**settings)
    wanted = _read_prompts(prompts)
    digest = hashlib.sha256(prompts.read_bytes()).hexdigest()
    claim_output(out, {"model": str(model), "prompts_sha256": digest, **dataclasses.asdict(chosen)})
    done = _finished(out)
    written = 0
    with out.open("a", buffering=1, encoding="utf-8") as file:
        for record in _records(model, wanted, chosen, done, slots=slots, mesh=mesh, progress=progress):
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
            written += 1
    return written


def _records(
    model: str | Path | LoadedModel,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    done: Collection[Name],
    *,
    slots: int | None,
    mesh: Mesh | None,
    progress: bool,
) -> Iterator[dict[str, Any]]:
    """Yield one dict per response that is not in `done`, in the order in which the responses finish."""
    if not len(prompts) or len(done) == len(prompts) * settings.samples:
        return
    if isinstance(model, LoadedModel):
        config, tokenizer = model.config, model.tokenizer
    else:
        config, tokenizer = model_shape(model), model_tokenizer(model)
    requests = _requests(config, tokenizer, prompts, settings, done)
    plan = plan_for_requests(config, requests, slots=slots, mesh=mesh, dtype=jnp.dtype(settings.dtype))
    count = sum(len(request.seeds) for request in requests)
    bar = tqdm(total=count, unit=" responses", disable=not progress)
    bar.write(str(plan)) if progress else None
    with bar, _sampler(model, plan) as sampler:
        for response in sampler.run(requests):
            yield _record(response, tokenizer)
            bar.update()
            rate = sampler.stats.tokens / max(1e-9, bar.format_dict["elapsed"])
            bar.set_postfix_str(
                f"{rate:,.0f} tokens/s, {sampler.stats.occupancy:.0%} occupied", refresh=False
            )


def _sampler(model: str | Path | LoadedModel, plan: SamplerPlan) -> Sampler:
    """Return a sampler. Weights that are loaded here are freed once the sampler has its own copy."""
    loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=plan.dtype, mesh=plan.mesh)
    return Sampler(loaded.model, loaded.params, plan)


def _requests(
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    settings: SamplingSettings,
    done: Collection[Name],
) -> list[Request]:
    """Return requests for the samples that are not in `done`."""
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        try:
            tokens = encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt
        except TypeError as error:  # raised by `tokenizers` for text that is not Unicode
            raise ValueError(f"prompt {index}: cannot be made into tokens: {error}") from None
        if outside := [token for token in tokens if not 0 <= token < config.vocab_size]:
            raise ValueError(
                f"prompt {index}: token {outside[0]} is not one of the {config.vocab_size} tokens"
            )
        if len(tokens) + settings.max_tokens > config.max_positions:
            raise ValueError(
                f"prompt {index}: {len(tokens)} tokens + max_tokens of {settings.max_tokens} exceed the "
                f"model's max_positions={config.max_positions}"
            )
        numbers = [number for number in range(settings.samples) if (index, number) not in done]
        if numbers:
            requests.append(
                make_request(tokens, settings, NO_RUN, index, stop=tokenizer.eos_ids, numbers=numbers)
            )
    return requests


def _record(response: Response, tokenizer: Tokenizer) -> dict[str, Any]:
    prompt, tokens = response.prompt_tokens.tolist(), response.tokens.tolist()
    return {
        "index": response.index,
        "sample": response.sample,
        "prompt": tokenizer.decode(prompt),
        "text": tokenizer.decode(tokens),
        "finish_reason": response.finish_reason,
        "prompt_tokens": prompt,
        "tokens": tokens,
        "logprobs": response.logprobs.tolist(),
    }


def _read_prompts(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise ValueError(f"{path}: not found; it should hold one JSON object per line")
    prompts: list[Prompt] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
        prompt: Any = item.get("prompt_tokens", item.get("prompt")) if isinstance(item, dict) else None
        text = isinstance(prompt, str) and prompt
        tokens = isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt)
        if not (text or tokens):
            raise ValueError(
                f"{path}, line {number}: needs 'prompt' (text) or 'prompt_tokens' (integers), not empty"
            )
        prompts.append(prompt)
    return prompts


def check_output(out: Path) -> None:
    """Raise an error if no file can be written at this path."""
    if out.is_dir():
        raise ValueError(f"{out}: is a folder; give the path of a file")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}; make it first")


def claim_output(out: Path, settings: dict[str, Any]) -> None:
    """Write the settings beside a new output file; raise an error if an old file has other settings."""
    check_output(out)
    note = out.with_name(out.name + ".settings.json")
    if not out.exists() or b"\n" not in out.read_bytes():  # without a response, any settings are allowed
        files.write_atomically(note, json.dumps(settings, indent=2) + "\n")
        out.touch()
        return
    if not note.is_file():
        raise ValueError(f"{out}: exists, but not {note.name}; choose another output or delete it")
    before = json.loads(note.read_text())
    for key, value in settings.items():
        if before.get(key) != value:
            raise ValueError(
                f"{out}: was begun with {key}={before.get(key)!r}, now it is {value!r}; "
                "choose another output or delete it"
            )


def _finished(out: Path) -> set[Name]:
    """Remove an incomplete last line from the file, then return the names of the samples in it."""
    files.cut_unfinished_line(out)
    return {(record["index"], record["sample"]) for _, record in files.read_json_lines(out)}
