"""Second instances of the modules that decode, in which the arithmetic also notes what it read and gave.

``Instruments`` executes the source of the decoder, the draft network, the proposer and the round once more,
apart from the imported modules, and puts wrappers in the place of the functions that they call (``linear``,
``rms_norm``, ``rotate``, ...). The arithmetic is therefore the library's own and follows it; the modules that
everybody else imports are not touched. Which weight a function was given tells which operation it is: inside
a jitted function every weight is one tracer with one place in the tree of parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from eaglejax.drafts.eagle import model as eagle_model
from eaglejax.drafts.eagle import proposer as eagle
from eaglejax.drafts.eagle.proposer import Eagle
from eaglejax.interop.names import Place
from eaglejax.models import decoder
from eaglejax.speculate import round


class Capture:
    """What is noted while a stage is traced.

    ``stage`` opens one and yields the dict that fills with tracers by name (stage 0 of its kind). ``enter``
    and ``layer`` say whose arithmetic runs, from which the names follow.
    """

    def __init__(self) -> None:
        self._found: dict[str, jax.Array] = {}
        self._paths: dict[int, str] = {}
        self._stage = ""
        self.part = ""
        self.step: int | None = None
        self._layer: int | None = None
        self._head_dim = 0
        self._rotated = 0

    @contextlib.contextmanager
    def stage(self, stage: str, params: round.Params) -> Iterator[dict[str, jax.Array]]:
        """Collect what the body notes while it runs on ``params``."""
        self._stage, self._found = stage, {}
        self._paths = {**dict(_paths(params.target)), **dict(_paths(params.draft.weights))}
        yield self._found
        self._found, self._paths = {}, {}

    @contextlib.contextmanager
    def enter(self, part: str, step: int | None = None) -> Iterator[None]:
        """The body computes this part."""
        outer, self.part, self.step = (self.part, self.step), part, step
        yield
        self.part, self.step = outer

    @contextlib.contextmanager
    def layer(self, index: int, head_dim: int) -> Iterator[None]:
        """The body computes a layer of the part at hand."""
        self._layer, self._head_dim, self._rotated = index, head_dim, 0
        yield
        self._layer = None

    def kind(self, weight: Any) -> str:
        """The last word of a weight's path, such as ``q``; '' for what is no weight."""
        return self._paths.get(id(weight), "").rpartition(".")[2]

    def note(self, operation: str, value: jax.Array) -> None:
        """Record ``value`` under the place at hand."""
        place = Place(self._stage, 0, self.part, operation, step=self.step, layer=self._layer)
        self._found[str(place)] = value

    def note_heads(self, operation: str, value: jax.Array) -> None:
        """Record ``value`` [B, N, heads * d] as [B, N, heads, d]."""
        self.note(operation, value.reshape(*value.shape[:2], -1, self._head_dim))

    def note_rotated(self, value: jax.Array) -> None:
        """Record what the rotation gave: a layer's queries first, then its keys."""
        self.note("qk"[self._rotated], value)
        self._rotated += 1


def _paths(tree: Any, at: str = "") -> Iterator[tuple[int, str]]:
    """(identity, dotted path) of every entry of nested dicts and lists."""
    if isinstance(tree, dict | list | tuple):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _paths(value, f"{at}.{key}")
    else:
        yield id(tree), at


def _again(module: ModuleType) -> Any:
    """Another instance of ``module``, from its source."""
    spec = module.__spec__
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


