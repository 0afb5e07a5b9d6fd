"""The decoder computes what `transformers` computes."""

import dataclasses
import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mugrpo_jax.models import decoder
from mugrpo_jax.models.io import huggingface as hf
from mugrpo_jax.models.io import huggingface_export as hf_export
from mugrpo_jax.models.model_config import read_hf

FIXTURES = Path(__file__).parent / "fixtures" / "parity"
FAMILIES = sorted(folder.name for folder in FIXTURES.iterdir())
SCRIPT = Path(__file__).parents[2] / "scripts" / "make_parity_fixtures.py"


@functools.partial(jax.jit, static_argnums=0)
def logits(model, params, tokens):
    return decoder.logits(model, params, tokens)


def check(folder, reference):
    """Logits and greedy continuations of the checkpoint in `folder` are the reference's."""
    model, params = hf.load_huggingface(folder, dtype=jnp.float32)
    prompts, lengths, wanted = reference["prompts"], reference["lengths"], reference["continuations"]
    rows = np.arange(len(lengths))
    tokens = np.pad(prompts, ((0, 0), (0, wanted.shape[1])))
    got = np.asarray(logits(model, params, tokens))
    for row, length in enumerate(lengths):
        np.testing.assert_allclose(got[row, :length], reference["logits"][row, :length], atol=1e-4, rtol=0)
    for step in range(wanted.shape[1]):
        at = lengths + step
        tokens[rows, at] = np.asarray(logits(model, params, tokens))[rows, at - 1].argmax(-1)
        np.testing.assert_array_equal(tokens[rows, at], wanted[:, step])
    return model, params


def test_every_family_has_a_fixture_and_they_are_small():
    assert {
        "llama-tied-scaled",
        "llama-untied",
        "qwen2-tied",
        "qwen2-untied",
        "qwen3-tied",
        "qwen3-untied",
    } == set(FAMILIES)
    assert sum(file.stat().st_size for file in FIXTURES.rglob("*") if file.is_file()) < 1_000_000


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(family):
    reference = np.load(FIXTURES / family / "reference.npz", allow_pickle=False)
    model, params = check(FIXTURES / family, reference)
    # Every weight matters by far more than the tolerance, so none can be ignored or misplaced unseen.
    tokens = np.pad(reference["prompts"], ((0, 0), (0, reference["continuations"].shape[1])))
    before = logits(model, params, tokens)
    for path, leaf in jax.tree.leaves_with_path(params):
        without = jax.tree.map_with_path(lambda p, x: x * 0 if p == path else x, params)  # noqa: B023
        assert jnp.abs(logits(model, without, tokens) - before).max() > 0.01, (path, leaf.shape)


def test_rope_scaling_of_the_fixture_matters():
    folder = FIXTURES / "llama-tied-scaled"
    reference = np.load(folder / "reference.npz", allow_pickle=False)
    config = read_hf(folder)
    assert config.rope_scaling is not None
    plain, _ = decoder.abstract(dataclasses.replace(config, rope_scaling=None))
    _, params = hf.load_huggingface(folder, dtype=jnp.float32)
    gap = np.abs(np.asarray(logits(plain, params, reference["prompts"])) - reference["logits"])
    assert gap[2, 30:44].max() > 0.1


@pytest.fixture(scope="module")
def script():
    pytest.importorskip("torch", reason="torch is not installed: the live comparison is skipped")
    spec = importlib.util.spec_from_file_location("make_parity_fixtures", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("family", FAMILIES)
def test_new_random_checkpoints_agree_in_and_out(family, script, tmp_path):
    seed = 1234 + FAMILIES.index(family)
    script.random_model(family, seed).save_pretrained(tmp_path / "theirs")
    reference = script.reference(tmp_path / "theirs", seed)
    check(tmp_path / "theirs", reference)
    _, params = hf.load_huggingface(tmp_path / "theirs")
    config = read_hf(tmp_path / "theirs")
    # Once with the original's config.json, once with one of our own making.
    for out, source in ((tmp_path / "copied", tmp_path / "theirs"), (tmp_path / "ours", None)):
        hf_export.save_huggingface(params, out, config=config, source=source)
        again = script.prompt_logits(script.load(out), reference["prompts"])
        np.testing.assert_array_equal(again, reference["logits"])
