"""Chat templates: jinja sources that come with a model and are run, in a sandbox, on what people send.

A template is a foreign program. It cannot reach out (jinja's sandbox), it ends (steps and sizes are bounded),
and whatever fails in it costs the conversation that it was run on.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.sandbox
import jinja2.visitor

from eaglejax.errors import CheckpointError, RequestError

MOST_STEPS = 5_000_000
"""Turns of loops and calls in one rendering; a conversation of a thousand messages takes some thousands."""

MOST_SIZE = 1 << 26
"""Characters of a text, items of a list or digits of a number that a template makes."""

_steps = threading.local()


class _EndlessError(jinja2.TemplateError):
    """The template does not end, or makes something without a bound."""


def render(source: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """``source`` run on ``messages`` and ``variables``.

    Raises RequestError for whatever goes wrong in it, and CheckpointError for a source that is no template.
    """
    template = _compiled(source)
    _steps.left = MOST_STEPS
    pieces, size = [], 0
    try:
        for piece in template.generate(messages=list(messages), **variables):
            size += len(piece)
            if size > MOST_SIZE:
                raise _EndlessError(f"it writes more than {MOST_SIZE} characters")
            pieces.append(piece)
        return "".join(pieces)
    except _EndlessError as error:
        raise RequestError(f"the chat template was stopped on these messages: {error}") from error
    except jinja2.TemplateError as error:
        raise RequestError(f"the chat template rejects these messages: {error}") from error
    except Exception as error:
        told = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise RequestError(f"the chat template fails on these messages: {told:.300}") from error


@functools.lru_cache(maxsize=16)
def variables_read(source: str) -> frozenset[str]:
    """Names that a template reads from outside. Raises CheckpointError for a source that is no template."""
    environment = _environment()
    found = _checked(lambda: jinja2.meta.find_undeclared_variables(environment.parse(source)))
    return frozenset(found) - set(environment.globals)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    return _checked(lambda: _environment().from_string(source))


def _checked(make: Callable[[], Any]) -> Any:
    try:
        return make()
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(
            f"the model's chat template is not valid jinja (line {error.lineno}): {error}"
        ) from error
    except Exception as error:
        # Python's own compiler refuses what is nested too deeply.
        raise CheckpointError(
            f"the model's chat template is not usable ({type(error).__name__}): {error!s:.200}"
        ) from error


def _step(count: int = 1) -> None:
    _steps.left -= count
    if _steps.left < 0:
        raise _EndlessError(f"it takes more than {MOST_STEPS} steps")


def _bounded(size: float) -> None:
    if size > MOST_SIZE:
        raise _EndlessError(f"it makes something of more than {MOST_SIZE} characters or items")


@jinja2.pass_context  # so that nothing is counted while the template is compiled
def _counted(context: jinja2.runtime.Context, iterable: Any) -> Any:
    """What a loop goes through, its turns counted: before it where there is a length, so that it keeps it."""
    if isinstance(iterable, Sized):
        _step(len(iterable))
        return iterable
    return _counting(iterable) if isinstance(iterable, Iterable) else iterable


def _counting(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _step()
        yield item


def _sized(value: Any) -> Any:
    """A text that grew, which may grow to twice its size before it is looked at."""
    if isinstance(value, str):
        _bounded(len(value))
    return value


class _Bounds(jinja2.visitor.NodeTransformer):
    """Counts the turns of loops, and measures texts that are joined or captured."""

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.iter = _filtered(node.iter, "_counted", node.lineno)
        return node

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        self.generic_visit(node)
        return _filtered(node, "_sized", node.lineno)

    def visit_AssignBlock(self, node: jinja2.nodes.AssignBlock) -> jinja2.nodes.Node:
        self.generic_visit(node)
        node.filter = _filtered(node.filter, "_sized", node.lineno)
        return node


def _filtered(node: Any, name: str, line: int) -> jinja2.nodes.Filter:
    found = jinja2.nodes.Filter(node, name, [], [], None, None)
    found.set_lineno(line)
    return found


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """jinja's sandbox with bounds."""

    intercepted_binops = frozenset(("*", "**", "%", "+"))

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def call(self, context: Any, function: Any, *args: Any, **options: Any) -> Any:
        _step()
        # The sandbox wraps what formats a text.
        real = getattr(function, "__wrapped__", function)
        owner, name = getattr(real, "__self__", None), getattr(real, "__name__", "")
        if isinstance(owner, str):
            _bound_text(name, owner, *args, *options.values())
        elif name == "generate_lorem_ipsum":
            _bound_text("center", "", *args, *options.values())
        return _sized(super().call(context, function, *args, **options))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        _step()
        sizes = [len(v) if isinstance(v, Sized) else v for v in (left, right)]
        numbers = isinstance(left, int) and isinstance(right, int)
        if operator == "**" and numbers:
            _bounded(left.bit_length() * max(right, 0) / 3)
        elif operator == "*" and (numbers or any(isinstance(v, Sized) for v in (left, right))):
            _bounded((left.bit_length() + right.bit_length()) / 3 if numbers else sizes[0] * sizes[1])
        elif operator == "+" and isinstance(left, Sized) and isinstance(right, Sized):
            _bounded(sum(sizes))
        elif operator == "%" and isinstance(left, str):
            _bound_text("format", left)
        return super().call_binop(context, operator, left, right)


_WIDTHS = (
    "center",
    "ljust",
    "rjust",
    "zfill",
    "expandtabs",
    "indent",
    "wordwrap",
    "batch",
    "slice",
    "tojson",
)
"""Methods of texts and filters that make something as wide as a number says."""


def _bound_text(name: str, value: Any, *args: Any) -> None:
    """Refuse what the method or filter ``name`` of ``value`` would make too large."""
    if name in _WIDTHS:
        _bounded(sum(abs(a) for a in args if isinstance(a, int)))
    elif name == "replace" and isinstance(value, str) and len(args) >= 2 and isinstance(args[1], str):
        _bounded(len(value) + value.count(str(args[0])) * len(args[1]))
    elif name == "join":
        # As a method of the text between, and as a filter of the items.
        between, items = (value, args[:1]) if isinstance(value, str) else ((*args, "")[0], (value,))
        if items and isinstance(items[0], list | tuple):
            _bounded(sum(len(i) + len(str(between)) for i in items[0] if isinstance(i, str)))
    elif name in ("format", "format_map") and isinstance(value, str):
        for digits in re.findall(r"\d+", value):
            _bounded(float(digits[:12]))
        if re.search(r"%[-+ #0]*\*|\{[^}]*\{", value):
            raise _EndlessError("it makes something of a width that cannot be told beforehand")


def _limited(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter ``name``, counted and bounded."""

    @functools.wraps(function)
    def limited(*args: Any, **options: Any) -> Any:
        _step()
        # Some filters are given the context or the environment first.
        own = args[1:] if hasattr(function, "jinja_pass_arg") else args
        if own:
            _bound_text(name, *own, *options.values())
        return _sized(function(*args, **options))

    return limited


def _environment() -> jinja2.sandbox.SandboxedEnvironment:
    """The environment that chat templates are written for: blocks trimmed, loop controls, some functions."""

    def tojson(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja's own filter escapes HTML, which would change the prompt.
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = tojson
    environment.filters = {name: _limited(name, f) for name, f in environment.filters.items()}
    environment.filters |= {"_counted": _counted, "_sized": _sized}
    environment.globals.update(raise_exception=raise_exception, strftime_now=strftime_now)
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}``: marks what the assistant says; it renders as its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
