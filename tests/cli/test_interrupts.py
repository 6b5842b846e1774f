"""Ctrl-C at any moment of a command ends it with one line."""

import os
import signal
import subprocess
import sys
import time

import pytest

STARTED = """
import signal, sys
import eaglejax.cli.main as console
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv[1:] = {words!r}
print("started", file=sys.stderr, flush=True)
{before}
sys.exit(console.main())
"""
SLOW_IMPORTS = """
import importlib.abc, time
class Slow(importlib.abc.MetaPathFinder):
    # Each of these is long in the making, and catches what it can.
    def find_spec(self, name, path, target=None):
        if name in ("jax.numpy", "rich.progress"):
            print("importing", file=sys.stderr, flush=True)
            try:
                time.sleep(0.5)
            except BaseException:
                raise ImportError("half a module")
sys.meta_path.insert(0, Slow())
"""
DEAF = """
import threading
import eaglejax.cli.interrupts as interrupts
interrupts.PATIENCE = 0.2
lock = threading.Lock()
def compile_(*_, **__):
    print("compiling", file=sys.stderr, flush=True)
    # As a compiler does: nothing of Python runs in this thread before it is done.
    import ctypes
    ctypes.CDLL(None).sleep(60)
console._command = compile_
"""


@pytest.mark.parametrize(
    ("before", "word", "wait"),
    [
        ("", b"started", 0.02),
        ("", b"started", 0.4),
        (SLOW_IMPORTS, b"importing", 0.1),
        ("", b"memory: ", 0.1),
        (DEAF, b"compiling", 0.1),
    ],
    ids=["at once", "imports", "in an import", "compilation", "deaf compiler"],
)
def test_ctrl_c_in_imports_and_in_compilation(model, before, word, wait):
    words = [
        "generate",
        "--target",
        str(model),
        "--prompt",
        "a b c",
        "--max-new-tokens",
        "3",
        "--dtype",
        "float32",
    ]
    code = STARTED.format(words=words, before=before)
    environ = os.environ | {"EAGLEJAX_NO_COMPILE_CACHE": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    child = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=False)
    with child:
        while not (line := child.stderr.readline()).startswith(word):
            assert line, "it ended before"
        time.sleep(wait)
        child.send_signal(signal.SIGINT)
        rest = child.stderr.read().decode()
    assert (child.returncode, rest.splitlines()[-1]) == (130, "error: interrupted"), rest
    assert "Traceback" not in rest
    assert "Exception" not in rest
