"""The sampler's contract: same maths as training, same result in any company, nothing lost at the edges."""

import dataclasses
import gc
import itertools
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from scipy import stats

from mugrpo_jax.models import ModelConfig, create, logits, make_mesh, token_logprobs
from mugrpo_jax.models.eight_bits import EIGHT_BITS, StoredMatrix, in_eight_bits
from mugrpo_jax.models.frozen_weights import MATRICES
from mugrpo_jax.sampling import Request, Sampler, read_ahead, request_seeds, transform_logits


@pytest.fixture
def wanted(sampler, mixed, results):
    return results(sampler, mixed)


def padded(responses, length=96):
    rows = np.zeros((len(responses), length), np.int32)
    for row, r in zip(rows, responses):
        row[: len(r.prompt_tokens) + len(r.tokens)] = np.concatenate([r.prompt_tokens, r.tokens])
    return rows


def split_up(requests):
    """Every sample as a request of its own, and the name it had before."""
    names, singles = [], []
    for request in requests:
        for sample, seed in enumerate(request.seeds):
            singles.append(dataclasses.replace(request, seeds=[seed], index=len(names)))
            names.append((request.index, sample))
    return names, singles


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.7])
def test_stored_logprobs_are_the_training_forward_pass(sampler, model, temperature):
    request = Request([5, 9, 2, 44], request_seeds(1, samples=6), 60, temperature=temperature)
    responses = list(sampler.run([request]))
    forward = jax.jit(token_logprobs, static_argnames=("model", "temperature"))
    taught, _ = forward(*model, padded(responses), temperature=temperature or 1.0)
    for row, r in zip(np.asarray(taught), responses):
        np.testing.assert_allclose(r.logprobs, row[4 : 4 + len(r.tokens)], atol=1e-5, rtol=0)
        assert r.logprobs.dtype == np.float32 and r.tokens.dtype == np.int32
        assert len(r.tokens) == 60 and np.ptp(r.logprobs) > 0.5
    assert len({tuple(r.tokens) for r in responses}) == (6 if temperature else 1)


def test_stored_logprobs_with_int8_are_a_pass_with_the_rounded_matrices(model, plan):
    decoder, params = model
    eight = plan(matrices=EIGHT_BITS["int8"])
    with Sampler(*model, eight) as sampler:
        held = jax.tree.leaves(sampler._engine._params)
        responses = list(sampler.run([Request([5, 9, 2, 44], request_seeds(1, samples=4), 60)]))
    assert sum(leaf.nbytes for leaf in held) == eight.weight_bytes < 0.6 * plan().weight_bytes
    layers = params["layers"]
    rounded = {name: StoredMatrix(**in_eight_bits(layers[name])) for name in MATRICES}
    forward = jax.jit(token_logprobs, static_argnames="model")
    own, whole = (
        np.asarray(forward(decoder, weights, padded(responses))[0])[:, 4:64]
        for weights in ({**params, "layers": layers | rounded}, params)
    )
    stored = np.stack([r.logprobs for r in responses])
    np.testing.assert_allclose(stored, own, atol=1e-5, rtol=0)
    assert 1e-3 < np.abs(stored - whole).mean() < 0.03  # the gap to the policy that is trained


def test_stored_logprobs_are_those_of_the_truncated_distribution(sampler, model, mixed):
    responses = list(sampler.run(mixed))
    full = jax.jit(logits, static_argnames="model")(*model, padded(responses))
    kinds = [mixed[r.index] for r in responses]
    columns = [
        np.array([[getattr(kind, name)] for kind in kinds], kind_dtype).repeat(full.shape[1], 1)
        for name, kind_dtype in (("temperature", np.float32), ("top_k", np.int32), ("top_p", np.float32))
    ]
    taught = np.asarray(jax.nn.log_softmax(jax.jit(transform_logits)(full, *columns)))
    for row, r in zip(taught, responses):
        at = len(r.prompt_tokens) - 1 + np.arange(len(r.tokens))
        np.testing.assert_allclose(r.logprobs, row[at, r.tokens], atol=1e-5, rtol=0)


