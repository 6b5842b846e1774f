"""Options that cannot be are refused by name: status 2, one message, no traceback, nothing on stdout."""

import subprocess
import sys

import pytest

from eaglejax.cli.main import main

NGRAM = '{"method": "ngram"}'
GENERATE = ["generate", "--target", "no/model", "--prompt", "x"]
FILE = ["generate", "--target", "no/model", "--prompts", "ROWS"]
LONG_CHAIN = '{"method": "draft_model", "num_speculative_tokens": 2000}'
BENCH = ["bench", "--target", "no/model", "--prompts", "ROWS"]

REFUSED = [
    (["generate", "--target", "T"], "--prompt TEXT and --prompts FILE"),
    ([*GENERATE, "--prompts", "ROWS"], "give one of"),
    ([*GENERATE, "--method", "magic"], "method 'magic' is not known; methods are ar, ngram"),
    ([*GENERATE, "--method", "cascade"], "'cascade' needs 'parts', a list of the configs of two"),
    (
        [*GENERATE, "--speculative-config", '{"method": "cascade", "parts": [{"method": "ngram"}]}'],
        "two methods or more",
    ),
    (
        [
            *(*GENERATE, "--speculative-config"),
            '{"method": "cascade", "parts": [{"method": "ngram"}, {"method": "ar"}]}',
        ],
        "'ar' cannot be a part of a cascade",
    ),
    (
        [*GENERATE, "--speculative-config", '{"method": "cascade", "parts": [{"method": "ngram", "x": 1}]}'],
        "unknown key 'x'",
    ),
    ([*GENERATE, "--method", "draft_model"], "needs a draft; name one with --draft"),
    ([*GENERATE, "--method", "EAGLE-3"], "method 'eagle3' needs a draft"),
    ([*GENERATE, "--method", "AR", "--speculative-config", NGRAM], "--method says 'ar'"),
    ([*GENERATE, "--speculative-config", '{"method": "Draft-Model"}'], "method 'draft_model' needs a draft"),
    ([*GENERATE, "--logprobs"], "--logprobs are printed in the objects of --json"),
    ([*GENERATE, "--logit-bias", "[1]"], "--logit-bias is an object"),
    ([*GENERATE, "--logit-bias", '{"a": 1}'], "--logit-bias is an object"),
    ([*GENERATE, "--logit-bias", '{"1": "x"}'], "logit_bias[1]='x' cannot be"),
    ([*GENERATE, "--logit-bias", "{"], "--logit-bias: not valid JSON"),
    ([*GENERATE, "--repetition-penalty", "0"], "repetition_penalty=0.0 cannot be"),
    ([*GENERATE, "--presence-penalty", "1e38"], "presence_penalty=1e+38 cannot be"),
    ([*GENERATE, "--chat-template-kwargs", "[1]"], "chat_template_kwargs is an object"),
    ([*GENERATE, "--chat-template-kwargs", '{"messages": []}'], "which is no variable"),
    ([*GENERATE, "--system", "S"], "a system message beside a plain prompt means nothing"),
    (
        [*GENERATE, "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 600}'],
        "num_speculative_tokens is 600; it must be an integer from 1 to 128",
    ),
    (
        [*GENERATE, "--speculative-config", '{"method": "ngram", "prompt_lookup_max": 600}'],
        "prompt_lookup_max is 600; it must be an integer from 1 to 64",
    ),
    (
        [*GENERATE, "--draft", "D", "--speculative-config", '{"method": "eagle", "tree_nodes": 99999}'],
        "tree nodes, which counts the root, is 99999",
    ),
    (
        [*GENERATE, "--draft", "D", "--speculative-config", '{"method": "eagle3", "tree_depth": 2147483648}'],
        "tree depth is 2147483648; it must be an integer from 1 to 128",
    ),
    (
        [*GENERATE, "--draft", "D", "--speculative-config", LONG_CHAIN],
        "num_speculative_tokens is 2000; it must be",
    ),
    ([*GENERATE, "--method", "ngram", "--draft", "D"], "'ngram' uses no draft, but 'D'"),
    ([*GENERATE, "--method", "ar", "--speculative-config", NGRAM], "--method says 'ar'"),
    (
        [*GENERATE, "--draft", "D", "--speculative-config", '{"method": "draft_model", "model": "E"}'],
        "--draft says 'D'",
    ),
    (
        [*GENERATE, "--speculative-config", '{"method": "prediction", "prompt_lookup_max": 3}'],
        "'prediction' has no setting 'prompt_lookup_max'; it has num_speculative_tokens",
    ),
    ([*GENERATE, "--speculative-config", '{"methods": "ngram"}'], "unknown key 'methods'"),
    ([*GENERATE, "--method", "prediction"], "--prediction-field"),
    ([*GENERATE, "--method", "prediction", "--prediction-field", "p"], "a field of the file"),
    ([*FILE, "--prediction-field", "p"], "'ar' does not use predictions"),
    ([*GENERATE, "--temperature", "-1"], "temperature=-1.0"),
    ([*GENERATE, "--temperature", "nan"], "temperature=nan"),
    ([*GENERATE, "--top-p", "0"], "top_p=0.0"),
    ([*GENERATE, "--top-k", "-2"], "top_k=-2"),
    ([*GENERATE, "--seed", "-1"], "seed=-1"),
    ([*GENERATE, "--max-new-tokens", "0"], "--max-new-tokens is 0"),
    ([*GENERATE, "--batch-size", "0"], "--batch-size is 0"),
    ([*GENERATE, "--dtype", "int3"], "int3"),
    (["generate", "--target", "./absent", "--prompt", "x"], "'./absent' names no model"),
    (["generate", "--target", "T", "--prompts", "ABSENT"], "cannot be read"),
    ([*BENCH, "--methods", "ar,magic"], "'magic' is not known"),
    ([*BENCH, "--methods", "ngram,ngram"], "names 'ngram' twice"),
    ([*BENCH, "--methods", "ngram,N-Gram"], "names 'ngram' twice"),
    ([*BENCH, "--methods", "ar,prediction"], "--prediction-field go together"),
    ([*BENCH, "--prediction-field", "p"], "--prediction-field go together"),
    ([*BENCH, "--methods", "ngram", "--draft", "D"], "--draft is 'D'"),
    ([*BENCH, "--methods", "draft_model"], "needs a draft"),
    ([*BENCH, "--max-new-tokens", "0"], "--max-new-tokens is 0"),
    ([*BENCH, "--limit", "0"], "limit is 0"),
    ([*BENCH, "--speculative-config", '{"method": "eagle"}', "--methods", "ar,ngram"], "not among ar, ngram"),
    ([*BENCH, "--speculative-config", '{"method": "eagle", "model": "E"}'], "use --draft for it"),
    ([*BENCH, "--aux-convention", "block"], "none of the methods ngram reads layers"),
    ([*GENERATE, "--draft", "./absent"], "'./absent' names no model"),
    ([*GENERATE, "--method", "eagle"], "'eagle' needs a draft"),
    ([*GENERATE, "--aux-convention", "block"], "'ar' has no setting 'aux_convention'"),
    ([*GENERATE, "--speculative-config", '{"tree_nodes": 4}'], "'ar' has no setting 'tree_nodes'"),
]


@pytest.mark.parametrize(("argv", "reason"), REFUSED, ids=[reason for _, reason in REFUSED])
def test_refused(run, rows_file, argv, reason):
    places = {"ROWS": str(rows_file({"prompt": "x"})), "ABSENT": "absent.jsonl"}
    status, out, err = run(*[places.get(a, a) for a in argv])
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].startswith("error: ")
    assert reason in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["serve"],
        [*GENERATE, "--beam-width", "4"],
        [*GENERATE, "--max-new-tokens", "many"],
        ["generate", "--prompt", "x"],
        ["demo", "--fast"],
        ["bench", "--target", "T"],
        ["doctor", "extra"],
    ],
)
def test_what_is_no_option_is_refused(capfd, argv):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capfd.readouterr()
    assert stop.value.code == 2
    assert out == ""
    assert err


def test_a_refusal_in_a_process_of_its_own():
    child = subprocess.run(
        [
            sys.executable,
            "-m",
            "eaglejax.cli.main",
            "generate",
            "--target",
            "./absent",
            "--prompt",
            "x",
            "--json",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 2
    assert child.stdout == ""
    assert child.stderr.splitlines()[-1].startswith("error: ")
    assert "Traceback" not in child.stderr
