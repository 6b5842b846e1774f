"""A chat template is a foreign program: it ends, and what fails in it costs its conversation alone."""

import jinja2
import pytest

from eaglejax.checkpoint import chat_template
from eaglejax.checkpoint.chat_template import render, variables_read
from eaglejax.errors import CheckpointError, RequestError

MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"}]

FAILING = {
    "{{ 1 // 0 }}": "fails on these messages: ZeroDivisionError",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "RecursionError",
    "{{ 'a'.encode('ascii').decode('utf-16') }}": "UnicodeDecodeError",
    "{{ messages[0].content.missing.deeper }}": "rejects these messages",
    "{{ messages[0]['content'] + 1 }}": "TypeError",
    "{{ [1].index(2) }}": "ValueError",
    "{{ '%d' % 'x' }}": "TypeError",
    "{{ {}.popitem() }}": "rejects|KeyError",
    "{{ strftime_now(3) }}": "TypeError",
    "{{ raise_exception('roles must alternate') }}": "rejects these messages: roles must alternate",
}

ENDLESS = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ '' if j }}{% endfor %}{% endfor %}",
    "{% for i in range(99999)|map('int') %}{% for j in range(99999)|map('int') %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 'a' * 10**12 }}",
    "{{ 10**12 * 'a' }}",
    "{{ [0] * 10**12 }}",
    "{{ 9**(9**9) }}",
    "{{ 'a'.center(10**12) }}",
    "{{ 'a'|center(10**12) }}",
    "{{ '%1000000000000d' % 1 }}",
    "{{ '{:1000000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 10**12) }}",
    "{{ '%*d' % (10**12, 1) }}",
    "{{ ('a' * 60000).replace('a', 'b' * 60000) }}",
    "{{ ('a' * 60000)|replace('a', 'b' * 60000) }}",
    "{{ (['a' * 60000] * 60000)|join }}",
    "{{ ''.join(['a' * 60000] * 60000) }}",
    "{{ [1]|tojson(indent=10**12) }}",
    "{{ [1]|batch(10**12, 'x')|list }}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(60) %}"
    "{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}{% endfor %}",
    "{% set s = 'a' * 60000 %}{% for i in range(60000) %}{{ s }}{% endfor %}",
    "".join(f"{{% for i{n} in [1,2,3,4,5,6,7,8,9,0] %}}" for n in range(12)) + "{% endfor %}" * 12,
]


@pytest.mark.parametrize("source", FAILING)
def test_whatever_fails_costs_its_conversation(source):
    with pytest.raises(RequestError, match=FAILING[source]):
        render(source, MESSAGES, {})
    assert render("{{ messages[0].content }}", MESSAGES, {}) == "hello"


@pytest.mark.parametrize("source", ENDLESS, ids=lambda s: s[:40])
def test_a_template_that_does_not_end_is_stopped(source, monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_STEPS", chat_template.MOST_STEPS // 50)
    with pytest.raises(RequestError, match="was stopped on these messages"):
        render(source, MESSAGES, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.previtem }}{% endfor %}",
        "{% for m in messages|reverse %}{{ loop.length }}{% else %}none{% endfor %}",
        "{% for m in nothing %}x{% else %}none{% endfor %}",
        "{% for k, v in {'a': 2**40, 'b': 1.5 * 2}.items() %}{{ k ~ v }}{% endfor %}",
        "{% for m in messages if m.role == 'user' recursive %}{{ m.content }}{{ loop([]) }}{% endfor %}",
        "{% set x %}{{ 'a' ~ 1 }}{% endset %}{{ x|upper }}{% set y|upper %}b{% endset %}{{ y }}",
        "{{ messages|map(attribute='content')|join(', ') }}{{ 1700000000000|string }}{{ [1, 2]|sum }}",
        "{{ 'a, b'.split(', ')|join('-') }}{{ '%05d|%s' % (7, 'x') }}{{ 'x'.replace('x', 'yy') }}",
        "{{ 'a'.ljust(5) }}|{{ 3 * 'ab' }}{{ [1] + [2] }}{{ 7 % 4 }}{{ 2 ** 10 }}",
        "{% for x in [3, 1, 2]|sort %}{{ x }}{{ loop.cycle('a', 'b') }}{% if x == 2 %}{% break %}{% endif %}"
        "{% endfor %}",
        "{% macro f(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{% call f(1) %}y{% endcall %}",
    ],
)
def test_bounds_change_nothing_else(source):
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    want = plain.from_string(source).render(messages=MESSAGES)
    assert render(source, MESSAGES, {}) == want
    assert variables_read(source) <= {"messages", "nothing"}


@pytest.mark.parametrize("source", ["{% for %}", "{{ x|nofilter }}", "{{ '" + "(" * 5, "{{ " + "(" * 5000])
def test_a_source_that_is_no_template(source):
    for use in (lambda: render(source, MESSAGES, {}), lambda: variables_read(source)):
        with pytest.raises((CheckpointError, RequestError)):
            use()
    with pytest.raises(CheckpointError, match="chat template is not"):
        render(source, MESSAGES, {})
