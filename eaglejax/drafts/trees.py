"""The draft tree that a speculative config asks for, and the trees that the commands use when it asks for
none."""

from __future__ import annotations

from typing import Any, Literal

from eaglejax.config import SpeculativeConfig
from eaglejax.drafts.limits import MOST_DEPTH, check_count
from eaglejax.drafts.method import DraftMethod
from eaglejax.drafts.tree import DynamicTree, StaticTree, chain, from_choices
from eaglejax.errors import ConfigError

Default = Literal["dynamic", "static"]

CPU_TREE = DynamicTree(depth=5, branching=4, nodes=16)
"""A CPU's forward grows dearer with every node; an accelerator's has dozens of them nearly free."""

STATIC_TREE = from_choices(
    [
        *([0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [2, 0]),
        *([0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0, 0]),
    ]
)
"""16 nodes, root included, bushy at the top and deepest along the likeliest children."""

_DYNAMIC_KEYS = ("tree_depth", "tree_branching", "tree_nodes")


def check(config: SpeculativeConfig) -> None:
    """Refuse trees that cannot be. Raises ConfigError."""
    tree = asked_for(config)
    if config.draft_sample and isinstance(tree, DynamicTree):
        raise ConfigError(
            "a dynamic tree (tree_depth, tree_branching, tree_nodes) is made of the likeliest tokens; "
            "draft_sample needs num_speculative_tokens or a speculative_token_tree"
        )
    if config.draft_temperature is not None and not config.draft_sample:
        raise ConfigError("draft_temperature has an effect with draft_sample alone; set that to true")


def tree_of(config: SpeculativeConfig, default: Default) -> DynamicTree | StaticTree:
    """The tree of a checked config; where it names none the ``default`` kind, or a static tree for sampled
    drafts."""
    tree = asked_for(config)
    if tree is not None:
        return tree
    return STATIC_TREE if default == "static" or config.draft_sample else default_dynamic_tree()


def default_dynamic_tree() -> DynamicTree:
    """The dynamic tree for this machine."""
    import jax

    return CPU_TREE if jax.default_backend() == "cpu" else DynamicTree()


def asked_for(config: SpeculativeConfig) -> DynamicTree | StaticTree | None:
    """The tree that a config names, None where it names none. Raises ConfigError for trees that cannot be."""
    paths, length = config.speculative_token_tree, config.num_speculative_tokens
    sizes = {key: value for key in _DYNAMIC_KEYS if (value := getattr(config, key)) is not None}
    if sizes and (paths is not None or length is not None):
        other = "speculative_token_tree" if paths is not None else "num_speculative_tokens"
        raise ConfigError(f"{next(iter(sizes))} sizes a dynamic tree and {other} a fixed one; give one kind")
    if sizes:
        usual = default_dynamic_tree()
        depth = sizes.get("tree_depth", usual.depth)
        branching = sizes.get("tree_branching", usual.branching)
        # Sizes that are given must fit each other; one that is not is made to fit.
        most = max(branching + (depth - 1) * branching**2 + 1, 2)
        return DynamicTree(depth, branching, sizes.get("tree_nodes", min(usual.nodes, most)))
    if paths is not None:
        tree = from_choices(paths)
        if length not in (None, tree.nodes - 1):
            raise ConfigError(
                f"speculative_token_tree has {tree.nodes - 1} drafts, num_speculative_tokens says {length}; "
                "beside a tree it counts the tree's paths and can be left out"
            )
        return tree
    if length is None:
        return None
    check_count("num_speculative_tokens", length, MOST_DEPTH)
    return chain(length)


_SETTINGS = (
    *("num_speculative_tokens", "speculative_token_tree", "draft_sample", "draft_temperature"),
    *(*_DYNAMIC_KEYS, "min_confidence", "kv_cache_dtype"),
)
_OPTIONS = {
    "draft_sample": "sample",
    "draft_temperature": "temperature",
    "min_confidence": "min_confidence",
    "kv_cache_dtype": "cache_dtype",
}


def _options(config: SpeculativeConfig) -> dict[str, Any]:
    given = {new: value for key, new in _OPTIONS.items() if (value := getattr(config, key)) is not None}
    tree = asked_for(config)
    return given if tree is None else {"tree": tree, **given}


def _check(config: SpeculativeConfig) -> None:
    if config.kv_cache_dtype is not None:
        from eaglejax.kv_format import uncalibrated_format

        uncalibrated_format(config.kv_cache_dtype)
    check(config)


def tree_method(*, in_target: bool = False, cache: bool = True) -> DraftMethod:
    """The method of a family that drafts on any tree, and has one of its own where none is asked for.
    ``cache``: it keeps keys and values, whose format can be chosen."""
    settings = _SETTINGS if cache else tuple(name for name in _SETTINGS if name != "kv_cache_dtype")
    return DraftMethod(settings, _options, _check, in_target=in_target)
