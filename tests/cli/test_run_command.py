"""The first words and the last ones: help, versions, slips of the pen, what may go wrong around a command."""

import dataclasses
import errno
import os
import shutil
import signal
import subprocess
import sys
import warnings

import jax
import pytest
from jax.errors import JaxRuntimeError as DeviceError

import eaglejax as ej
from eaglejax.cli import compiling
from eaglejax.cli.main import COMMANDS, main
from eaglejax.cli.run import run_command
from kernels_pallas import native


@pytest.mark.parametrize(
    ("argv", "status", "words"),
    [
        (["--help"], 0, ["usage: eaglejax COMMAND", *COMMANDS]),
        (["-h"], 0, ["usage: eaglejax COMMAND"]),
        (["--version"], 0, [f"eaglejax {ej.__version__}"]),
        ([], 2, ["usage: eaglejax COMMAND"]),
        (["genrate"], 2, ["error: 'genrate' is no command; did you mean generate?"]),
        (["Bench"], 2, ["did you mean bench?"]),
        (["xyzzy"], 2, ["'xyzzy' is no command; commands are demo, generate"]),
        (["--json"], 2, ["'--json' is no command"]),
        (["caf\u00e9\ud800"], 2, ["'caf\\xe9\\ud800' is no command"]),
    ],
)
def test_the_first_word(capfd, argv, status, words):
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == status
    out, err = capfd.readouterr()
    assert all(word in (err if status else out) for word in words)
    assert (out if status else err) == ""


ABSENT = "./no/such/model"
GENERATE = ["generate", "--target", ABSENT, "--prompt", "x"]
RUNS = [["train"], ["features", "--out", "O"], ["sweep", "--grid", "draft.num_layers=[1]"]]
BAD_RUNS = ["absent.toml", "bad.toml", ".", "key.toml", "section.toml"]
BAD_CHANGES = [
    *("run.no_such_key=1", "run.updates=many", "run.updates=0", "objective.steps=1000", "objective.loss=mse"),
    *(
        "no_equals_sign",
        "draft.start=./no/such/draft",
        "data.train=[{path='absent.jsonl'}]",
        "target_dtype=int3",
    ),
    *(f"target={ABSENT}", "target_quant=w3a3", "data.decontaminate=['absent.jsonl']"),
]
BEFORE_JAX = [
    ["--help"],
    ["--version"],
    ["genrate"],
    *([name, "--help"] for name in COMMANDS),
    *([name, "--no-such-option"] for name in COMMANDS),
    ["demo", "extra"],
    GENERATE,
    [*GENERATE, "--method", "magic"],
    [*GENERATE, "--method", "eagle3"],
    [*GENERATE, "--method", "eagle", "--draft", ABSENT],
    [*GENERATE, "--draft", ABSENT],
    [*GENERATE, "--temperature", "-1"],
    [*GENERATE, "--dtype", "int3"],
    [*GENERATE, "--quant", "w3a3"],
    [*GENERATE, "--kv-cache-dtype", "int5"],
    [*GENERATE, "--draft-kv-cache-dtype", "int5", "--method", "draft_model", "--draft", ABSENT],
    [*GENERATE, "--speculation", "sometimes"],
    [
        *GENERATE,
        "--speculative-config",
        '{"method": "eagle", "speculative_token_tree": [[1, 0]], "model": "D"}',
    ],
    ["bench", "--target", ABSENT, "--prompts", "absent.jsonl"],
    ["bench", "--target", ABSENT, "--prompts", "PROMPTS"],
    ["bench", "--target", ABSENT, "--prompts", "PROMPTS", "--methods", "ar,magic"],
    ["inspect", ABSENT],
    ["inspect", "demo", "--target", ABSENT],
    ["convert", "demo", "--to", "sglng", "--output", "O"],
    ["convert", ABSENT, "--to", "sglang", "--output", "O"],
    ["convert", "demo", "--to", "sglang", "--output", "O", "--target", ABSENT],
    ["quantize", "--model-path", ABSENT, "--output-path", "O", "--quant-type", "w3"],
    ["quantize", "--model-path", ABSENT, "--output-path", "O", "--quant-type", "w8a8"],
    ["quantize", "--model-path", ABSENT, "--output-path", "O", "--quant-type", "w8a8", "--dtype", "int3"],
    ["align", "--draft", "demo", "--target", ABSENT, "--out", "O"],
    ["align", "--draft", "demo", "--target", ABSENT, "--out", "O", "--form", "sglng"],
    ["align", "--draft", "demo", "--target", ABSENT, "--out", "O", "--method", "procrustes"],
    ["diagnose", "--target", ABSENT, "--draft", "demo"],
    ["diagnose", "--target", ABSENT, "--draft", "demo", "--max-new-tokens", "1"],
    ["diagnose", "--target", ABSENT, "--draft", "demo", "--prompts", "absent.jsonl"],
    ["regenerate", "--target", ABSENT, "--prompts", "PROMPTS", "--out", "O"],
    ["regenerate", "--target", ABSENT, "--prompts", "PROMPTS", "--out", "O", "--top-p", "0"],
    ["features"],
    ["train"],
    ["sweep"],
    *([name, "--config", file, *more] for name, *more in RUNS for file in BAD_RUNS),
    *([name, "--config", "run.toml", *more, change] for name, *more in RUNS for change in BAD_CHANGES),
    ["sweep", "--config", "run.toml", "--grid", "run.updates=7"],
    ["sweep", "--config", "run.toml", "--grid", "target=['a', 'b']"],
    ["sweep", "--config", "run.toml", "--grid", "draft.no_such_key=[1]"],
    ["parity"],
    ["parity", "--target", ABSENT, "--draft", "demo", "--prompts", "PROMPTS", "--backend", "torch-cpu"],
    ["parity", "--target", ABSENT, "--draft", "demo", "--prompts", "absent.jsonl", "--record", "O"],
    ["doctor", "--target", ABSENT],
]