def test_sampled_first_tokens_follow_the_model(model, plan):
    prompt, count = [7, 1, 30], 3000
    p = np.asarray(jax.nn.softmax(logits(*model, jnp.array([prompt]))[0, -1] / 0.9), np.float64)
    with Sampler(*model, plan(16)) as sampler:
        request = Request(prompt, request_seeds(2, samples=count), 1, temperature=0.9)
        first = [r.tokens[0] for r in sampler.run([request])]
    counts = np.bincount(first, minlength=len(p))
    common = p * count >= 5
    seen = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * count / p.sum()
    assert stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue > 1e-3


def test_more_slots_give_the_same_tokens(model, plan, mixed, results, wanted):
    with Sampler(*model, plan(16)) as sampler:
        assert results(sampler, mixed) == wanted


def test_fewer_slots_at_the_end_give_the_same_tokens(model, plan, mixed, results, wanted):
    shrinking = plan(16, shrink=True)
    with Sampler(*model, shrinking) as sampler:
        sampler.warmup(top_k=True, top_p=True)
        assert sampler._engine.slots == 16  # as before the warm-up
        for _ in range(2):  # the second time, there are all slots again
            assert results(sampler, mixed) == wanted
            assert sampler._engine.slots == 1 and shrinking.fewer_slots == (4, 1)
            stats = sampler.stats
            assert stats.tokens / (16 * stats.steps) < stats.occupancy


def test_a_sampler_is_usable_after_an_interrupt_while_it_gave_up_slots(model, plan, results, monkeypatch):
    requests = [Request([5, 9], request_seeds(7, samples=16), [80, *[2] * 15], index=0)]
    with Sampler(*model, plan(16, shrink=True)) as sampler:
        wanted, program = results(sampler, requests), sampler._engine._program

        def interrupted(name, lower):
            if name[0] == "keep":
                raise KeyboardInterrupt
            return program(name, lower)

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(sampler._engine, "_program", interrupted)
            results(sampler, requests)
        assert results(sampler, requests) == wanted


def test_slots_stay_in_their_part_of_a_mesh_when_they_become_fewer(model, plan, results, sampler):
    mesh = make_mesh(data=2, fsdp=2, tensor=2, devices=jax.devices()[:8])

    def request(long):
        limits = [80 if slot in long else 2 for slot in range(32)]
        return [Request([5, 9], request_seeds(7, samples=32), limits, index=0)]

    with Sampler(*model, plan(32, mesh=mesh, shrink=True)) as divided:
        before = jax.tree.map(lambda x: x.sharding, divided._engine._slots)
        assert divided.plan.fewer_slots == (8,)  # two in each of the four parts
        for long, slots in (
            ((9, 20, 22, 31), 8),
            ((8, 10, 14), 32),
        ):  # three long ones are too many for a part
            assert results(divided, request(long)) == results(sampler, request(long))
            assert divided._engine.slots == slots
            assert jax.tree.map(lambda x: x.sharding, divided._engine._slots) == before


def test_order_does_not_matter(sampler, mixed, results, wanted):
    assert results(sampler, mixed[::-1]) == wanted


def test_company_does_not_matter(sampler, mixed, results, wanted):
    alone = {}
    for request in [*mixed[:3], mixed[5], *mixed[6:9]]:
        alone |= results(sampler, [request])
    assert alone == {key: wanted[key] for key in alone}


def test_company_does_not_matter_in_a_long_cache(plan):
    """Its attention has grouped heads of 64, which XLA rounds differently for another number of entries."""
    config = ModelConfig(96, 64, 1, 2, 1, 64, 96, max_positions=1024)
    long = plan(slots=2, config=config, max_prompt=600, max_length=900)
    rng = np.random.default_rng(0)
    mine = Request(rng.integers(3, 90, 150), seeds=[7], max_tokens=40)
    other = Request(rng.integers(3, 90, 600), seeds=[9], max_tokens=60, index=1)
    with Sampler(*create(config, seed=1), long) as sampler:
        (alone,) = sampler.run([mine])
        beside = next(response for response in sampler.run([other, mine]) if response.index == mine.index)
    np.testing.assert_array_equal(alone.tokens, beside.tokens)
    np.testing.assert_array_equal(alone.logprobs, beside.logprobs)


