"""Compiling on first use: kept, keyed by what went into it, and refused with a reason."""

import os
import stat

import pytest

from kernels_pallas import KernelError, foreign, native
from kernels_pallas.quant_matmul import cpu

SOURCE = 'extern "C" int answer() { return 41; }\n'


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "answer.cc"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def environ(tmp_path):
    return {"PATH": os.environ["PATH"], native.HOME_VARIABLE: str(tmp_path / "home")}


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.skipif(cpu.KERNEL.status()[0] is None, reason="no C++ compiler")
def test_a_source_is_compiled_once_and_again_when_it_changes(source, environ, monkeypatch):
    first = native.load(source, "portable", environ)
    assert first.handle.answer() == 41
    compiled = []
    monkeypatch.setattr(native, "_compile", lambda *a: compiled.append(a))
    assert native.load(source, "portable", environ).path == first.path
    assert not compiled
    monkeypatch.undo()
    source.write_text(SOURCE.replace("41", "42"))
    second = native.load(source, "portable", environ)
    assert second.handle.answer() == 42
    assert second.key != first.key
    folder = native.home(environ) / "native"
    assert sorted(folder.iterdir()) == sorted([first.path, second.path])


def test_what_cannot_be_compiled_is_refused_with_the_reason(source, environ, tmp_path):
    with pytest.raises(KernelError, match=r"there is no C\+\+ compiler: g\+\+ is not on the path"):
        native.load(source, "portable", environ | {"PATH": str(tmp_path)})
    with pytest.raises(KernelError, match="turned off by EAGLEJAX_NO_NATIVE"):
        native.level_here({native.OFF_VARIABLE: "1"})
    broken = script(tmp_path / "broken", '[ "$1" = --version ] && exit 0; echo "no such header" >&2; exit 1')
    with pytest.raises(KernelError, match=r"could not compile answer.cc[^\n]*no such header"):
        native.load(source, "portable", environ | {"CXX": broken})
    assert list((native.home(environ) / "native").iterdir()) == []
    mute = script(tmp_path / "mute", "exit 3")
    with pytest.raises(KernelError, match="does not run"):
        native.load(source, "portable", environ | {"CXX": mute})
    (tmp_path / "file").write_text("")
    with pytest.raises(KernelError, match="cannot be written"):
        native.load(
            source, "portable", environ | {native.HOME_VARIABLE: str(tmp_path / "file"), "CXX": broken}
        )


def test_a_damaged_library_names_itself(source, environ, tmp_path):
    writes = script(tmp_path / "cxx", '[ "$1" = --version ] && exit 0; for o; do :; done; echo junk > "$o"')
    with pytest.raises(KernelError, match=r"answer-portable-\w+\.so cannot be loaded .* delete it"):
        native.load(source, "portable", environ | {"CXX": writes})


def test_levels_follow_the_processor(monkeypatch):
    monkeypatch.setattr(native, "processor_features", lambda: frozenset({"avx2", "fma", "f16c", "avx512f"}))
    assert native.levels_here() == ("avx2", "portable")
    monkeypatch.setattr(native, "processor_features", frozenset)
    assert native.levels_here() == ("portable",)


@pytest.mark.skipif(cpu.KERNEL.status()[0] is None, reason="no C++ compiler")
def test_a_kernel_made_again_in_another_folder_is_the_one_that_is_known(tmp_path, monkeypatch):
    symbol = cpu.KERNEL.symbols[0]
    known = cpu.KERNEL.target(symbol)
    monkeypatch.setenv(native.HOME_VARIABLE, str(tmp_path))
    foreign._made.cache_clear()
    assert cpu.KERNEL.target(symbol) == known
    assert list(native.home(os.environ).glob(f"native/{cpu.KERNEL.source.stem}-*.so"))
