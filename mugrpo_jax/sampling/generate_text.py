"""Generate responses to text prompts. `generate` returns them in a list, `generate_file` writes a file:

    for record in generate("smollm2-135m", ["1 + 1 ="], samples=8, max_tokens=32):
        print(record["text"])
    generate_file("smollm2-135m", "in.jsonl", "out.jsonl", samples=8, max_tokens=32)

A text is a question to a chat model: it goes through the model's chat template, unless `raw=True`.
If `generate_file` is interrupted, the same call resumes: it samples only the missing responses.
"""

import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from tqdm.auto import tqdm

from mugrpo_jax.files import hold
from mugrpo_jax.models import ModelConfig, Params, Tokenizer
from mugrpo_jax.models.io.loading import LoadedModel, load_model, model_shape, model_tokenizer
from mugrpo_jax.models.weights import weights_fingerprint
from mugrpo_jax.sampling.prompt_files import (
    Name,
    check_output,
    claim_output,
    finished,
    read_prompts,
)
from mugrpo_jax.sampling.prompts import Prompt, RenderedPrompt, render_prompts
from mugrpo_jax.sampling.requests import (
    NO_RUN,
    Request,
    Response,
    SamplingSettings,
    make_request,
    sampling_settings,
)
from mugrpo_jax.sampling.sampler import Sampler
from mugrpo_jax.sampling.sampler_plan import SamplerPlan, plan_for_requests, sampler_dtypes

_ARGUMENTS = ("slots", "mesh", "progress", "raw")