def test_sharing_the_prompt_does_not_matter(sampler, mixed, results, wanted):
    names, singles = split_up(mixed)
    apart = results(sampler, singles)
    assert sampler.stats.prompts == len(singles) > len(mixed)
    assert {names[index]: value for (index, _), value in apart.items()} == wanted


def test_an_interrupted_run_continues_with_the_same_tokens(sampler, mixed, results, wanted):
    first = sampler.run(mixed)
    done = {(r.index, r.sample): (r.tokens.tolist(), r.finish_reason) for r, _ in zip(first, range(7))}
    first.close()
    names, singles = split_up(mixed)
    rest = results(sampler, [request for request in singles if names[request.index] not in done])
    assert 0 < len(rest) < len(wanted)
    assert done | {names[index]: value for (index, _), value in rest.items()} == wanted


def test_requests_may_come_one_by_one_and_are_taken_as_slots_need_them(sampler, mixed, results, wanted):
    many = [dataclasses.replace(request, index=12 * i + request.index) for i in range(3) for request in mixed]
    taken = []
    run = sampler.run(taken.append(request) or request for request in many)
    first = next(run)
    assert 0 < len(taken) <= sampler.plan.slots + 12 < len(many)
    answers = {(r.index, r.sample): (r.tokens.tolist(), r.finish_reason) for r in [first, *run]}
    assert len(taken) == len(many)
    assert answers == {(12 * i + at, n): value for (at, n), value in wanted.items() for i in range(3)}


def test_a_bad_request_of_an_iterator_is_refused_in_its_turn(sampler, mixed):
    run = sampler.run(iter([*mixed, Request([1] * 17, [1], 4, index=77)]))
    with pytest.raises(ValueError, match="request 77: prompt of 17 tokens exceeds max_prompt=16"):
        list(run)


def test_requests_read_ahead_are_the_same_in_order():
    wanted = [Request([1], [1], 1, index=i) for i in range(7)]
    with ThreadPoolExecutor(1) as thread:
        assert list(read_ahead(wanted, thread, 2)) == wanted
        assert list(read_ahead([], thread)) == []


def test_an_error_of_requests_read_ahead_is_told_before_its_turn():
    known = threading.Event()

    def requests():
        yield from (Request([1], [1], 1, index=i) for i in range(100))
        known.set()
        raise ValueError("the last")

    with ThreadPoolExecutor(1) as thread:
        ahead = read_ahead(requests(), thread, 2)
        taken = [next(ahead)]
        assert known.wait(10)
        thread.submit(int).result()  # what was under way has ended
        with pytest.raises(ValueError, match="the last"):
            taken.extend(ahead)
        assert len(taken) <= 2


def test_nobody_waits_for_requests_that_are_no_longer_wanted():
    made = itertools.count()

    def requests():
        for i in made:
            time.sleep(0.001)
            yield Request([1], [1], 1, index=i)

    with ThreadPoolExecutor(1) as thread:
        assert next(read_ahead(requests(), thread, 2)).index == 0
        thread.shutdown(cancel_futures=True)
    assert next(made) < 1000


def test_different_seeds_give_different_samples(sampler):
    responses = list(sampler.run([Request([5, 6], request_seeds(3, samples=8), 20)]))
    assert len({tuple(r.tokens) for r in responses}) == 8


def test_a_prompt_is_run_once_for_its_whole_group(sampler):
    list(sampler.run([Request([5, 6, i], request_seeds(i, samples=8), 9, index=i) for i in range(3)]))
    assert sampler.stats.prompts == 3 and sampler.stats.responses == 24
    assert sampler.stats.tokens == 24 * 9
    # A free slot has nothing to read.
    assert not sampler._engine._slots.rows.lengths.any() and not sampler._engine._slots.rows.left.any()


