"""A `.bin` is read without running it: whatever its pickle says, there are tensors or a named error."""

from __future__ import annotations

import collections
import io
import os
import random
import zipfile

import numpy as np
import pytest
import torch

from eaglejax.checkpoint.torch_bin import TorchBinFile
from eaglejax.errors import CheckpointError

STATE = collections.OrderedDict(
    a=torch.arange(12.0).reshape(3, 4).T,
    b=torch.ones(5, dtype=torch.bfloat16),
    c=torch.zeros((), dtype=torch.bool),
)
STATE._metadata = {"": {"version": 1}}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "pytorch_model.bin"


def saved(protocol: int = 2) -> bytes:
    out = io.BytesIO()
    torch.save(STATE, out, pickle_protocol=protocol)
    return out.getvalue()


def with_pickle(data: bytes, pickle: bytes) -> bytes:
    """The archive ``data`` with another pickle in it, checksums right."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for name in old.namelist():
            new.writestr(name, pickle if name.endswith("data.pkl") else old.read(name))
    return out.getvalue()


BOMB = b")q\x00" + b"h\x00h\x00\x86q\x00" * 40
"""A tuple that holds itself twice, forty times over."""


def tensor_pickle(size: bytes, offset: bytes, shape: bytes, strides: bytes) -> bytes:
    """A dict of one tensor, of these numbers as operations."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu" + size
    arguments = storage + b"tQ" + offset + shape + strides + b"\x89N"
    return b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(" + arguments + b"tRs."


HUGE = b"\x8a\x09" + (1 << 63).to_bytes(9, "little")
IMPOSSIBLE = {
    "more than a file can have": (b"K\x04", b"K\x00", b"K\x00" + HUGE + b"\x86", b"K\x01K\x01\x86"),
    "shape that is a text": (b"K\x04", b"K\x00", b"X\x01\x00\x00\x004\x85", b"K\x01\x85"),
    "shape that is no whole number": (b"K\x04", b"K\x00", b"G?\xf8" + bytes(6) + b"\x85", b"K\x01\x85"),
    "shape that is true": (b"K\x04", b"K\x00", b"\x88\x85", b"K\x01\x85"),
    "stride below 0": (b"K\x04", b"K\x00", b"K\x02\x85", b"J\xff\xff\xff\xff\x85"),
    "offset beyond the end": (b"K\x04", b"K\x09", b"K\x01\x85", b"K\x01\x85"),
    "one value many times over": (b"K\x04", b"K\x00", b"J\xff\xff\xff\x7f\x85", b"K\x00\x85"),
    "seventeen dimensions": (b"K\x04", b"K\x00", b"(" + b"K\x01" * 17 + b"t", b"(" + b"K\x01" * 17 + b"t"),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_a_tensor_has_the_shape_of_one(case, path):
    path.write_bytes(with_pickle(saved(), tensor_pickle(*IMPOSSIBLE[case])))
    with pytest.raises(CheckpointError, match=r"damaged|does not hold"):
        TorchBinFile([path])


def test_compressed_members_are_refused(path):
    with zipfile.ZipFile(io.BytesIO(saved())) as old, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    with pytest.raises(CheckpointError, match="is compressed"):
        TorchBinFile([path])


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_every_protocol_holds_the_same_tensors(protocol, path):
    path.write_bytes(saved(protocol))
    file = TorchBinFile([path])
    assert set(file.names()) == {"a", "b", "c"}
    np.testing.assert_array_equal(file.array("a"), STATE["a"].numpy())
    assert (file.dtype("b").name, file.shape("b"), file.shape("c")) == ("bfloat16", (5,), ())


@pytest.mark.parametrize(
    ("pickle", "text"),
    [
        (b"\x80\x02cos\nsystem\nX\x0c\x00\x00\x00touch danger\x85R.", r"os\.system.*not run"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x0ctouch danger\x85R.", r"os\.system.*not run"),
        (b"\x80\x02cbuiltins\neval\n.", r"builtins\.eval"),
        (b"\x80\x04\x8c\x0bcollections\x8c\x14OrderedDict.__init__\x93.", "OrderedDict.__init__"),
        # Attributes of one of the reader's own functions.
        (
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\nN}X\x0c\x00\x00\x00__defaults__K\x01\x85s\x86b.",
            "something else",
        ),
        # A dtype is no function.
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "calls something"),
        (b"\x80\x02ctorch\nSize\n)\x81.", "operation NEWOBJ"),
        (b"\x80\x02\x82\x01.", "operation EXT1"),
        (b"\x80\x02(i__main__\nX\n.", "operation INST"),
        # An index that would make the standard unpickler ask for 16 GB.
        (b"\x80\x02}r\xff\xff\xff\x7f.", "ok"),
        (b"\x80\x02]q\x00h\x00a.", "something else"),
        (b"\x80\x02X\xff\xff\xff\x7fab.", "damaged"),
        (b"\x80\x02X\x01\x00\x00\x00ax\x02.", "damaged|operation"),
        (b"\x80\x02}X\x01\x00\x00\x00aK\x01s.", "something else"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02R.", "lacks its operands"),
        (b"\x80\x02(t(u.", "damaged"),
        # Values whose hash, comparison or text would take for ever, where one of them was asked for.
        (b"\x80\x02" + BOMB + b"}h\x00K\x01s.", "nested too deeply"),
        (b"\x80\x02})K\x01s.", "a str was expected"),
        (b"\x80\x02" + BOMB + b"h\x00)R.", "calls something|nested too deeply"),
        (b"\x80\x02" + BOMB + b"h\x00Q.", "damaged|nested too deeply"),
        (b"\x80\x04" + BOMB + b"h\x00h\x00\x93.", "damaged|nested too deeply"),
        (b"\x80\x02ccollections\nOrderedDict\n](h\x00K\x01tae\x85R.", "damaged"),
        (b"\x80\x02)" + b"\x85" * 300_000 + b".", "nested too deeply"),
        (b"\x80\x02" + b"(" * 120_000 + b"t" * 120_000 + b".", "nested too deeply|damaged"),
    ],
)  # fmt: skip
def test_no_pickle_does_anything(pickle, text, path, tmp_path, monkeypatch):
    """Every call that is not of a tensor, every attribute and every instance is refused by name."""
    monkeypatch.chdir(tmp_path)
    path.write_bytes(with_pickle(saved(), pickle))
    if text == "ok":
        assert not TorchBinFile([path]).names()
    else:
        with pytest.raises(CheckpointError, match=text) as caught:
            TorchBinFile([path])
        assert str(path) in str(caught.value)
    assert os.listdir(tmp_path) == [path.name]


def test_damage_is_named(path):
    """Random bytes in the archive and in its pickle give tensors or a CheckpointError, nothing else."""
    whole, rng = saved(), random.Random(0)
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        pickle = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    refused = 0
    for i in range(300):
        data = bytearray(whole if i % 3 == 0 else pickle)
        for _ in range(rng.choice([1, 2, 5])):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(bytes(data) if i % 3 == 0 else with_pickle(whole, bytes(data)))
        try:
            file = TorchBinFile([path])
            assert all(file.array(n).shape == file.shape(n) for n in file.names())
        except CheckpointError:
            refused += 1
    assert refused > 100
