"""The same target and draft in PyTorch, to compare an Ascend, MUSA or CUDA device with the JAX run.

Nothing is imported here: modules that name tensors or read a recording work without torch, those that
compute take it from ``interop.torch_import``, which says how to install it. ``interop.portable`` lists what
runs on a device's host that has no JAX.
"""
