"""What layers are called in reports."""

from __future__ import annotations

from autopar.capture.blocks import block_path, pattern

ROOT = "(root)"
"""Name of the layer that stands for what the outermost module computes itself."""


def layer_of(module: str) -> str:
    """The layer that a module belongs to: the child of its block, or itself outside of the blocks."""
    block = block_path(module)
    if block is None:
        return module or ROOT
    return ".".join(module.split(".")[: block.count(".") + 2])


def kind_of_layer(module: str) -> str:
    """The kind of layer of a module, or of all modules that a pattern such as "model.layers.*.mlp.up_proj" stands
    for: "model.layers.*.mlp"."""
    return pattern(layer_of(module.replace("*", "0", 1)))
