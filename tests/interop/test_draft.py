"""Draft trees, accepted drafts and final tokens of the torch runner against the JAX round."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import textwrap
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch_cases as cases

from eaglejax import sampling
from eaglejax.drafts.autoregressive import Autoregressive
from eaglejax.drafts.base import Bound
from eaglejax.drafts.tree import DynamicTree, chain, from_choices
from eaglejax.errors import ConfigError, RequestError
from eaglejax.interop.backends.adapter import get_adapter
from eaglejax.interop.convert import export
from eaglejax.interop.models import growth
from eaglejax.interop.models.runner import TorchRunner
from eaglejax.interop.models.specs import to_dict
from eaglejax.interop.parity.names import parse
from eaglejax.interop.portable import write_sources
from eaglejax.speculate import rounds
from eaglejax.speculate.rounds import Params, Program
from eaglejax.speculate.verify import verify

PROMPTS = ([3, 5, 7, 2], [1, 9, 4, 4, 8, 10, 11], [2])
TOKENS, EOS = 14, (29,)
CPU = get_adapter("torch-cpu")


def first(target):
    """An EAGLE-1 draft with biases on a fixed tree, two of whose nodes have several children."""
    config = cases.draft_config(target.config, 1, fc_bias=True, qkv_bias=True, num_heads=4, head_dim=4)
    return cases.draft(
        target, from_choices([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]), config, scale=1.0
    )


def third(target):
    """An EAGLE-3 draft of two layers, with a reduced vocabulary, experts and a window, on a dynamic tree that
    a confidence cuts."""
    config = cases.draft_config(
        target.config,
        3,
        num_layers=2,
        draft_vocab_size=16,
        own_embedding=True,
        aux_norm="joined",
        norm_before_residual=True,
        qk_norm=True,
        windows=(None, 4),
        num_experts=3,
        experts_per_token=2,
        moe_intermediate_size=10,
    )
    return cases.draft(target, DynamicTree(3, 3, 8), config, min_confidence=0.05)


@functools.cache
def pair(version):
    target = cases.target()
    return target, (first if version == 1 else third)(target)


@functools.cache
def jax_run(version):
    """(first tokens [B], a (record, tree, verdict) a round) of the JAX side."""
    target, draft = pair(version)
    program, params = Program(target.config, draft.proposer), Params(target.params, draft.params)
    batch, width = len(PROMPTS), max(map(len, PROMPTS))
    tokens = np.zeros((batch, width + 1), np.int32)
    for row, prompt in zip(tokens, PROMPTS, strict=True):
        row[: len(prompt)] = prompt
    state = rounds.init_state(
        program,
        params,
        sampling.rows(
            [sampling.Sampling(seed=0)] * batch, target.config.vocab_size, list(map(list, PROMPTS))
        ),
        capacity=40,
        budget=jnp.full(batch, TOKENS, jnp.int32),
        eos=jnp.asarray(EOS, jnp.int32),
        cache_dtype=jnp.float32,
    )
    count = np.asarray(list(map(len, PROMPTS)), np.int32)

    @jax.jit
    def prefill(state):
        last = jnp.ones(batch, bool)
        return rounds.prefill_chunk(program, params, state, tokens[:, :-1], tokens[:, 1:], count, last)

    @jax.jit
    def step(state):
        judged = []

        def note(processed, tree, *arguments, **options):
            judged.extend([tree, verify(processed, tree, *arguments, **options)])
            return judged[1]

        with mock.patch.object(rounds, "verify", note):
            after, record = rounds.decode_round(program, params, state)
        return after, record, *judged

    with jax.default_matmul_precision("highest"):
        state, record = prefill(state)
        started, found = np.asarray(record.tokens[:, 0]), []
        while not bool(state.done.all()):
            state, *seen = step(state)
            found.append(jax.tree.map(np.asarray, seen))
    return started, found


@functools.cache
def torch_run(version):
    target, draft = pair(version)
    seen: dict[str, torch.Tensor] = {}
    runner = TorchRunner(
        export.export_target(target),
        export.export_draft(draft),
        CPU,
        record=lambda n, x: seen.update({n: x.clone()}),
    )
    return runner.run(PROMPTS, TOKENS, eos_ids=EOS), seen


@pytest.mark.parametrize("version", [1, 3])
def test_trees_accepted_drafts_and_tokens_are_those_of_jax(version):
    started, found = jax_run(version)
    output, seen = torch_run(version)
    assert output.rounds == len(found)
    texts = [[int(t)] for t in started]
    for index, (record, tree, verdict) in enumerate(found):
        mine = {
            field: seen[f"round/{index}/draft/tree/{field}"].numpy()
            for field in ("tokens", "parent", "depth", "valid", "scores")
        }
        for field in ("tokens", "parent", "depth", "valid"):
            assert np.array_equal(mine[field], getattr(tree, field)), (index, field)
        steps = [
            x
            for name, x in seen.items()
            if name.startswith(f"round/{index}/draft/step/") and "logits" in name
        ]
        # A score sums as many logits as its node is deep, each as exact as f32 holds the largest.
        rounding = 1e-5 * len(steps) * max(float(x.abs().max()) for x in steps)
        held = tree.cut_score > 0  # the others are too small for exp
        assert np.allclose(mine["scores"][held], np.log(tree.cut_score[held]), rtol=0, atol=rounding)
        for field, want in (("path", verdict.path), ("accepted", verdict.accepted), ("count", record.count)):
            assert np.array_equal(seen[f"round/{index}/verify/{field}"].numpy(), want), (index, field)
        for row, n in enumerate(record.count):
            emitted = seen[f"round/{index}/verify/tokens"][row, :n].tolist()
            assert emitted == record.tokens[row, :n].tolist()
            texts[row] += emitted
    assert output.tokens == texts
    assert sum(map(sum, output.accepted)) > 0, "a run that accepts nothing shows nothing"


def test_names_are_those_of_the_list_and_every_operation_is_recorded():
    _, seen = torch_run(3)
    places = [parse(name) for name in seen]
    assert {str(p) for p in places} == set(seen)
    layers = {p.operation for p in places if p.part == "target" and p.layer == 1}
    assert layers == {
        *("attn_norm", "q", "k", "v", "attention", "attn_out", "attn_residual", "mlp_norm", "mlp", "residual")
    }
    for part, operations in {
        "target": {"tokens", "positions", "visible", "embedding", "final_norm", "aux", "logits"},
        "observe": {"feature", "embedding", "state"},
        "step": {"feature", "embedding", "state", "logits"},
        "tree": {"tokens", "parent", "depth", "valid", "scores"},
        "verify": {"path", "accepted", "tokens", "count"},
    }.items():
        assert {p.operation for p in places if p.part == part and p.layer is None} == operations
    assert "round/0/draft/step/0/logits" in seen
    assert "round/0/draft/step/0/state" not in seen
    assert "prefill/0/draft/observe/layers/1/mlp" in seen
    # EAGLE-1 mixes embedding and feature in every step.
    assert "round/0/draft/step/1/fc" in torch_run(1)[1]


@pytest.mark.parametrize(
    "text",
    [
        "round/0/target",
        "round/x/target/logits",
        "round/0/step/1/logits",
        "turn/0/target/logits",
        "round/0/draft/step/logits",
        "round/0/target/layers/1/logits",
        "round/00/target/logits",
        "round/0/verify/layers/0/q",
        "round/0/target/layers",
    ],
)
def test_what_is_no_name_is_refused(text):
    with pytest.raises(ConfigError):
        parse(text)


def test_speculation_changes_no_text_whatever_the_draft_tree_and_prefill_width():
    target, draft = pair(3)
    plain = TorchRunner(export.export_target(target), None, CPU).run(PROMPTS, TOKENS, eos_ids=EOS)
    assert all(a == 0 for row in plain.accepted for a in row)
    for tree in (chain(3), DynamicTree(2, 2, 5)):
        other = dataclasses.replace(draft, proposer=dataclasses.replace(draft.proposer, tree=tree))
        runner = TorchRunner(export.export_target(target), export.export_draft(other), CPU)
        for width in (3, None):
            got = runner.run(PROMPTS, TOKENS, eos_ids=EOS, prefill_width=width)
            assert got.tokens == plain.tokens


def test_a_row_does_not_depend_on_its_batch_mates():
    target, draft = pair(3)
    runner = TorchRunner(export.export_target(target), export.export_draft(draft), CPU)
    together = torch_run(3)[0].tokens
    for row, prompt in enumerate(PROMPTS):
        assert runner.run([prompt], TOKENS, eos_ids=EOS).tokens == [together[row]]


def test_budgets_and_the_context_end_a_row_and_bad_prompts_are_refused():
    target, _ = pair(3)
    runner = TorchRunner(export.export_target(target), None, CPU)
    got = runner.run(PROMPTS, TOKENS, context=9)
    assert [len(t) for t in got.tokens] == [5, 2, 8]
    assert runner.run([[1]], 0).tokens == [[]]
    for prompts, text in (
        ([[]], "prompt 0 is empty"),
        ([[1], [32]], "prompt 1"),
        ([[1] * 10], "the context is 9"),
    ):
        with pytest.raises(RequestError, match=text):
            runner.run(prompts, 4, context=9)


def test_equal_scores_go_to_the_lower_index_in_expansion():
    logits = torch.tensor([[[0.0, 2.0, 2.0, torch.nan, torch.inf, 2.0]]])
    scores, tokens = growth.expand(logits, torch.zeros(1, 1), 4)
    assert tokens.tolist() == [[[1, 2, 5, 0]]]
    assert bool(scores.isfinite().all())
    dead, _ = growth.expand(torch.full((1, 1, 6), torch.nan), torch.zeros(1, 1), 2)
    assert bool((dead == -torch.inf).all())


def test_ancestors_of_an_invalid_node():
    parent = torch.tensor([[0, 0, 1, 1]])
    valid = torch.tensor([[True, True, False, True]])
    seen = growth.ancestors(parent, valid, 2)[0]
    assert seen.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 1]]


def test_drafts_that_have_no_counterpart_are_refused():
    _, draft = pair(1)
    with pytest.raises(ConfigError, match="Autoregressive has no torch counterpart"):
        export.export_draft(Bound(Autoregressive()))
    sampled = dataclasses.replace(draft.proposer, sample=True)
    with pytest.raises(ConfigError, match="trees of the likeliest tokens"):
        export.export_draft(Bound(sampled, draft.params))
    other = cases.target(dataclasses.replace(cases.LLAMA, vocab_size=40))
    with pytest.raises(ConfigError, match="for 32 tokens"):
        TorchRunner(export.export_target(other), export.export_draft(draft), CPU)


def test_the_adapters_of_a_rotated_target_turn_features():
    from eaglejax.drafts.features import FeatureAdapter

    target, draft = pair(1)
    rng = np.random.default_rng(5)
    turn = jnp.asarray(np.linalg.qr(rng.normal(size=(16, 16)))[0], jnp.float32)
    there, back = FeatureAdapter((turn,), None), FeatureAdapter((turn.T,), None)
    assert jnp.allclose(back.from_target(there.from_target(jnp.ones((1, 1, 1, 16)))), 1.0, atol=1e-5)
    params = dataclasses.replace(draft.params, adapter=FeatureAdapter((turn,), turn))
    exported = export.export_draft(Bound(draft.proposer, params))
    assert torch.allclose(exported.draft.target_maps[0], torch.tensor(np.asarray(turn)))
    from eaglejax.drafts.eagle import model as eagle_model
    from eaglejax.interop.models import eagle

    features = rng.normal(size=(2, 3, 1, 16)).astype(np.float32)
    got = eagle.fuse(CPU, exported.spec, exported.draft, torch.from_numpy(features))
    want = eagle_model.fuse(params, draft.proposer.config, jnp.asarray(features))
    assert np.allclose(got.numpy(), want, atol=1e-5)
    run = TorchRunner(export.export_target(target), exported, CPU).run(PROMPTS[:1], TOKENS)
    assert run.tokens == TorchRunner(export.export_target(target), None, CPU).run(PROMPTS[:1], TOKENS).tokens


def test_it_runs_from_plain_arrays_where_there_is_no_jax(tmp_path):
    """What a device's host has: the portable modules, torch and NumPy, weights in a file, specs as JSON."""
    target, draft = pair(3)
    exported, own = export.export_target(target), export.export_draft(draft)
    specs = {"target": exported.spec, "draft": own.spec, "tree": own.tree}
    (tmp_path / "specs.json").write_text(json.dumps({k: to_dict(v) for k, v in specs.items()}))
    torch.save(
        {
            "params": exported.params,
            **{k: getattr(own.draft, k) for k in ("weights", "embed", "head", "ids")},
        },
        tmp_path / "weights.pt",
    )
    written = write_sources(tmp_path)
    assert not [p for p in written if "import jax" in p.read_text()]
    script = f"""
        import json, sys
        for name in ("jax", "jaxlib", "flax", "ml_dtypes"):
            sys.modules[name] = None
        import torch
        from eaglejax.interop.backends.adapter import get_adapter
        from eaglejax.interop.models.eagle import Draft
        from eaglejax.interop.models.runner import TorchDraft, TorchRunner, TorchTarget
        from eaglejax.interop.models.specs import from_dict
        import eaglejax.interop.backends.selfcheck

        specs = {{k: from_dict(v) for k, v in json.load(open("specs.json")).items()}}
        weights = torch.load("weights.pt", weights_only=True)
        params = {{k: v.numpy() for k, v in weights["params"].items() if k != "layers"}}
        target = TorchTarget(specs["target"], {{**params, "layers": weights.pop("params")["layers"]}})
        draft = TorchDraft(specs["draft"], Draft(**weights), specs["tree"])
        runner = TorchRunner(target, draft, get_adapter("torch-cpu"))
        out = runner.run({list(PROMPTS)}, {TOKENS}, eos_ids={EOS})
        print(json.dumps(out.tokens))
    """
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
    )
    assert json.loads(ran.stdout) == torch_run(3)[0].tokens


