"""``--speculative-config`` as users of vLLM write it: every key means what it means there or is refused with
the reason, and the figures are also told as vLLM defines and prints them."""

from __future__ import annotations

import json
import re

import jax.numpy as jnp
import pytest

import eaglejax as ej
from eaglejax.cli import methods, show
from eaglejax.cli.doctor import tiny_config
from eaglejax.config import SpeculativeConfig, parse_speculative_config
from eaglejax.engine_keys import _NOT_HONOURED
from eaglejax.errors import ConfigError
from eaglejax.speculate.by_batch import ByBatch
from eaglejax.speculate.metrics import Stats

KEY = "num_speculative_tokens_per_batch_size"


def read(**given):
    config = parse_speculative_config(json.dumps({"method": "ngram", **given}))
    methods.check_config(config)
    return config


@pytest.mark.parametrize(
    "given",
    [
        {"draft_tensor_parallel_size": 1},
        {"enforce_eager": False},
        {"parallel_drafting": False, "use_heterogeneous_vocab": False},
        {"attention_backend": "auto", "moe_backend": "auto", "draft_load_config": {"load_format": "auto"}},
        {"draft_sample_method": "greedy", "rejection_sample_method": None, "kv_cache_dtype": "auto"},
        {
            "model": None,
            "quantization": None,
            "max_model_len": None,
            "revision": None,
            "prompt_lookup_max": None,
        },
        dict.fromkeys(_NOT_HONOURED),
    ],
)
def test_what_is_done_anyway_may_be_said(given):
    assert read(**given).given() == ({"draft_sample": False} if "draft_sample_method" in given else {})


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"draft_tensor_parallel_size": 2}, "'draft_tensor_parallel_size' .* on one device"),
        # True is no 1, and 0 no false.
        ({"draft_tensor_parallel_size": True}, "on one device"),
        ({"enforce_eager": 0}, "compiled programs"),
        ({"enforce_eager": True}, "compiled programs"),
        ({"tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
        ({"max_model_len": 2048}, "--context"),
        ({"quantization": "fp8"}, "as its files have them"),
        ({"attention_backend": "FLASH_ATTN"}, "the device's adapter"),
        ({"code_revision": "main"}, "never run"),
        ({"draft_load_config": {"load_format": "dummy"}}, "told from them"),
        ({"use_heterogeneous_vocab": True}, "its target's tokenizer"),
        ({"parallel_drafting": True}, "own config.json"),
        ({"synthetic_acceptance_rates": [0.5]}, "no longer the target's"),
        ({"rejection_sample_method": "synthetic"}, "no longer the target's"),
        ({"rejection_sample_method": "typical"}, "one of standard, block"),
        ({"acceptance_method": "typical_acceptance_sampler"}, "no longer the target's"),
        ({"draft_sample_method": "probabilistic"}, "'ngram' has no setting 'draft_sample'"),
        ({"draft_sample_method": "argmax"}, "one of greedy, probabilistic"),
        ({"draft_sample_method": ["greedy"]}, "one of greedy, probabilistic"),
        ({"draft_sample_method": "greedy", "draft_sample": True}, "contradict"),
        ({"disable_by_batch_size": 8}, KEY),
        ({"enable_adaptive_verification": True}, "--speculation"),
        ({"revision": "main"}, "goes with a 'model'"),
        ({"revision": "main", "model": "."}, "'.' is not"),
        ({"revision": "main", "model": "a/b@c"}, "'a/b@c' is not"),
        ({"revision": 3, "model": "a/b"}, "a branch or a tag"),
        ({"num_speculative_token": 4}, "is 'num_speculative_tokens' meant"),
        (
            {"prompt_lookup_maximum": 4},
            "unknown key 'prompt_lookup_maximum' in the speculative config; known",
        ),
        ({KEY: []}, "a list such as"),
        ({KEY: [[1, 4]]}, "a list such as"),
        ({KEY: [[1, 4, True]]}, "a list such as"),
        ({KEY: [[2, 4, 5]]}, "begins at batches of 2"),
        ({KEY: [[1, 4, 5], [4, 8, 2]]}, "two ranges for batches of 4"),
        ({KEY: [[1, 0, 5]]}, r"has \[1, 0, 5\]"),
        ({KEY: [[1, 4, -1]]}, r"has \[1, 4, -1\]"),
        ({KEY: [[1, 4, 0]]}, "drafts nothing at any size"),
        ({KEY: [[1, 4, 3]], "tree_nodes": 9}, "tree_nodes asks for a tree"),
        ({KEY: [[1, 4, 600]]}, "num_speculative_tokens is 600"),
        ({"method": "ar", KEY: [[1, 4, 3]]}, "no number of drafts"),
        ({"method": "mlp_speculator"}, "is not run here: drafts of the kind MLP speculator"),
        ({"method": "custom_class"}, r"generate\(proposer="),
        ({"method": "extract_hidden_states"}, "eaglejax features"),
        (
            {
                "method": "cascade",
                "parts": [{"method": "ngram", "verification": "token"}, {"method": "suffix"}],
            },
            "a cascade as a whole",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_cannot_be_honoured_is_refused_with_the_reason(given, reason):
    with pytest.raises(ConfigError, match=reason):
        read(**given)


def test_names_that_differ_are_taken_over():
    assert read(rejection_sample_method="block").verification == "block"
    assert methods.decoding(read(rejection_sample_method="standard")) == {"verification": "token"}
    assert methods.decoding(read()) == {}
    config = parse_speculative_config('{"method": "eagle3", "model": "a/b", "revision": "v1"}')
    assert config.model == "a/b@v1"
    drawn = parse_speculative_config('{"method": "eagle", "draft_sample_method": "probabilistic"}')
    assert drawn.draft_sample is True
    for name in ("pangu_ultra_moe_mtp", "MiMo-V2-MTP", "step3p5_mtp"):
        assert methods.method_name(name) == "mtp"
    block = read(rejection_sample_method="block")
    assert methods.decoding(block, verification="block") == {"verification": "block"}
    with pytest.raises(ConfigError, match="--verification says 'token', --speculative-config says 'block'"):
        methods.decoding(block, verification="token")
    # A draft model draws whenever its row is sampled; only that may be said of it.
    with pytest.raises(ConfigError, match="'draft_model' has no setting 'draft_sample'"):
        methods.check_config(SpeculativeConfig("draft_model", model="x", draft_sample=False))


def test_drafts_by_the_size_of_the_batch_are_settings_of_decoding():
    config = read(**{KEY: [[5, 64, 0], [1, 2, 6], [3, 4, 2]]})
    asked = methods.decoding(config, sampled=True)
    assert asked["policy"] == ByBatch(((1, 2, 6), (3, 4, 2), (5, 64, 0)))
    assert (asked["widths"], asked["speculation"]) == ((1, 3, 7), "fixed")
    target = ej.random_target(tiny_config())
    assert methods.proposer_from(target, config) == ej.NGram(length=6)
    few = read(num_speculative_tokens=4, **{KEY: [[1, 2, 6]]})
    assert methods.proposer_from(target, few) == ej.NGram(length=4)
    with pytest.raises(ConfigError, match="give one"):
        methods.decoding(config, speculation="adaptive")
    drawn = SpeculativeConfig("draft_model", **{KEY: ((1, 4, 3),)})
    assert methods.decoding(drawn)["widths"] == (4,)
    with pytest.raises(ConfigError, match="a seed would give another text in another batch"):
        methods.decoding(drawn, sampled=True)


def test_commands_that_judge_in_one_way_refuse_another():
    methods.check_plain_decoding(read(rejection_sample_method="standard"), "serve")
    for given in ({"rejection_sample_method": "block"}, {KEY: [[1, 4, 3]]}):
        with pytest.raises(ConfigError, match="serve judges whole drafts token by token"):
            methods.check_plain_decoding(read(**given), "serve")


def test_a_policy_goes_by_the_rows_there_are():
    """Ranges are carried on over gaps and behind the last; more drafts than there are is all of them."""
    policy = ByBatch(((1, 2, 6), (4, 5, 2), (7, 9, 0)))
    menu = (1, 3, 5)
    for rows, width in ((1, 5), (2, 5), (3, 5), (4, 3), (6, 3), (7, 1), (40, 1)):
        scores = jnp.zeros((64, 7)).at[:rows].set(0.5)
        assert menu[int(policy.choose(jnp.int32(-1), menu, scores, scores))] == width
        assert bool(policy.drafts(jnp.int32(rows), menu)) == (width > 1)
    assert bool(policy.drafts(policy.init(menu), menu))


def test_fewer_are_drafted_while_many_rows_are_decoded():
    """The text is plain decoding's; as rows end, the others get more drafts."""
    target = ej.random_target(tiny_config(), seed=3)
    prompts, tokens = [[1, 2, 3] * 3, [4, 5] * 5, [7, 8, 9, 7, 8, 9]], [4, 12, 30]
    plain = ej.generate(target, prompts, max_new_tokens=tokens, ignore_eos=True)
    policy = ByBatch(((1, 1, 3), (2, 2, 1), (3, 8, 0)))
    found = ej.generate(
        target,
        prompts,
        max_new_tokens=tokens,
        ignore_eos=True,
        proposer=ej.NGram(length=3),
        policy=policy,
        widths=policy.widths,
    )
    assert [r.token_ids for r in found] == [r.token_ids for r in plain]
    shortest, middle, longest = (dict(r.stats.widths) for r in found)
    assert set(shortest) == {1}
    assert 2 in middle
    assert 4 not in middle
    assert set(longest) == {1, 2, 4}


def test_figures_as_vllm_defines_and_prints_them(capsys):
    """Per round with a draft, where tau is per target forward; the log line is one that its readers parse."""
    stats = Stats(
        num_tokens=41,
        round_tokens=40,
        target_forwards=20,
        num_drafts=10,
        num_draft_tokens=30,
        num_accepted_tokens=18,
        accepted_at=(9, 6, 3),
        reached_at=(10, 9, 6),
        seconds=4.0,
    )
    told = stats.vllm
    assert told["mean_acceptance_length"] == pytest.approx(2.8)
    assert sum(told["per_position_acceptance_rate"]) == pytest.approx(told["mean_acceptance_length"] - 1)
    assert stats.to_json()["vllm"] == told
    show.print_vllm([("it", stats.to_json()), ("ar", Stats().to_json())])
    said = " ".join(capsys.readouterr().err.split())
    assert said == (
        "it: SpecDecoding metrics: Mean acceptance length: 2.80, Accepted throughput: 4.50 tokens/s, "
        "Drafted throughput: 7.50 tokens/s, Accepted: 18 tokens, Drafted: 30 tokens, "
        "Per-position acceptance rate: 0.900, 0.600, 0.300, Avg Draft acceptance rate: 60.0%"
    )
    assert re.search(r"Per-position acceptance rate:\s*([0-9.,\s]+?)(?:,\s*Avg|$)", said)
