"""torch, or a refusal that says how to get it: the one place where the optional dependency is imported."""

from __future__ import annotations

from eaglejax.errors import ConfigError

try:
    import torch as torch
except ImportError as error:
    raise ConfigError(
        "eaglejax.interop runs models in PyTorch, which is not installed: pip install 'eaglejax[torch]', or "
        "on an Ascend or MUSA host the torch that the vendor's torch_npu or torch_musa was built for"
    ) from error