def test_help_and_refusals_do_not_wait_for_jax(tmp_path):
    """Every command, in one process: what one of them imports would be found behind the next."""
    (tmp_path / "PROMPTS").write_text('{"prompt": "x"}\n', encoding="utf-8")
    run = f'target = "{ABSENT}"\nout = "O"\ndata.train = [{{ path = "PROMPTS" }}]\nrun.decode_prompts = 1\n'
    (tmp_path / "run.toml").write_text(run, encoding="utf-8")
    (tmp_path / "bad.toml").write_bytes(b"out = \xff")
    (tmp_path / "key.toml").write_text(f"{run}draft.layers = 1\n", encoding="utf-8")
    (tmp_path / "section.toml").write_text(f"{run}[trainer]\nupdates = 1\n", encoding="utf-8")
    code = (
        "import sys; from eaglejax.cli.main import main\n"
        f"for argv in {BEFORE_JAX!r}:\n"
        "    try:\n        status = main(argv)\n"
        "    except SystemExit as stop:\n        status = stop.code\n"
        "    heavy = {'jax', 'torch', 'transformers', 'gguf', 'jinja2'} & set(sys.modules)\n"
        "    expected = 0 if {'--help', '--version'} & set(argv) else 2\n"
        "    if heavy or status != expected:\n"
        "        sys.exit(f'{argv}: status {status}, {heavy} imported')\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert child.returncode == 0, child.stderr
    assert not (tmp_path / "O").exists()


def test_every_name_of_the_package_is_found():
    for name in ej.__all__:
        assert getattr(ej, name).__name__ == name or callable(getattr(ej, name))
    assert set(ej.__all__) <= set(dir(ej))
    assert ej.sampling.Sampling is ej.Sampling
    with pytest.raises(AttributeError, match="no attribute 'magic'"):
        _ = ej.magic


@dataclasses.dataclass(frozen=True)
class Failing:
    """A command that fails."""

    def run(self):
        raise self.error


def failing(error):
    return type("Failing", (Failing,), {"error": error})


ERRORS = [
    (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/out/draft"), "No space left on device: /out/draft"),
    (PermissionError(errno.EROFS, os.strerror(errno.EROFS)), "Read-only file system"),
    (MemoryError(), "too little memory"),
    (
        DeviceError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore"),
        "device has too",
    ),
    (DeviceError("INTERNAL: failed\nlong story"), "the device failed: INTERNAL: failed"),
    (
        RuntimeError("Unable to initialize backend 'magic': no such plugin\nx"),
        "'magic': no such plugin; unset",
    ),
    (ej.EaglejaxError("refused"), "refused"),
]


@pytest.mark.parametrize(("error", "words"), ERRORS, ids=[words for _, words in ERRORS])
def test_what_may_go_wrong_is_said_in_a_line(capfd, error, words):
    assert run_command(failing(error), []) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert words in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("EAGLEJAX_NO_NATIVE", "yes", "it is 1 (on), or 0 or empty (off)"),
        ("EAGLEJAX_NO_XLA_FLAGS", "true", "it is 1 (on), or 0 or empty (off)"),
        ("EAGLEJAX_NO_COMPILE_CACHE", "2", "it is 1 (on), or 0 or empty (off)"),
        ("EAGLEJAX_NATIVE_LEVEL", "avx513", "it is one of avx512-bf16"),
    ],
)
def test_values_of_the_environment_that_mean_nothing(capfd, monkeypatch, name, value, right):
    monkeypatch.setenv(name, value)
    assert run_command(failing(AssertionError("it ran")), []) == 2
    err = capfd.readouterr().err
    assert err.startswith(f"error: {name} is '{value}'; {right}")
    monkeypatch.setenv(name, "")
    assert run_command(failing(ej.EaglejaxError("it ran")), []) == 2


