"""The same target and draft in PyTorch, to compare an Ascend, MUSA or CUDA device with the JAX run.

    backends    what a device does: attention, products, merging, and the limits of its operators
    models      target, draft, trees and rounds in torch
    convert     arrays, configurations and weights of the JAX side as those of the torch side
    parity      the two runs recorded, compared and reported
    portable    what of it runs on a device's host that has no JAX

Each imports only what stands above it in this list. Nothing is imported here: modules that name tensors or
read a recording work without torch, those that compute take it from ``backends.torch_import``, which says how
to install it.
"""