class Instruments:
    """The instrumented modules: ``round`` and the proposers that ``proposer`` makes go together."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._eagle = _again(eagle)
        self._eagle.eagle_model = self._draft_network()
        self.round = self._rounds()

    def proposer(self, settings: Eagle) -> Any:
        """An instrumented proposer with these settings."""
        capture, base = self._capture, self._eagle.Eagle

        class Noting(base):  # type: ignore[misc, valid-type]
            """The proposer, saying which part of it runs."""

            def propose(self, *args: Any) -> Any:
                with capture.enter("step", 0):
                    draft, state = super().propose(*args)
                with capture.enter("tree"):
                    for field in ("tokens", "parent", "depth"):
                        capture.note(field, getattr(draft, field))
                    capture.note("scores", jnp.log(draft.confidence))
                return draft, state

            def observe(self, *args: Any) -> Any:
                with capture.enter("observe"):
                    return super().observe(*args)

        return Noting(**{f.name: getattr(settings, f.name) for f in dataclasses.fields(settings)})

    def _wrap_arithmetic(self, module: Any) -> None:
        """Let the functions that the layers of ``module`` call note what names ask for."""
        capture = self._capture
        plain_linear, plain_norm, plain_rotate = module.linear, module.rms_norm, module.rotate

        def linear(x: jax.Array, w: Any, *args: Any, **kwargs: Any) -> jax.Array:
            y = plain_linear(x, w, *args, **kwargs)
            kind = capture.kind(w) if capture.part in ("target", "observe", "step") else ""
            if kind == "q":
                capture.note("attn_norm", x)
            elif kind == "v":
                capture.note_heads("v", y)
            elif kind == "o":
                capture.note_heads("attention", x)
                capture.note("attn_out", y)
            elif kind == "fc":
                capture.note("fc", y)
            return y

        def rms_norm(x: jax.Array, weight: Any, *args: Any, **kwargs: Any) -> jax.Array:
            y = plain_norm(x, weight, *args, **kwargs)
            kind = capture.kind(weight)
            if kind == "mlp_norm":
                capture.note("attn_residual", x)
                capture.note("mlp_norm", y)
            elif kind in _CLOSING:
                capture.note(_CLOSING[kind], y)
            return y

        def rotate(*args: Any) -> jax.Array:
            y = plain_rotate(*args)
            capture.note_rotated(y)
            return y

        def mlp(plain: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
            def run(*args: Any, **kwargs: Any) -> jax.Array:
                y = plain(*args, **kwargs)
                capture.note("mlp", y)
                return y

            return run

        module.linear, module.rms_norm, module.rotate = linear, rms_norm, rotate
        for name in ("gated_mlp", "moe_mlp"):
            if hasattr(module, name):
                setattr(module, name, mlp(getattr(module, name)))

    def _target_network(self) -> Any:
        capture, module = self._capture, _again(decoder)
        self._wrap_arithmetic(module)
        plain_forward, plain_block, plain_unembed = module.forward, module._block, module.unembed

        def forward(
            params: Any, config: Any, tokens: Any, positions: Any, cache: Any, visible: Any, **kwargs: Any
        ) -> Any:
            with capture.enter("target"):
                capture.note("tokens", tokens)
                capture.note("positions", positions)
                capture.note("visible", visible)
                out = plain_forward(params, config, tokens, positions, cache, visible, **kwargs)
                capture.note("final_norm", out.hidden)
                if out.aux is not None:
                    capture.note("aux", out.aux)
            return out

        def block(layer: Any, config: Any, index: int, x: jax.Array, *args: Any) -> Any:
            if index == 0:
                capture.note("embedding", x)
            with capture.layer(index, config.head_dim):
                out = plain_block(layer, config, index, x, *args)
                capture.note("residual", out[0])
            return out

        def unembed(*args: Any) -> jax.Array:
            with capture.enter("target"):
                logits = plain_unembed(*args)
                capture.note("logits", logits)
            return logits

        module.forward, module._block, module.unembed = forward, block, unembed
        return module

    def _draft_network(self) -> Any:
        capture, module = self._capture, _again(eagle_model)
        self._wrap_arithmetic(module)
        plain_step, plain_layer = module.step, module._layer
        plain_logits, plain_fuse = module.logits, module.fuse

        def fuse(*args: Any) -> jax.Array:
            with capture.enter("fuse"):
                return plain_fuse(*args)

        def step(params: Any, config: Any, feature: jax.Array, *args: Any) -> Any:
            if capture.step is not None:
                capture.step += 1
            capture.note("feature", feature)
            state, cache = plain_step(params, config, feature, *args)
            capture.note("state", state)
            return state, cache

        def layer(weights: Any, config: Any, index: int, x: jax.Array, e: jax.Array, *args: Any) -> jax.Array:
            if index == 0:
                capture.note("embedding", e)
            with capture.layer(index, config.head_dim):
                out = plain_layer(weights, config, index, x, e, *args)
                capture.note("residual", out)
            return out

        def logits(*args: Any) -> jax.Array:
            out = plain_logits(*args)
            if capture.step is not None:
                capture.note("logits", out if out.ndim == 3 else out[:, None])
            return out

        module.step, module._layer, module.logits, module.fuse = step, layer, logits, fuse
        return module

    def _rounds(self) -> Any:
        capture, module = self._capture, _again(round)
        module.decoder = self._target_network()
        plain_ancestors, plain_verify = module.ancestors, module.verify

        def ancestors(parent: jax.Array, valid: jax.Array, depth: int) -> jax.Array:
            with capture.enter("tree"):
                capture.note("valid", valid)
            return plain_ancestors(parent, valid, depth)

        def verify(*args: Any, **kwargs: Any) -> Any:
            verdict = plain_verify(*args, **kwargs)
            with capture.enter("verify"):
                capture.note("path", verdict.path)
                capture.note("accepted", verdict.accepted)
            return verdict

        def emitting(plain: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                state, record = plain(*args)
                with capture.enter("verify"):
                    capture.note("tokens", record.tokens)
                    capture.note("count", record.count)
                return state, record

            return run

        module.ancestors, module.verify = ancestors, verify
        module.prefill_chunk = emitting(module.prefill_chunk)
        module.decode_round = emitting(module.decode_round)
        return module


_CLOSING = {"post_attn_norm": "attn_out", "post_mlp_norm": "mlp"}
"""Norms that close a block: what they give is what the block adds to the residual stream."""