def test_a_platform_that_is_not_there(monkeypatch):
    code = "import sys, jax; from eaglejax.cli.main import main; sys.exit(main(['doctor']))"
    environ = os.environ | {"JAX_PLATFORMS": "magic"}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False
    )
    assert child.returncode == 2, child.stderr
    assert child.stderr.splitlines()[-1].startswith(
        "error: JAX_PLATFORMS=magic: Unable to initialize backend"
    )


def test_a_fault_of_ours_keeps_its_traceback():
    for error in (RuntimeError("a bug"), KeyError("a bug"), OSError("a bug")):
        with pytest.raises(type(error), match="a bug"):
            run_command(failing(error), [])


def test_an_interruption_at_any_moment(capfd):
    def importing():
        raise KeyboardInterrupt

    for kind in (importing, failing(KeyboardInterrupt())):
        assert run_command(kind, []) == 130
        assert capfd.readouterr().err == "error: interrupted\n"


def test_a_warning_is_a_line(capfd):
    @dataclasses.dataclass(frozen=True)
    class Warning_:
        """A command that warns."""

        def run(self):
            warnings.warn("strays lie [here]", stacklevel=1)
            return 0

    assert run_command(Warning_, []) == 0
    assert capfd.readouterr().err == "warning: strays lie [here]\n"


COMMAND = """
import dataclasses, signal, sys, time
# What runs in the background of a shell is started deaf to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from eaglejax.cli import show
from eaglejax.cli.run import run_command

@dataclasses.dataclass(frozen=True)
class Slow:
    "Writes for ever, or waits."
    def run(self):
        show.print_note("ready")
        while True:
            {body}

sys.exit(run_command(Slow, [], own_process=True))
"""


def test_a_reader_that_has_enough_and_ctrl_c_in_a_process_of_its_own():
    def start(body):
        code = COMMAND.format(body=body)
        return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with start("show.print_json({'a': 1})") as child:
        assert child.stdout.readline() == b'{"a": 1}\n'
        child.stdout.close()
        assert child.stderr.read() == b"ready\n"
    assert child.returncode == 141
    with start("time.sleep(1)") as child:
        assert child.stderr.readline() == b"ready\n"
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == b"error: interrupted\n"
    assert child.returncode == 130


def test_a_full_disk_leaves_what_was_there(model, tmp_path, monkeypatch, run):
    out = tmp_path / "made"

    def full(*args, **options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(out))

    monkeypatch.setattr("eaglejax.checkpoint.quantized.write.write_safetensors", full)
    status, _, err = run("quantize", "--target", model, "--save-path", out, "--quant-type", "w8a8")
    assert (status, err.splitlines()[-1]) == (2, f"error: No space left on device: {out}")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(model, tmp_path, run):
    if os.geteuid() == 0:
        (tmp_path / "closed").write_text("no folder")
    else:
        (tmp_path / "closed").mkdir(mode=0o500)
    out = tmp_path / "closed" / "made"
    status, _, err = run("quantize", "--target", model, "--save-path", out, "--quant-type", "w8a8")
    assert status == 2
    assert err.splitlines()[-1].startswith("error: ")
    assert "closed" in err.splitlines()[-1]


