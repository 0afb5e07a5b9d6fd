"""Text in, responses out: one call for notebooks, one for files that can be interrupted.

records = generate("smollm2-135m", ["1 + 1 ="], samples=8, max_tokens=32)
generate_file("smollm2-135m", "in.jsonl", "out.jsonl", samples=8, max_tokens=32)
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

from mugrpo_jax.models import ModelConfig, Tokenizer
from mugrpo_jax.models.io.loading import LoadedModel, load_model, model_shape, model_tokenizer
from mugrpo_jax.sampling.plan import SamplerPlan, plan_sampler
from mugrpo_jax.sampling.requests import Request, Response, request_seeds
from mugrpo_jax.sampling.sampler import Sampler

Prompt = str | Sequence[int]
Name = tuple[int, int]  # (index of the prompt, number of the sample)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the responses to a prompt, beside the model.

    Attributes:
      samples: responses per prompt.
      max_tokens: longest response.
      temperature: 1 is the model's own distribution, 0 is greedy.
      top_k: keep the most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together reach this probability; 1 keeps all.
      seed: fixes every response together with the prompt's index and the sample's number.
      dtype: `bfloat16` or `float32`, of weights and cache; None is float32 on CPU and bfloat16 elsewhere.
    """

    samples: int = 1
    max_tokens: int = 512
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is None:
            object.__setattr__(self, "dtype", "float32" if jax.default_backend() == "cpu" else "bfloat16")
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype: {self.dtype!r} is not possible; possible: bfloat16, float32")
        if self.samples < 1:
            raise ValueError(f"samples: must be at least 1, got {self.samples}")
        if self.seed < 0:
            raise ValueError(f"seed: must not be negative, got {self.seed}")


def generate(
    model: str | Path | LoadedModel,
    prompts: Sequence[Prompt],
    *,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Sample responses to prompts given as text or tokens.

    Args:
      model: a name or folder for `load_model`, or what it returned.
      prompts: text, or token ids.
      slots: sequences decoded at once; None takes as many as fit.
      mesh: devices to use; None is the default device.
      progress: show a bar.
      **settings: fields of `Settings`.

    Returns:
      One dict a response, sorted by prompt and sample: `index`, `sample`, `prompt_tokens`, `tokens`,
      `logprobs`, `text`, `finish_reason`.
    """
    records = _records(model, prompts, Settings(**settings), (), slots=slots, mesh=mesh, progress=progress)
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
    """Sample responses to the prompts of a JSONL file into another; interrupted, the same call continues.

    Args:
      model: a name or folder for `load_model`.
      prompts: one JSON object a line, with `prompt` (text) or `prompt_tokens` (token ids).
      out: one JSON object a response, as in `generate`, in the order in which they finish. The settings
        are kept beside it in `OUT.settings.json`, and a call with others is refused.
      slots: sequences decoded at once; None takes as many as fit.
      mesh: devices to use; None is the default device.
      progress: show a bar.
      **settings: fields of `Settings`.

    Returns:
      How many responses were written by this call.
    """
    if jax.process_count() > 1:
        raise ValueError("generate: runs on one host; split the prompts into a file for each")
    prompts, out, chosen = Path(prompts), Path(out), Settings(**settings)
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
    settings: Settings,
    done: Collection[Name],
    *,
    slots: int | None,
    mesh: Mesh | None,
    progress: bool,
) -> Iterator[dict[str, Any]]:
    """Responses that are not done yet, as they finish."""
    dtype = jnp.dtype(settings.dtype)
    if not len(prompts) or len(done) == len(prompts) * settings.samples:
        return
    if isinstance(model, LoadedModel):
        config, tokenizer = model.config, model.tokenizer
    else:
        config, tokenizer = model_shape(model), model_tokenizer(model)
    requests, names = _requests(config, tokenizer, prompts, settings, done)
    longest = max(len(request.prompt) for request in requests)
    plan = plan_sampler(
        config,
        max_prompt=longest,
        max_length=longest + settings.max_tokens,
        slots=slots,
        samples=len(names),
        mesh=mesh,
        dtype=dtype,
    )
    bar = tqdm(total=len(names), unit=" responses", disable=not progress)
    bar.write(str(plan)) if progress else None
    with bar, _sampler(model, plan) as sampler:
        for response in sampler.run(requests):
            yield _record(response, names[response.index, response.sample], tokenizer)
            bar.update()
            rate = sampler.stats.tokens / max(1e-9, bar.format_dict["elapsed"])
            bar.set_postfix_str(
                f"{rate:,.0f} tokens/s, {sampler.stats.occupancy:.0%} occupied", refresh=False
            )


def _sampler(model: str | Path | LoadedModel, plan: SamplerPlan) -> Sampler:
    """A sampler that alone holds the weights, unless the caller holds them too."""
    loaded = model if isinstance(model, LoadedModel) else load_model(model, dtype=plan.dtype, mesh=plan.mesh)
    return Sampler(loaded.model, loaded.params, plan)


def _requests(
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    settings: Settings,
    done: Collection[Name],
) -> tuple[list[Request], dict[Name, int]]:
    """What is still to be sampled, and the number of each sample of a request in the whole group."""
    requests: list[Request] = []
    numbers: dict[Name, int] = {}
    for index, prompt in enumerate(prompts):
        tokens = tokenizer.encode(prompt, start=True) if isinstance(prompt, str) else prompt
        if len(tokens) + settings.max_tokens > config.max_positions:
            raise ValueError(
                f"prompt {index}: {len(tokens)} tokens + max_tokens of {settings.max_tokens} exceed the "
                f"model's max_positions={config.max_positions}"
            )
        left = [number for number in range(settings.samples) if (index, number) not in done]
        if left:
            numbers |= {(index, place): number for place, number in enumerate(left)}
            requests.append(
                Request(
                    prompt=tokens,
                    seeds=request_seeds(settings.seed, index, samples=settings.samples)[left],
                    max_tokens=settings.max_tokens,
                    temperature=settings.temperature,
                    top_k=settings.top_k,
                    top_p=settings.top_p,
                    stop=sorted(tokenizer.eos_ids),
                    index=index,
                )
            )
    return requests, numbers


def _record(response: Response, number: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "index": response.index,
        "sample": number,
        "prompt_tokens": response.prompt_tokens.tolist(),
        "tokens": response.tokens.tolist(),
        "logprobs": response.logprobs.tolist(),
        "text": tokenizer.decode(response.tokens.tolist()),
        "finish_reason": response.finish_reason,
    }


def _read_prompts(path: Path) -> list[Prompt]:
    if not path.is_file():
        raise ValueError(f"{path}: not found; it should hold one JSON object a line")
    prompts: list[Prompt] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            item = json.loads(line)
        except json.JSONDecodeError as error:
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


def claim_output(out: Path, settings: dict[str, Any]) -> None:
    """Note the settings beside a new output, or make sure that an old one was begun with the same."""
    note = out.with_name(out.name + ".settings.json")
    if not out.parent.is_dir():
        raise ValueError(f"{out}: there is no folder {out.parent}; make it first")
    if not out.exists() or b"\n" not in out.read_bytes():  # nothing finished yet, so nothing to mix with
        note.write_text(json.dumps(settings, indent=2) + "\n")
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
    """Samples already in the file; half a line at its end, left by a kill, is cut off."""
    whole = out.read_bytes()
    complete = whole[: whole.rfind(b"\n") + 1]
    if len(complete) < len(whole):
        with out.open("r+b") as file:
            file.truncate(len(complete))
    records = map(json.loads, complete.splitlines())
    return {(record["index"], record["sample"]) for record in records}
