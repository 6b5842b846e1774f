"""What is set before jax starts, and that the user's word stands above it."""

import dataclasses
import json
import os
import subprocess
import sys

import pytest
from tiny_model import write_model

from eaglejax import devices
from eaglejax.cli import doctor
from eaglejax.devices import compile_cache, cpu_flags
from eaglejax.models.memory import footprint_on
from eaglejax.speculate import costs

OURS = [f"{name}={value}" for name, value in cpu_flags.FLAGS.items()]
FIRST, SECOND = cpu_flags.FLAGS


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch):
    monkeypatch.setattr(cpu_flags, "accelerator_present", lambda: False)


@pytest.mark.parametrize(
    ("environ", "after"),
    [
        ({}, OURS),
        ({"JAX_PLATFORMS": "cpu"}, OURS),
        ({"XLA_FLAGS": "--xla_dump_to=/x"}, ["--xla_dump_to=/x", *OURS]),
        ({"XLA_FLAGS": f"{FIRST}=none"}, [f"{FIRST}=none", OURS[1]]),
        ({"XLA_FLAGS": f"{SECOND}=A {FIRST}=none"}, [f"{SECOND}=A", f"{FIRST}=none"]),
        ({"JAX_PLATFORMS": "cuda,cpu"}, []),
        ({cpu_flags.OFF_VARIABLE: "1", "XLA_FLAGS": "--xla_dump_to=/x"}, ["--xla_dump_to=/x"]),
        ({cpu_flags.OFF_VARIABLE: "0"}, OURS),
    ],
)
def test_flags_that_are_set(environ, after):
    report = cpu_flags.set_flags(environ, started=False)
    assert environ.get("XLA_FLAGS", "").split() == after
    assert set(report.in_force) == {word for word in after if word.split("=")[0] in cpu_flags.FLAGS}


def test_flags_come_too_late_once_jax_has_started(caplog):
    environ = {}
    report = cpu_flags.set_flags(environ, started=True)
    assert environ == {}
    assert report.in_force == ()
    assert "already started" in report.reason
    assert "import eaglejax before" in caplog.text


def test_an_accelerator_is_left_alone(monkeypatch):
    monkeypatch.setattr(cpu_flags, "accelerator_present", lambda: True)
    environ = {}
    assert "accelerator" in cpu_flags.set_flags(environ, started=False).reason
    assert environ == {}
    environ = {"JAX_PLATFORMS": "cpu"}
    assert cpu_flags.set_flags(environ, started=False).in_force == tuple(OURS)


def test_an_unknown_jaxlib_is_asked_once(tmp_path, monkeypatch):
    environ = {"EAGLEJAX_CACHE": str(tmp_path / "home")}
    asked = []

    def probe(flags):
        asked.append(flags)
        return False

    assert [cpu_flags.understands("9.9", OURS, environ, probe) for _ in range(2)] == [False, False]
    assert asked == [OURS]
    assert not cpu_flags.understands("9.9", OURS[:1], environ, probe)
    assert asked == [OURS, OURS[:1]]
    memory = next((tmp_path / "home").glob("*9.9*"))
    memory.write_text("damaged")
    assert not cpu_flags.understands("9.9", OURS, environ, probe)
    assert json.loads(memory.read_text()) == {" ".join(OURS): False}

    monkeypatch.setattr(cpu_flags, "KNOWN_JAXLIB", ())
    monkeypatch.setattr(cpu_flags, "_starts_with", lambda flags: False)
    report = cpu_flags.set_flags(environ, started=False)
    assert "does not understand" in report.reason
    assert "XLA_FLAGS" not in environ


def test_the_probe_tells_flags_apart():
    assert cpu_flags._starts_with(OURS)
    assert not cpu_flags._starts_with(["--xla_of_no_release=1"])


def test_the_compilation_cache(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    environ = {compile_cache.HOME_VARIABLE: str(tmp_path / "home")}
    report = compile_cache.enable(environ, started=False)
    assert report.folder == environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / "home" / "jax")
    assert (tmp_path / "home" / "jax").is_dir()
    assert float(environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]) < 0.1

    environ = {compile_cache.OFF_VARIABLE: "1"}
    assert compile_cache.enable(environ, started=False).folder is None
    assert set(environ) == {compile_cache.OFF_VARIABLE}

    environ = {"JAX_COMPILATION_CACHE_DIR": "/mine"}
    assert compile_cache.enable(environ, started=False).folder == "/mine"
    assert set(environ) == {"JAX_COMPILATION_CACHE_DIR"}

    (tmp_path / "file").write_text("")
    environ = {compile_cache.HOME_VARIABLE: str(tmp_path / "file")}
    assert "cannot be made" in compile_cache.enable(environ, started=False).reason
    assert "JAX_COMPILATION_CACHE_DIR" not in environ


