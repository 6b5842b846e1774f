"""The first words and the last ones: help, versions, slips of the pen, what may go wrong around a command."""

import dataclasses
import errno
import os
import signal
import subprocess
import sys
import warnings

import pytest
from jax.errors import JaxRuntimeError as DeviceError

import eaglejax as ej
from eaglejax.cli.main import COMMANDS, main
from eaglejax.cli.run import run_command


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


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["genrate"],
        ["generate", "--help"],
        ["generate", "--target", "T"],
        ["generate", "--target", "T", "--prompt", "x", "--temperature", "-1"],
        ["bench", "--target", "T", "--prompts", "absent.jsonl"],
        ["regenerate", "--turns"],
        ["train"],
        ["sweep"],
        ["features"],
    ],
)
def test_help_and_refusals_do_not_wait_for_jax(argv):
    code = (
        "import sys; from eaglejax.cli.main import main\n"
        f"try:\n    main({argv!r})\nexcept SystemExit:\n    pass\n"
        "heavy = {'jax', 'torch', 'transformers', 'gguf', 'jinja2'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} imported' if heavy else 0)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


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