def test_without_torch_there_is_a_clear_error_and_names_still_work(tmp_path):
    script = """
        import sys
        sys.modules["torch"] = None
        from eaglejax.interop.parity import names
        assert str(names.Place("round", 1, "verify", "path")) == "round/1/verify/path"
        from eaglejax.errors import ConfigError
        try:
            import eaglejax.interop.models.runner
        except ConfigError as error:
            assert "pip install 'eaglejax[torch]'" in str(error), error
        else:
            raise SystemExit("imported without torch")
    """
    write_sources(tmp_path)
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.slow
def test_the_demo_model_and_its_shipped_draft_in_torch():
    from eaglejax.api import generate
    from eaglejax.checkpoint.target import load_target
    from eaglejax.drafts.registry import load_draft

    target = load_target("demo", dtype="float32")
    draft = load_draft("demo", target)
    prompt = target.need_tokenizer().encode("def fibonacci(n):")
    want = generate(target, [prompt], proposer=draft, max_new_tokens=32)[0]
    runner = TorchRunner(export.export_target(target), export.export_draft(draft), CPU)
    got = runner.run([prompt], 32, eos_ids=target.eos_ids)
    assert got.tokens[0] == list(want.token_ids)
    assert sum(got.accepted[0]) == want.stats.num_accepted_tokens
