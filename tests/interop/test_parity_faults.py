"""Faults planted in the torch run, each found at the operation that it was planted in; what is no fault."""

import dataclasses
import itertools
import json

import numpy as np
import pytest
import torch
from parity_tools import TREE1, recorded, write_pair, write_prompts
from safetensors.numpy import load_file, save_file
from tiny_draft import EAGLE1

from eaglejax.cli.main import main
from eaglejax.interop.backends.limits import LimitError
from eaglejax.interop.backends.torch_cpu import TorchCPU
from eaglejax.interop.models import decoder, runner
from eaglejax.interop.parity.check import Checker, Prompt
from eaglejax.interop.parity.replay import about_bundle, compare, isolate, open_bundle


@pytest.fixture(scope="module")
def eagle3():
    """A recording of an EAGLE-3 pair in float32, of which each prompt's first two rounds are whole."""
    return recorded().open()


def report(bundle, *, target=None, draft=None, adapter=None):
    """The report of a replay with some of the torch side replaced."""
    models = bundle.models()
    target = target(models[0]) if target else models[0]
    draft = draft(models[1]) if draft else models[1]
    adapter = adapter or TorchCPU()
    checker = Checker(target, draft, adapter, dtype=bundle.dtype, eos_ids=bundle.eos_ids)
    prompts = [Prompt(p.name, p.tokens, p.budget) for p in bundle.prompts]
    pairs = ((prompt, bundle.stages(i)) for i, prompt in enumerate(prompts))
    return compare(checker, pairs, adapter, about=about_bundle(bundle), reproduce="run {prompt} {name}")


def first(bundle, **replaced):
    """The first divergence of such a replay, which must be a fault."""
    found = report(bundle, **replaced)
    assert not found["agrees"]
    assert found["first_divergence"]["kind"] == "fault"
    return found["first_divergence"]


def changed(tree, path, change):
    """``tree`` with the leaf at ``path`` changed; nothing else is copied."""
    key, *rest = path
    value = change(tree[key]) if not rest else changed(tree[key], rest, change)
    if isinstance(tree, dict):
        return {**tree, key: value}
    return [*tree[:key], value, *tree[key + 1 :]]


def in_target(*path, by):
    return lambda target: dataclasses.replace(target, params=changed(target.params, path, by))


def in_draft(*path, by):
    def plant(draft):
        weights = changed(draft.draft.weights, path, by)
        return dataclasses.replace(draft, draft=dataclasses.replace(draft.draft, weights=weights))

    return plant


def slightly_off(weight):
    """One of its columns by a thousandth."""
    out = weight.clone()
    out[..., 3] *= 1.001
    return out


def test_the_same_weights_agree(eagle3):
    found = report(eagle3)
    assert found["agrees"]
    assert [p["identical"] for p in found["prompts"]] == [True, True]
    assert all(len(p["tokens"]) == 8 for p in found["prompts"])
    operations = {(x["part"], x["operation"]): x for x in found["operations"]}
    assert {part for part, _ in operations} == {"target", "observe", "step", "tree"}
    # Two layers, in a chunk and in two rounds.
    assert operations["target", "attention"]["checked"] == 6
    assert all(x["relative"] <= found["tolerances"]["operation"] for x in operations.values())


@pytest.mark.parametrize(
    ("replaced", "name"),
    [
        ({"target": in_target("layers", 1, "o", by=slightly_off)}, "prefill/0/target/layers/1/attn_out"),
        ({"target": in_target("layers", 0, "v", by=slightly_off)}, "prefill/0/target/layers/0/v"),
        (
            {"target": in_target("layers", 1, "mlp_norm", by=slightly_off)},
            "prefill/0/target/layers/1/mlp_norm",
        ),
        ({"target": in_target("embed", by=lambda w: w * 1.001)}, "prefill/0/target/embedding"),
        ({"draft": in_draft("layers", 0, "gate", by=slightly_off)}, "prefill/0/draft/observe/layers/0/mlp"),
        ({"draft": in_draft("fc", by=slightly_off)}, "prefill/0/draft/observe/feature"),
        ({"draft": in_draft("norm", by=slightly_off)}, "round/0/draft/step/0/logits"),
    ],
)
def test_a_wrong_weight(eagle3, replaced, name):
    fault = first(eagle3, **replaced)
    assert fault["name"] == name
    assert fault["difference"]["relative"] > 1e-5
    assert fault["reproduce"] == f"run p0 {name}"