def generate(
    model: str | Path | LoadedModel,
    prompts: str | Sequence[Prompt],
    *,
    raw: bool = False,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Sample responses to some prompts and return them as a list.

    Args:
      model: a name or folder for `load_model`, or a model that `load_model` returned.
      prompts: one text, or a list in which each prompt is a text, a list of chat messages (dicts with `role`
        and `content`) or a list of token ids. If the model has a chat template, a text becomes the message of
        a user.
      raw: give texts to the model as they are, also to a chat model.
      slots: how many sequences are decoded at the same time; None uses as many as fit in the memory.
      mesh: the devices to use; None uses the default device.
      progress: whether to show a progress bar.
      **settings: fields of `SamplingSettings`.

    Returns:
      One dict per response, sorted by `index` (of the prompt) and `sample` (number of the response). The
      other keys are `prompt`, `text`, `finish_reason`, `prompt_tokens`, `tokens` and `logprobs`.
    """
    chosen = sampling_settings(settings, more=_ARGUMENTS)
    if not len(prompts):
        return []
    config, tokenizer = _description(model)
    wanted = render_prompts(tokenizer, [prompts] if isinstance(prompts, str) else prompts, raw=raw)
    requests = _requests(config, tokenizer, wanted, chosen, ())
    records = _records(model, wanted, requests, chosen, raw=raw, slots=slots, mesh=mesh, progress=progress)
    return sorted(records, key=lambda record: (record["index"], record["sample"]))


def generate_file(
    model: str | Path | LoadedModel,
    prompts: str | Path | Sequence[Prompt],
    out: str | Path,
    *,
    name: str | None = None,
    raw: bool = False,
    slots: int | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
    **settings: Any,
) -> int:
    """Sample responses to the prompts in a file, write them to another file, and return their number.

    If the process is killed, the same call resumes: it samples the missing responses, and returns how many
    it has written itself. The arguments that are not listed here are those of `generate`.

    Args:
      prompts: a JSONL file. Each line has the key `prompt` (text), `messages` (a chat) or `prompt_tokens`
        (token ids). Or a list of prompts, as for `generate`.
      out: the JSONL file to write. Each line is one response with the keys from `generate`; lines are in the
        order in which the responses finish. The settings are stored in `OUT.settings.json`, and a later call
        with other settings, prompts or weights raises an error.
      name: what the stored settings call the model; None takes `model`. A loaded model needs a name.
    """
    if jax.process_count() > 1:
        raise ValueError("generate: runs on one host; split the prompts into a file for each")
    if name is None and isinstance(model, LoadedModel):
        raise ValueError("generate_file: a loaded model needs the argument name")
    out, chosen = Path(out), sampling_settings(settings, more=(*_ARGUMENTS, "name"))
    check_output(out)
    given = read_prompts(Path(prompts)) if isinstance(prompts, str | Path) else prompts
    if not len(given):
        raise ValueError(f"{prompts}: no prompt in it")
    config, tokenizer = _description(model)
    wanted = render_prompts(tokenizer, given, raw=raw)
    digest = hashlib.sha256(json.dumps([(p.text, p.tokens) for p in wanted]).encode()).hexdigest()
    origin = {"model": name or str(model), **dataclasses.asdict(chosen), "raw": raw, "prompts_sha256": digest}

    def claim(params: Params) -> None:
        claim_output(out, origin | {"weights_sha256": weights_fingerprint(params)})

    written = 0
    with hold(out):
        claim_output(out, origin)  # again when the weights are loaded, which takes a while
        requests = _requests(config, tokenizer, wanted, chosen, finished(out))
        records = _records(
            model, wanted, requests, chosen, raw=raw, slots=slots, mesh=mesh, progress=progress, claim=claim
        )
        with out.open("a", buffering=1, encoding="utf-8") as file:
            for record in records:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                written += 1
    return written


def _description(model: str | Path | LoadedModel) -> tuple[ModelConfig, Tokenizer]:
    """Return shape and tokenizer of a model, without reading weights."""
    if isinstance(model, LoadedModel):
        return model.config, model.tokenizer
    return model_shape(model), model_tokenizer(model)


def _records(
    model: str | Path | LoadedModel,
    prompts: Sequence[RenderedPrompt],
    requests: list[Request],
    settings: SamplingSettings,
    *,
    raw: bool,
    slots: int | None,
    mesh: Mesh | None,
    progress: bool,
    claim: Callable[[Params], None] = lambda params: None,
) -> Iterator[dict[str, Any]]:
    """Yield one dict per requested response, in the order in which the responses finish.

    `claim` is called with the weights before the first response, also if none is requested.
    """
    if not requests:
        claim(_loaded(model, sampler_dtypes(settings.dtype)["dtype"], mesh).params)
        return
    config, tokenizer = _description(model)
    plan = plan_for_requests(config, requests, slots=slots, mesh=mesh, **sampler_dtypes(settings.dtype))
    count = sum(len(request.seeds) for request in requests)
    bar = tqdm(total=count, unit=" responses", disable=not progress)
    bar.write(str(plan), file=sys.stderr) if progress else None
    empty = 0
    with bar, _sampler(model, plan, claim) as sampler:
        for response in sampler.run(requests):
            record = _record(response, prompts[response.index], tokenizer)
            empty += not record["text"].strip()
            yield record
            bar.update()
            rate = sampler.stats.tokens / max(1e-9, bar.format_dict["elapsed"])
            bar.set_postfix_str(
                f"{rate:,.0f} tokens/s, {sampler.stats.occupancy:.0%} occupied", refresh=False
            )
    if empty and progress:
        print(f"{empty} of {count} responses are empty; {_hint(tokenizer, raw)}", file=sys.stderr)


def _hint(tokenizer: Tokenizer, raw: bool) -> str:
    """Return what to try if responses are empty."""
    if not tokenizer.has_chat_template:
        return (
            "this model has no chat template, so it continues the prompt: end the prompt where a text would "
            "go on, such as 'Question: ... Answer:'"
        )
    if raw:
        return (
            "this model has a chat template: leave out --raw (in Python raw=True), so that it sees a question"
        )
    return "look at `prompt` in the output, and try other words, another --seed or a lower --temperature"


def _sampler(model: str | Path | LoadedModel, plan: SamplerPlan, claim: Callable[[Params], None]) -> Sampler:
    """Return a sampler. Weights that are loaded here are freed once the sampler has its own copy."""
    loaded = _loaded(model, plan.dtype, plan.mesh)
    claim(loaded.params)
    return Sampler(loaded.model, loaded.params, plan)


def _loaded(model: str | Path | LoadedModel, dtype: Any, mesh: Mesh | None) -> LoadedModel:
    return model if isinstance(model, LoadedModel) else load_model(model, dtype=dtype, mesh=mesh)


def _requests(
    config: ModelConfig,
    tokenizer: Tokenizer,
    prompts: Sequence[RenderedPrompt],
    settings: SamplingSettings,
    done: Collection[Name],
) -> list[Request]:
    """Return requests for the samples that are not in `done`."""
    requests: list[Request] = []
    for index, prompt in enumerate(prompts):
        tokens = prompt.tokens
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


def _record(response: Response, prompt: RenderedPrompt, tokenizer: Tokenizer) -> dict[str, Any]:
    tokens = response.tokens.tolist()
    return {
        "index": response.index,
        "sample": response.sample,
        "prompt": prompt.text,
        "text": tokenizer.decode(tokens),
        "finish_reason": response.finish_reason,
        "prompt_tokens": prompt.tokens,
        "tokens": tokens,
        "logprobs": response.logprobs.tolist(),
    }