class TestRoom:
    """What takes more memory or disk than there is is refused before it is allocated."""

    @pytest.fixture(autouse=True)
    def little(self, monkeypatch):
        monkeypatch.setattr("eaglejax.models.memory.ALWAYS_FREE", 0)
        monkeypatch.setattr("eaglejax.devices.machine.free_bytes", lambda: 1000)

    @pytest.mark.parametrize("words", [["generate", "--prompt", "x"], ["bench", "--prompts"], ["quantize"]])
    def test_weights(self, words, model, tmp_path, run, rows_file):
        words = {
            "bench": [*words, rows_file({"prompt": "x"})],
            "quantize": [*words, "--save-path", tmp_path / "out", "--quant-type", "w8a8"],
        }.get(words[0], words)
        status, out, err = run(*words, "--target", model)
        assert (status, out) == (2, "")
        assert f"the model in {model} takes about 0.00 GiB, and 0.00 GiB of memory are free; take a" in err


def test_a_batch_that_memory_has_no_room_for(model, monkeypatch):
    target = ej.load_target(model)
    huge = dataclasses.replace(target, config=dataclasses.replace(target.config, max_position=1 << 30))
    huge = dataclasses.replace(huge, context=1 << 30)
    with pytest.raises(ej.EaglejaxError, match=r"decoding 1 row of .* GiB of memory are free; take"):
        ej.generate(huge, "x", max_new_tokens=1 << 29)
    monkeypatch.setattr("eaglejax.models.memory.ALWAYS_FREE", 0)
    monkeypatch.setattr("eaglejax.devices.machine.free_bytes", lambda: 1000)
    with pytest.raises(ej.EaglejaxError, match="decoding 2 rows of 32 tokens, weights apart, takes about"):
        ej.generate(target, ["x", "y"], max_new_tokens=4, proposer=ej.NGram(length=3))


def test_a_disk_that_has_no_room(model, run, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage)
    out = tmp_path / "out"
    status, _, err = run("quantize", "--target", model, "--save-path", out, "--quant-type", "w8a8")
    assert status == 2
    assert f"takes about 0.00 GiB, and 0.00 GiB are free where {out} is to be" in err
    assert not out.exists()


def test_what_was_compiled_is_said_in_a_line(capfd, monkeypatch):
    compiled = compiling.watch()
    compiling.begin()
    for event in (compiling.REQUEST, compiling.HIT):
        compiled.on_event(event)
    compiled.on_duration(compiling.DONE, 7.0)
    assert (compiled.programs, compiled.found) == (0, False)
    compiling.begin()
    monkeypatch.setattr(native, "COMPILE_SECONDS", [2.0, 3.0])
    for _ in range(3):
        compiled.on_event(compiling.REQUEST)
        compiled.on_duration(compiling.DONE, 0.5)
        compiled.on_duration("another", 0.5)
    compiling.tell()
    assert "compiled 3 programs and 2 kernels for this machine in 6.5 s" in capfd.readouterr().err
    compiled.on_duration(compiling.DONE, 0.5)
    compiling.tell()
    compiling.tell()
    assert capfd.readouterr().err == ""


def test_a_command_tells_of_its_own_programs_alone(capfd, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Compiling:
        """A command that compiles."""

        def run(self):
            compiling.watch().on_event(compiling.REQUEST)
            compiling.watch().on_duration(compiling.DONE, 2.0)
            return 0

    monkeypatch.setattr(native, "COMPILE_SECONDS", [50.0])
    compiling.watch().on_event(compiling.REQUEST)
    compiling.watch().on_duration(compiling.DONE, 60.0)
    assert run_command(Compiling, []) == 0
    assert "compiled 1 program for this machine in 2.0 s" in capfd.readouterr().err


def test_programs_that_jax_compiles_are_counted():
    compiled = compiling.watch()
    before = compiled.programs
    jax.jit(lambda x: x * 31 + os.getpid())(1.0).block_until_ready()
    assert compiled.programs == before + 1