def test_a_stop_token_ends_a_response_and_is_part_of_it(sampler):
    [free] = sampler.run([Request([5, 9], [1], 30)])
    stop = int(free.tokens[4])
    first = free.tokens.tolist().index(stop)
    [ended] = sampler.run([Request([5, 9], [1], 30, stop=(159, stop))])
    assert ended.tokens.tolist() == free.tokens.tolist()[: first + 1]
    assert ended.finish_reason == "stop" and free.finish_reason == "length"
    np.testing.assert_array_equal(ended.logprobs, free.logprobs[: first + 1])
    [both] = sampler.run([Request([5, 9], [1], first + 1, stop=(stop,))])
    assert both.finish_reason == "stop" and len(both.tokens) == first + 1


def test_every_sample_has_its_own_limit(sampler):
    responses = list(sampler.run([Request([5], [1, 2, 3, 4, 5], [1, 7, 64, 2, 30])]))
    assert {r.sample: len(r.tokens) for r in responses} == {0: 1, 1: 7, 2: 64, 3: 2, 4: 30}


def test_prompts_of_one_token_and_at_the_limit(sampler, model):
    requests = [Request([3], [1], 95, index=0), Request(np.arange(16), [1], 80, index=1)]
    responses = sorted(sampler.run(requests), key=lambda r: r.index)
    assert [len(r.tokens) for r in responses] == [95, 80]
    taught, _ = token_logprobs(*model, padded(responses))
    for row, r in zip(np.asarray(taught), responses):
        start = len(r.prompt_tokens)
        np.testing.assert_allclose(r.logprobs, row[start : start + len(r.tokens)], atol=1e-5, rtol=0)


