"""Seeded damage to binary formats whose structure is known: the opcodes of a pickle, the fields of a GGUF
file, the members of a zip archive."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import pickletools
import random
import struct
import zipfile
from pathlib import Path

from file_mutators import damage_bytes

# What can be put anywhere in a pickle: marks, tuples, containers, calls, memo, texts, numbers, globals.
_OPCODES = (
    *(b"(", b"t", b"\x85", b"\x86", b"\x87", b")", b"}", b"]", b"R", b"Q", b"b", b"s", b"u", b"e", b"a"),
    *(b"0", b"1", b"2", b"N", b"\x88", b"\x89", b".", b"h\x00", b"h\x01", b"q\x00", b"q\x07", b"\x94", b"d"),
    *(b"X\x00\x00\x00\x00", b"X\x01\x00\x00\x00a", b"X\x03\x00\x00\x00\xed\xa0\x80", b"\x8c\x01b", b"V1\n"),
    *(b"K\x00", b"K\xff", b"J\xff\xff\xff\xff", b"J\xff\xff\xff\x7f", b"\x8a\x09" + b"\xff" * 8 + b"\x00"),
    *(b"\x8b\xff\xff\xff\x7f", b"G\x7f\xf8" + b"\0" * 6, b"I7\n", b"L7L\n", b"j\xff\xff\xff\xff", b"\x93"),
    *(b"cos\nsystem\n", b"cbuiltins\neval\n", b"ctorch\nFloatStorage\n", b"ctorch\nLongStorage\n"),
    *(b"ctorch._utils\n_rebuild_tensor_v2\n", b"ccollections\nOrderedDict\n", b"\x81", b"\x92", b"\x8f"),
    *(b"c__builtin__\nset\n", b"\x80\x05", b"\x95" + b"\xff" * 8, b"B\xff\xff\xff\x7f", b"r\xff\xff\xff\x7f"),
)


def change_pickle(rng: random.Random, data: bytes) -> bytes:
    """A pickle of which a few operations are gone, doubled, moved, others, or have another number or text."""
    starts = [at for _, _, at in pickletools.genops(data) if at is not None]
    steps = [data[a:b] for a, b in itertools.pairwise([*starts, len(data)])]
    for _ in range(rng.choice((1, 1, 2, 4))):
        at, other = rng.randrange(len(steps)), rng.randrange(len(steps))
        match rng.randrange(7):
            case 0 if len(steps) > 2:
                del steps[at]
            case 1:
                steps[at:at] = [steps[other]] * rng.choice((1, 2, 3000))
            case 2:
                steps[at], steps[other] = steps[other], steps[at]
            case 3:
                steps[at:at] = [rng.choice(_OPCODES)] * rng.choice((1, 1, 1, 12, 20_000))
            case 4:
                steps[at] = rng.choice(_OPCODES)
            case _:
                # A number becomes another, a text another of the file or one of the same length.
                alike = [i for i, step in enumerate(steps) if step[:1] in b"KMJX\x8c"]
                at = rng.choice(alike) if alike else at
                steps[at] = _other_argument(rng, steps[at], steps[rng.choice(alike) if alike else other])
    return b"".join(steps)


def _other_argument(rng: random.Random, step: bytes, other: bytes) -> bytes:
    if step[:1] in b"KMJ":
        number = rng.choice((0, 1, 2, 3, 5, 12, 255, 2**31 - 1, -1, -4))
        return b"J" + struct.pack("<i", number)
    if rng.random() < 0.5:
        return other
    return step[:-1] + rng.choice((b"0", b"\x00", b"/", b"\xff", b"."))


def damage_archive(rng: random.Random, path: Path) -> None:
    """A zip archive whose pickle or members are others, which is put together otherwise, or whose bytes are
    damaged."""
    if rng.random() < 0.25:
        damage_bytes(rng, path)
        return
    with zipfile.ZipFile(path) as old:
        members = [(name, old.read(name)) for name in old.namelist()]
    names = [name for name, _ in members]
    at = next(i for i, name in enumerate(names) if name.endswith("data.pkl"))
    kind, packed = rng.randrange(12), None
    if kind < 7:
        members[at] = (names[at], change_pickle(rng, members[at][1]))
    elif kind == 7:
        at = rng.randrange(len(members))
        part = path.with_name("part")
        part.write_bytes(members[at][1])
        damage_bytes(rng, part)
        members[at] = (names[at], part.read_bytes())
        part.unlink()
    elif kind == 8:
        del members[rng.randrange(len(members))]
    elif kind == 9:
        one, two = rng.sample(range(len(members)), 2)
        members[one], members[two] = (names[one], members[two][1]), (names[two], members[one][1])
    elif kind == 10:
        at = rng.randrange(len(members))
        name = rng.choice(
            (names[at] + "x", "../" + names[at], names[0], "m/byteorder", "z/data.pkl", "a" * 300)
        )
        members.append((name, members[at][1]))
    else:
        packed = rng.randrange(len(members))
    with zipfile.ZipFile(path, "w") as new:
        for number, (name, data) in enumerate(members):
            if name not in new.namelist():
                new.writestr(name, data, zipfile.ZIP_DEFLATED if number == packed else zipfile.ZIP_STORED)
    if rng.random() < 0.05:
        data = bytearray(path.read_bytes())
        for mark, place in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
            data[data.find(mark) + place] |= 1  # encrypted, as the flags have it
        path.write_bytes(data)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Bytes [start, end) of a GGUF header that mean something; ``kind``: what."""

    start: int
    end: int
    kind: str