def test_a_transposed_head(eagle3):
    def plant(w):
        return w.reshape(w.shape[::-1]).T.contiguous()

    fault = first(eagle3, target=in_target("head", by=plant))
    assert fault["name"] == "prefill/0/target/logits"
    assert fault["difference"]["shape"] == [1, 1, 264]
    assert "transposed" in fault["cause"]


def test_a_wrong_rope_base(eagle3):
    def plant(target):
        slower = [dataclasses.replace(r, inv_freq=(1.0, 0.11, 0.01, 0.001)) for r in target.spec.rope_table]
        return dataclasses.replace(target, spec=dataclasses.replace(target.spec, rope_table=tuple(slower)))

    fault = first(eagle3, target=plant)
    assert fault["name"] == "prefill/0/target/layers/0/q"
    assert fault["hint"].startswith("every head has its right length: the rotation is wrong")
    # At position 0 nothing turns.
    assert fault["difference"]["wrong_rows"] == list(range(1, fault["difference"]["rows"]))


class Inverted(TorchCPU):
    """Attends to what is hidden: the mask's polarity is the other one."""

    def _attend(self, limits, call):
        return super()._attend(limits, dataclasses.replace(call, keep=~call.keep))


def test_an_inverted_mask(eagle3):
    fault = first(eagle3, adapter=Inverted())
    assert fault["name"] == "prefill/0/target/layers/0/attention"
    assert "polarity" in fault["cause"]


def test_a_wrong_aux_boundary(eagle3):
    fault = first(
        eagle3, draft=lambda d: dataclasses.replace(d, spec=dataclasses.replace(d.spec, aux=(0, 2)))
    )
    assert fault["name"] == "prefill/0/target/aux"
    assert "boundaries" in fault["cause"]
    # [row, token, boundary, channel]: the second one is wrong.
    assert fault["difference"]["index"][2] == 1


def one_too_far(positions):
    """The last node of the tree, which has six."""
    positions = positions.clone()
    if positions.shape[1] == 6:
        positions[:, -1] += 1
    return positions


def test_one_flipped_position(eagle3, monkeypatch):
    plain = decoder.forward

    def forward(adapter, spec, params, tokens, positions, *rest, **options):
        return plain(adapter, spec, params, tokens, one_too_far(positions), *rest, **options)

    monkeypatch.setattr(decoder, "forward", forward)
    fault = first(eagle3)
    assert fault["name"] == "round/0/target/positions"
    assert fault["difference"]["index"] == [0, 5]
    assert fault["difference"]["found"] == fault["difference"]["expected"] + 1


def test_one_flipped_position_in_the_rotation_alone(eagle3, monkeypatch):
    plain = decoder.rotation
    monkeypatch.setattr(decoder, "rotation", lambda positions, rope: plain(one_too_far(positions), rope))
    fault = first(eagle3)
    assert fault["name"] == "round/0/target/layers/0/q"
    assert fault["difference"]["wrong_rows"] == [5]
    assert "rotation is wrong" in fault["hint"]


def test_a_cache_that_keeps_the_wrong_node(eagle3, monkeypatch):
    """Every operation of round 0 is right; what it leaves behind is not."""
    plain = decoder.commit

    def commit(cache, path, count):
        plain(cache, path + (path == 0), count)

    monkeypatch.setattr(decoder, "commit", commit)
    fault = first(eagle3)
    assert fault["name"] == "round/1/target/layers/0/k"
    assert "commit" in fault["hint"]
    assert "before round/1" in fault["text"]
    # The slot of round 0's root, the first behind the prompt's tokens.
    assert fault["difference"]["wrong_rows"] == [len(eagle3.prompts[0].tokens)]


def test_a_verification_that_takes_another_path(eagle3, monkeypatch):
    plain = runner.verify

    def verify(tree, best, levels):
        path, accepted, following = plain(tree, best, levels)
        return path, accepted, (following + 1) % 264

    monkeypatch.setattr(runner, "verify", verify)
    fault = first(eagle3)
    assert fault["name"] == "round/0/verify/tokens"
    assert fault["difference"]["found"] == fault["difference"]["expected"] + 1


def test_all_wrong_operations_of_the_stage_are_named(eagle3):
    def plant(target):
        target = in_target("layers", 0, "o", by=slightly_off)(target)
        return in_target("layers", 1, "down", by=slightly_off)(target)

    fault = first(eagle3, target=plant)
    assert fault["name"] == "prefill/0/target/layers/0/attn_out"
    assert fault["hint"] == "also wrong on equal inputs: prefill/0/target/layers/1/mlp"