def test_few_requests_and_none(sampler):
    assert list(sampler.run([])) == []
    assert list(sampler.run([Request([1], [], 5)])) == []
    assert len(list(sampler.run([Request([1], [7], 5)]))) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": [1] * 17}, "request 5: prompt of 17 tokens exceeds max_prompt=16"),
        ({"max_tokens": 95}, "request 5: prompt of 2 [+] max_tokens of 95 exceeds max_length=96"),
        ({"prompt": [1, 160]}, "request 5: a prompt token lies outside the vocabulary of 160"),
        ({"prompt": []}, "request 5: prompt is empty"),
        ({"max_tokens": 0}, "request 5: max_tokens must be at least 1, got 0"),
        ({"max_tokens": [3, 4]}, "request 5: max_tokens has 2 entries for 1 samples"),
        ({"temperature": -1.0}, "request 5: temperature must be 0 .* got -1.0"),
        ({"temperature": float("nan")}, "request 5: temperature must be 0 .* got nan"),
        ({"top_k": -1}, "request 5: top_k must be 0 .* got -1"),
        ({"top_p": 0.0}, "request 5: top_p must lie in .* got 0.0"),
        ({"stop": range(9)}, "request 5: stop has 9 token ids; at most 8"),
        ({"seeds": [-1]}, "request 5: seeds must lie in .* got -1"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(sampler, fields, message):
    with pytest.raises(ValueError, match=message):
        sampler.run(
            [
                Request([1], [1], 1),
                Request(**{"prompt": [1, 2], "seeds": [1], "max_tokens": 4, "index": 5} | fields),
            ]
        )


def test_slots_stay_occupied_on_long_tailed_lengths(small_model, plan):
    rng = np.random.default_rng(0)
    lengths = np.clip(np.exp(rng.normal(3.5, 0.7, 1600)), 8, 200).astype(int).reshape(200, 8)
    requests = [
        Request(rng.integers(0, 16, 4), request_seeds(i, samples=8), limits.tolist(), index=i)
        for i, limits in enumerate(lengths)
    ]
    with Sampler(*small_model, plan(32, small_model[0].config, max_length=208)) as sampler:
        produced = sum(len(r.tokens) for r in sampler.run(requests))
    assert produced == sampler.stats.tokens == lengths.sum()
    assert sampler.stats.occupancy >= 0.9
    with Sampler(*small_model, plan(32, small_model[0].config, max_length=208, shrink=True)) as shrinking:
        assert sum(len(r.tokens) for r in shrinking.run(requests)) == produced
    assert shrinking.stats.steps == sampler.stats.steps
    assert shrinking.stats.occupancy > sampler.stats.occupancy + 0.02
    # Waiting for the slowest of each batch of 32 would have done far worse.
    waves = lengths.reshape(-1, 32)
    assert lengths.sum() / (waves.max(1) * 32).sum() < 0.6


@pytest.mark.parametrize("length", [3, 100])
def test_loops_wait_for_free_slots_by_the_length_of_the_responses_so_far(
    small_model, plan, monkeypatch, length
):
    sizes = plan(64, small_model[0].config, max_length=208)
    with Sampler(*small_model, sizes) as sampler:
        limits, decode = [], sampler._engine.decode
        monkeypatch.setattr(
            sampler._engine, "decode", lambda limit, **k: limits.append(limit) or decode(limit, **k)
        )
        list(sampler.run([Request([1, 2], request_seeds(i, samples=8), length, index=i) for i in range(64)]))
    assert limits[0] == sizes.refill_at(208)  # nothing has ended yet
    assert limits[-1] == 65  # nothing waits any more
    assert sizes.refill_at(length) in limits and sizes.refill_at(3) != sizes.refill_at(100) != limits[0]


def test_the_next_loop_is_under_way_when_responses_are_handed_out(sampler, monkeypatch):
    launched, decode = [], sampler._engine.decode
    monkeypatch.setattr(sampler._engine, "decode", lambda *a, **k: launched.append(1) or decode(*a, **k))
    run = sampler.run([Request([5, 6], request_seeds(i, samples=4), 9, index=i) for i in range(5)])
    ahead = [len(launched) - sampler.stats.loops for _ in run]
    assert ahead == [1] * 16 + [0] * 4  # after the last loop nothing is left to launch


def test_responses_are_handed_out_while_the_call_of_a_loop_lasts(sampler, monkeypatch):
    held, loop = threading.Event(), sampler._engine._loop

    def slow(program, limit, calling):
        calling.set()
        assert sampler.stats.loops == 0 or held.wait(60)  # the second loop lasts until a response is out
        return loop(program, limit, calling)

    monkeypatch.setattr(sampler._engine, "_loop", slow)
    run = sampler.run([Request([5, 6], [1, 2, 3, 4, 5], [2, 2, 2, 70, 2])])
    assert len(next(run).tokens) == 2 and not sampler._engine._under_way.done()
    held.set()
    assert len(list(run)) == 4


def test_a_run_given_up_in_the_middle_of_a_loop_leaves_the_slots_usable(
    sampler, mixed, results, wanted, monkeypatch
):
    loop = sampler._engine._loop

    def slow(program, limit, calling):
        def lasting(*arguments):
            outcome = program(*arguments)
            time.sleep(0.2)
            return outcome

        return loop(lasting, limit, calling)

    with monkeypatch.context() as patch:
        patch.setattr(sampler._engine, "_loop", slow)
        given_up = sampler.run(mixed)
        next(given_up)
    assert not sampler._engine._under_way.done()
    # Fewer samples than slots: what the given-up run left in the others must be gone.
    [single] = sampler.run([Request([5, 9], [1], 30)])
    assert sampler.stats.tokens == len(single.tokens) == 30
    assert results(sampler, mixed) == wanted


def test_long_runs_keep_a_bounded_history(model, plan):
    lengths = [1 + 13 * i % 80 for i in range(40)]
    requests = [Request([i + 1, 7], [i], length, index=i) for i, length in enumerate(lengths)]
    with Sampler(*model, plan(2, steps=8)) as few, Sampler(*model, plan(40, steps=8)) as all_at_once:
        served = {r.index: r for r in few.run(requests)}
        assert few.stats.steps > 4 * (few.plan.max_length + 8)  # its window has moved on several times
        assert sorted(served) == list(range(40))
        for response in all_at_once.run(requests):
            np.testing.assert_array_equal(served[response.index].tokens, response.tokens)
            np.testing.assert_allclose(served[response.index].logprobs, response.logprobs, atol=1e-5)
            assert len(response.tokens) == lengths[response.index]


def test_time_between_loops_is_counted(sampler):
    for _ in sampler.run([Request([5, 6], request_seeds(i, samples=4), 9, index=i) for i in range(3)]):
        time.sleep(0.05)  # longer than a loop lasts here, so the device waits for the caller
    assert sampler.stats.loops > 1
    assert sampler.stats.host_seconds > 0.1 and sampler.stats.call_seconds > 0


@pytest.fixture
def compilations():
    """What is compiled during a test."""
    names = []

    def listen(event, _duration, **facts):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(facts)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield names
    jax.monitoring.unregister_event_duration_listener(listen)


def test_nothing_compiles_after_the_warm_up(model, plan, mixed, compilations):
    # A shape of its own, so that no other test has compiled it before.
    sizes = plan(6, max_prompt=20, max_length=80, steps=8)
    mixed.append(Request(range(20), [1, 2, 3], 30, index=99))
    with Sampler(*model, sizes) as sampler:
        sampler.warmup(top_k=True, top_p=True)
        assert compilations
        compilations.clear()
        plain = [request for request in mixed if request.top_k == 0 and request.top_p == 1]
        only_k = [*plain, Request([3], [1], 4, top_k=2)]
        for requests in (mixed, mixed[5:6], mixed[::-1], plain, only_k):
            assert list(sampler.run(requests))
    with Sampler(*model, sizes) as sampler:
        assert list(sampler.run(mixed))
    assert compilations == []


def test_close_frees_cache_and_weights(model, plan):
    gc.collect()
    before = {id(x) for x in jax.live_arrays()}
    sampler = Sampler(*model, plan())
    run = sampler.run([Request([1, 2], [1, 2, 3], 40)])
    next(run)
    assert sum(x.nbytes for x in jax.live_arrays() if id(x) not in before) > sampler.plan.cache_bytes
    list(run)
    sampler.close()
    assert [x.shape for x in jax.live_arrays() if id(x) not in before] == []
    with pytest.raises(ValueError, match="sampler: it is closed"):
        sampler.run([])


def test_a_run_ends_with_a_word_when_its_sampler_is_closed(model, plan):
    sampler = Sampler(*model, plan(2))
    begun, waiting = (sampler.run([Request([1, 2], [1, 2, 3], [1, 40, 40])]) for _ in range(2))
    next(begun)
    sampler.close()
    for run in (begun, waiting):
        with pytest.raises(ValueError, match="sampler: it is closed"):
            list(run)


def test_the_callers_weights_stay(model, plan):
    model, params = model
    keeps = [weakref.ref(x) for x in jax.tree.leaves(params)]
    with Sampler(model, params, plan()):
        pass
    assert all(not keep().is_deleted() for keep in keeps)


def test_sharded_over_eight_devices_gives_the_same_tokens(model, plan, mixed, results, wanted, compilations):
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with Sampler(*model, plan(8, mesh=mesh)) as sampler:
        split = NamedSharding(mesh, P(("data", "fsdp"), None, "tensor"))
        assert sampler._engine._params["layers"][0]["q"].sharding == NamedSharding(mesh, P(None, "tensor"))
        assert sampler._engine._slots.keys[0].sharding == split
        sampler.warmup(top_k=True, top_p=True)
        compilations.clear()
        assert results(sampler, mixed) == wanted
        assert compilations == []
        assert sampler._engine._slots.keys[0].sharding == split