_WIDTHS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY, _ALIGNMENT = 8, 9, 32


@functools.lru_cache(maxsize=4)
def _gguf_places(data: bytes) -> tuple[_Place, ...]:
    """Every field of a sound header; of an array the first items and some others."""
    found: list[_Place] = []
    at = 0

    def take(length: int, kind: str) -> int:
        nonlocal at
        found.append(_Place(at, at + length, kind))
        at += length
        return int.from_bytes(data[at - length : at], "little")

    def string(kind: str = "string") -> None:
        nonlocal at
        length = int.from_bytes(data[at : at + 8], "little")
        take(8 + length, kind)

    def value(kind: int) -> None:
        nonlocal at
        if kind == _STRING:
            string()
        elif kind == _ARRAY:
            item, count = take(4, "type"), take(8, "count")
            for number in range(count):
                seen = len(found)
                value(item)
                if number > 3 and number % 50:
                    del found[seen:]
        else:
            take(_WIDTHS[kind], "number")

    take(4, "magic")
    take(4, "version")
    tensors, entries = take(8, "count"), take(8, "count")
    for _ in range(entries):
        start = at
        string("key")
        value(take(4, "type"))
        found.append(_Place(start, at, "entry"))
    for _ in range(tensors):
        start = at
        string("name")
        for _ in range(take(4, "dimensions")):
            take(8, "dimension")
        take(4, "tensor type")
        take(8, "offset")
        found.append(_Place(start, at, "tensor"))
    found.append(_Place(at, at, "end"))
    return tuple(found)


def damage_gguf(rng: random.Random, path: Path) -> None:
    """A GGUF file of which a few fields of the header say something else; nearly always its data still begin
    where a reader looks for them."""
    data = path.read_bytes()
    places = _gguf_places(data)
    end = places[-1].end
    body = data[end + -end % _ALIGNMENT :]
    kinds = sorted({place.kind for place in places} - {"end"})
    changes: dict[_Place, bytes] = {}
    for _ in range(rng.choice((1, 1, 1, 2))):
        kind = rng.choice(kinds)
        place, other = rng.choices([p for p in places if p.kind == kind], k=2)
        old, there = data[place.start : place.end], data[other.start : other.end]
        if rng.random() < 0.3:
            changes |= {place: there, other: old}
        elif kind in ("entry", "tensor"):
            changes[place] = rng.choice((b"", old + old, there))
        elif kind in ("string", "key", "name"):
            changes[place] = _other_string(rng, old[8:])
        else:
            changes[place] = _other_number(rng, old)
    head, at = bytearray(), 0
    for place in sorted(changes, key=lambda p: (p.start, -p.end)):
        if place.start >= at:
            head += data[at : place.start] + changes[place]
            at = place.end
    head += data[at:end]
    if rng.random() < 0.95:
        head += b"\0" * (-len(head) % _ALIGNMENT)
    if rng.random() < 0.05:
        body = rng.choice((body[: -rng.choice((1, 32, 400))], body + b"\0" * rng.choice((1, 32)), body[32:]))
    path.write_bytes(head + body)


def _other_string(rng: random.Random, text: bytes) -> bytes:
    texts = (b"", text[:-1], text + b"x", text * 2, b"\xff" * len(text), text.swapcase(), b"a" * 70_000)
    texts += (b"\xed\xa0\x80", b"tokenizer.ggml.tokens", b"llama", b"general.alignment", b"token_embd.weight")
    changed = rng.choice(texts)
    length = len(changed) if rng.random() < 0.9 else rng.choice((0, 2**31, 2**63, 2**64 - 1))
    return struct.pack("<Q", length) + changed


def _other_number(rng: random.Random, old: bytes) -> bytes:
    width, number = len(old), int.from_bytes(old, "little")
    values = (0, 1, 2, 8, 9, 31, 32, 64, number + 1, number - 1, 2 * number, number // 2, number ^ 32)
    values += (2**7, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, rng.getrandbits(8 * width))
    return (rng.choice(values) % (1 << 8 * width)).to_bytes(width, "little")