class FromCall(TorchCPU):
    """Wrong from a certain attention on, behind all that was recorded whole."""

    def __init__(self, call):
        super().__init__()
        self.calls, self.call = itertools.count(), call

    def _attend(self, *args):
        out, sums = super()._attend(*args)
        return (out * 2 if next(self.calls) >= self.call else out), sums


def test_a_fault_behind_the_recorded_tensors_is_not_located_but_found(eagle3):
    fault = first(eagle3, adapter=FromCall(40))
    stage, index, *_ = fault["name"].split("/")
    assert (stage, int(index) >= 2) == ("round", True)
    assert "record more rounds" in fault["text"]


class Narrow(TorchCPU):
    """A device whose attention takes heads of 16 numbers or more."""

    def _attend(self, *args):
        raise LimitError("narrow", "an operator", "head_dim", 8, "16 to 128")


def test_what_a_device_does_not_take_is_reported(eagle3):
    found = report(eagle3, adapter=Narrow())
    assert found["first_divergence"]["kind"] == "refused"
    assert found["first_divergence"]["text"] == (
        "narrow: an operator does not take head_dim 8; it takes 16 to 128"
    )
    json.dumps(found, allow_nan=False)


def test_one_operation_alone(eagle3, tmp_path):
    """On the recorded inputs, without anything that comes before it."""
    name = "round/1/target/layers/1/attention"
    found = isolate(eagle3, TorchCPU(), prompt="p0", name=name, save=tmp_path / "saved")
    assert found["difference"]["wrong_rows"] == []
    wrong = isolate(eagle3, Inverted(), prompt="p0", name=name, save=None)
    assert wrong["difference"]["name"] == name
    assert wrong["difference"]["wrong_rows"]
    saved = {x: np.load(tmp_path / "saved" / f"{x}.npy") for x in ("expected", "found")}
    np.testing.assert_allclose(saved["expected"], saved["found"], rtol=1e-4, atol=1e-5)
    assert "round/1/target/layers/1/q" in np.load(tmp_path / "saved" / "before.npz")


class Noisy(TorchCPU):
    """Rounds its products otherwise: by up to one part in 200, as a bf16 device may."""

    def matmul(self, x, w, dtype):
        y = super().matmul(x, w, dtype)
        noise = torch.rand(y.shape, generator=torch.Generator().manual_seed(y.shape[-1])) - 0.5
        return (y.float() * (1 + noise / 100)).to(y.dtype)


def test_a_near_tie_is_no_fault(tmp_path, capfd):
    """Tokens come in pairs of almost equal rows of the head, so that rounding decides between the two."""
    target, draft = write_pair(tmp_path, EAGLE1)
    weights = load_file(f"{target}/model.safetensors")
    head = weights["lm_head.weight"]
    head[1::2] = head[::2] * 1.002
    save_file(weights, f"{target}/model.safetensors")
    prompts = write_prompts(tmp_path / "prompts.jsonl", "near")
    argv = ["--target", target, "--draft", draft, "--prompts", prompts, "--max-new-tokens", "6"]
    options = ["--speculative-config", TREE1, "--dtype", "bfloat16", "--record-rounds", "9"]
    out = str(tmp_path / "bundle.zip")
    assert main(["parity", *argv, *options, "--record", out, "--backend", "torch-cpu"]) == 0
    assert main(["parity", "--backend", "torch-cpu", "--replay", out, "--json"]) == 0
    capfd.readouterr()

    with open_bundle(tmp_path / "bundle.zip") as bundle:
        found = report(bundle, adapter=Noisy())
        assert found["agrees"], found["first_divergence"]
        ties = found["prompts"][0]["near_ties"]
        assert ties
        assert not found["prompts"][0]["identical"]
        # The run went on in step with the JAX run, to its end.
        assert found["prompts"][0]["complete"]
        for tie in ties:
            assert 0 <= float(tie["decision"]["gap"]) <= found["tolerances"]["tie"] == 0.25
        pairs = [t["decision"] for t in ties if t["name"].endswith("verify/tokens")]
        assert any(d["expected"] ^ 1 == d["found"] for d in pairs)
        # The same noise and a real fault: it is the fault that is found.
        fault = first(bundle, adapter=Noisy(), target=in_target("layers", 1, "up", by=lambda w: w * 1.1))
        assert fault["name"] == "prefill/0/target/layers/1/mlp"