LATE = """
import jax
jax.devices()
import eaglejax
print(eaglejax.devices.prepare().cpu_flags.reason)
"""
EARLY = """
import os, eaglejax, jax
print(sorted(os.environ["XLA_FLAGS"].split()), jax.config.jax_compilation_cache_dir)
"""


@pytest.mark.parametrize("code", [LATE, EARLY])
def test_importing_the_package_prepares_jax(code, tmp_path):
    environ = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
    environ |= {"EAGLEJAX_CACHE": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True
    )
    if code is LATE:
        assert child.stdout.startswith("could not be set")
    else:
        assert child.stdout.strip() == f"{sorted(OURS)} {tmp_path / 'jax'}"


def test_doctor(run, tmp_path):
    status, out, _ = run("doctor", "--target", write_model(tmp_path / "model"), "--json")
    report = json.loads(out)
    assert status == 0
    assert report["self_test"]["passed"] is True
    assert report["self_test"]["accepted_drafts"] > 0
    assert report["adapter"]["name"] == "cpu"
    times = report["adapter"]["product_ms"]
    assert set(times) == {"bfloat16", "float32"}
    widest = {name: max(ms.items(), key=lambda kv: int(kv[0]))[1] for name, ms in times.items()}
    assert report["adapter"]["fastest_dtype"] == min(widest, key=widest.get)
    wide = report["bfloat16_products"]
    assert (wide["implementation"] == "cpu") is (wide["level"] is not None) is (wide["most_rows"] > 0)
    packed = report["packed_products"]
    assert (packed["implementation"] == "cpu") is (packed["level"] is not None)
    assert set(packed["milliseconds"]) == {"1", "8"}
    for how in report["cache_operations"].values():
        assert (how["implementation"] == "cpu") is (how["level"] is not None)
    assert isinstance(report["speculation_costs"], list)
    takes = report["memory"]
    assert takes["refused"] is None
    assert takes["rows"] > 1
    assert takes["longest_row"] == takes["context"] > 0


def test_doctor_says_what_rounds_cost(run, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLEJAX_CACHE", str(tmp_path))
    assert costs.stored() == []
    assert doctor._costs({"speculation_costs": []})[0].startswith("none measured yet")
    kind = {"machine": costs._here(), "model": "qwen2", "parameters": 494_000_000, "dtype": "bfloat16"}
    kind |= {"draft": "Eagle", "nodes": 8, "batch": 1, "capacity": 512, "cache": "bfloat16"}
    now = costs.CLOCK.now()
    found = costs.Costs((1, 4), (0.05, 0.06, 0.08), 1.04, now, costs.folder() / "a.json")
    costs._write(found, kind)
    elsewhere = dataclasses.replace(found, file=found.file.with_name("b.json"))
    costs._write(elsewhere, kind | {"machine": "another"})
    rows = costs.stored()
    assert sorted(row["here"] for row in rows) == [False, True]
    line, others = doctor._costs({"speculation_costs": rows})
    assert "qwen2 of 494 M parameters in bfloat16, Eagle of 8 nodes, 1 x 512 slots in bfloat16" in line
    assert "plain 50 ms; with a draft, by width, 1: 60, 4: 80; they scatter by 4%" in line
    assert others == "and 1 more, older or of other machines and settings"


def test_doctor_says_what_does_not_fit():
    here = devices.current()
    small = dataclasses.replace(here, memory_bytes=1000)
    takes = doctor.memory(doctor.tiny_config(), small)
    assert (takes["rows"], takes["longest_row"]) == (0, 0)
    assert "the weights take" in takes["refused"]
    weights = footprint_on(here, doctor.tiny_config()).weights
    takes = doctor.memory(doctor.tiny_config(), dataclasses.replace(here, memory_bytes=weights + 1000))
    assert (takes["rows"], takes["longest_row"], takes["refused"]) == (0, 0, None)


def test_doctor_says_why_there_is_no_native_kernel(run, monkeypatch):
    monkeypatch.setenv("EAGLEJAX_NO_NATIVE", "1")
    status, out, err = run("doctor")
    assert (status, out) == (0, "")
    assert "self-test" in err
    assert " ".join(err.split()).count("XLA, no C++ kernel: turned off by EAGLEJAX_NO_NATIVE") == 4
