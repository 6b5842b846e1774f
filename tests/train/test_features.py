"""Features: packed equals alone, cached equals online, and nothing of another kind is ever read."""

import dataclasses
import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from train_tools import leaves_equal

from eaglejax.errors import CheckpointError, MismatchError
from eaglejax.models import decoder
from eaglejax.nn.visible import Causal
from eaglejax.train import feature_cache
from eaglejax.train.eagle.start import draft_config
from eaglejax.train.evaluate import HeldOut
from eaglejax.train.feature_cache import FeatureCache, write_features
from eaglejax.train.features import check_identity, fingerprint, head_summary, identity, with_features
from eaglejax.train.packing import assemble
from eaglejax.train.samples import Sample
from eaglejax.train.settings import DraftSettings

AUX = (0, 2, 4)


def make(length, seed):
    ids = np.random.default_rng(seed).integers(1, 250, length).astype(np.int32)
    return Sample(ids, np.arange(length) > length // 2, f"sample {seed}")


SAMPLES = [make(n, seed) for seed, n in enumerate((11, 7, 16, 5, 9))]


@pytest.fixture(scope="module")
def cache(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("features") / "cache"
    assert write_features(folder, target, SAMPLES, AUX, capacity=24, shard_tokens=20) == 5
    return folder


def test_packed_features_are_those_of_each_document_alone(target):
    together = with_features(target, assemble(SAMPLES[:2], 24), AUX)
    ids = jnp.asarray(SAMPLES[1].ids)[None]
    positions = jnp.arange(7, dtype=jnp.int32)[None]
    out = decoder.forward(
        target.params,
        target.config,
        ids,
        positions,
        decoder.init_cache(target.config, 1, 7),
        Causal(),
        aux=AUX,
    )
    logits = decoder.unembed(target.params, target.config, out.hidden)
    here = slice(11, 18)
    np.testing.assert_allclose(together.aux[0, here], out.aux[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_allclose(together.hidden[0, here], out.hidden[0], rtol=2e-5, atol=2e-5)
    np.testing.assert_array_equal(together.top[0, here], jnp.argmax(logits[0], -1))
    np.testing.assert_allclose(together.log_norm[0, here], jax.nn.logsumexp(logits[0], -1), rtol=1e-5)


def test_the_head_is_asked_in_pieces_without_losing_rows(target, monkeypatch):
    from eaglejax.train import features

    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 32)), jnp.float32)
    whole = head_summary(target.params, target.config, hidden)
    monkeypatch.setattr(features, "_HEAD_ROWS", 4)
    pieces = head_summary(target.params, target.config, hidden)
    np.testing.assert_array_equal(whole[0], pieces[0])
    np.testing.assert_allclose(whole[1], pieces[1], rtol=1e-6)


def test_features_and_drafts_of_a_rotated_target_say_so(target):
    turned = dataclasses.replace(target, basis="0123abcd")
    assert identity(target, AUX)["basis"] == "original"
    assert identity(turned, AUX)["basis"] == "0123abcd"
    with pytest.raises(MismatchError, match="basis is 'original', needed is '0123abcd'"):
        check_identity(identity(target, AUX), identity(turned, AUX), "a folder")
    assert draft_config(DraftSettings(aux=AUX), target, 3).basis is None
    assert draft_config(DraftSettings(aux=AUX), turned, 3).basis == "0123abcd"


def test_cached_and_online_features_give_the_same_batch(target, cache):
    read = FeatureCache(cache, identity(target, AUX)).read
    for chosen in (SAMPLES[:2], [SAMPLES[4], SAMPLES[3], SAMPLES[1]]):
        online = with_features(target, assemble(chosen, 24), AUX)
        cached = assemble(chosen, 24, [read(s) for s in chosen])
        real = cached.documents[0] > 0
        for name in ("aux", "hidden", "log_norm"):
            a, b = np.asarray(getattr(online, name))[0, real], getattr(cached, name)[0, real]
            np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
        assert np.array_equal(np.asarray(online.top)[0, real], cached.top[0, real])
        assert not np.any(cached.hidden[0, ~real])


def test_held_out_batches_are_the_same_each_time_and_kept_as_far_as_there_is_room(target, cache):
    read = FeatureCache(cache, identity(target, AUX)).read
    made = []

    def place(batch):
        made.append(batch)
        return batch

    def passes(keep):
        made.clear()
        held = HeldOut(SAMPLES, capacity=24, rows=2, features=read, place=place, keep=keep)
        assert len(held) == 2
        both = [list(held), list(held)]
        assert leaves_equal(*both)
        return both[0]

    first, second = passes(1 << 30)
    assert len(made) == 2
    found = [set(batch.tokens[batch.documents > 0].tolist()) for batch in (first, second)]
    assert found[0] | found[1] == {i for s in SAMPLES for i in s.ids.tolist()}
    assert not np.any(second.documents[1])
    assert leaves_equal(passes(0), [first, second])
    assert len(made) == 4
    passes(sum(x.nbytes for x in jax.tree.leaves(first)))
    assert len(made) == 3


def test_a_killed_extraction_goes_on_and_computes_nothing_twice(target, cache, tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    real, calls = feature_cache.target_features, []

    def counted(*args):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(feature_cache, "target_features", counted)
    with pytest.raises(KeyboardInterrupt):
        write_features(folder, target, SAMPLES, AUX, capacity=24, shard_tokens=20)
    done = len(FeatureCache(folder, identity(target, AUX)))
    assert 0 < done < 5
    told = []
    left = write_features(folder, target, SAMPLES, AUX, capacity=24, shard_tokens=20, advance=told.append)
    assert left == 5 - done
    found = FeatureCache(folder, identity(target, AUX))
    assert sum(told) == sum(len(s) for s in SAMPLES[done:])
    wanted = FeatureCache(cache, identity(target, AUX))
    for sample in SAMPLES:
        np.testing.assert_allclose(
            found.read(sample)["aux"], wanted.read(sample)["aux"], rtol=1e-5, atol=1e-5
        )
    assert write_features(folder, target, SAMPLES, AUX, capacity=24) == 0
    assert not [n for n in os.listdir(folder) if n.startswith(".")]


def test_features_of_another_kind_are_refused_with_every_difference(target, cache, tmp_path):
    wanted = identity(target, (1, 2, 4))
    wanted["model"] = "0" * 32
    with pytest.raises(MismatchError, match=r"aux is \[0, 2, 4\].*needed is \[1, 2, 4\].*model is"):
        FeatureCache(cache, wanted)
    with pytest.raises(MismatchError, match="aux"):
        write_features(cache, target, SAMPLES, (1, 2, 4), capacity=24)
    (tmp_path / "manifest.json").write_text('{"format": 0}')
    with pytest.raises(CheckpointError, match="feature format 0 is not 1"):
        FeatureCache(tmp_path, {})
    with pytest.raises(CheckpointError, match="feature format 0 is not 1"):
        write_features(tmp_path, target, [], AUX, capacity=24)
    with pytest.raises(CheckpointError, match=r"none holds no features; make them with `eaglejax features"):
        FeatureCache(tmp_path / "none", {})
    found = FeatureCache(cache, identity(target, AUX))
    with pytest.raises(CheckpointError, match=r"no features of sample 99"):
        found.read(make(6, 99))


def test_the_fingerprint_follows_weights_and_settings(target):
    import dataclasses

    base = fingerprint(target)
    assert base == fingerprint(target)
    layers = [*target.params["layers"]]
    layers[1] = {**layers[1], "up": layers[1]["up"].at[0].add(1e-3)}
    changed = dataclasses.replace(target, params={**target.params, "layers": layers})
    assert fingerprint(changed) != base


def test_the_manifest_says_what_the_features_are(cache, target):
    manifest = json.loads((cache / "manifest.json").read_text())
    assert manifest["identity"]["aux"] == list(AUX)
    assert manifest["identity"]["tokenizer"] == target.tokenizer.hash
    assert manifest["identity"]["hidden"] == "after the final norm"
