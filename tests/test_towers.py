"""Vision-language models: the tower that sees has a layout of its own."""

from __future__ import annotations

import pytest
import transformers
from models import seeded
from torch import nn
from zoo import GATED
from zoo_wide import IMAGE, TOWER, picture_batch

import autopar
from autopar import Hints
from autopar.runtime.reference import exact_float64
from autopar.runtime.verify import compare
from autopar.sharding.rules.attention import ATTENTION, HEADS
from autopar.specialize import specialize


def _llava() -> nn.Module:
    """Three heads in the tower, four in the decoder."""
    vision = transformers.CLIPVisionConfig(**{**TOWER, "hidden_size": 24, "num_attention_heads": 3})
    config = transformers.LlavaConfig(vision_config=vision, text_config=transformers.LlamaConfig(**GATED),
                                      image_token_id=IMAGE, vision_feature_layer=-1)  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "hints"), [(2, Hints(tp=2, pp=1)), (4, Hints(dp=2, tp=2, pp=1, zero=3))])
def test_tower_has_its_own_layout(ranks: int, hints: Hints) -> None:
    """Two ranks of tp cannot have three heads: the tower is split otherwise, where the decoder is split by heads, and
    either shares all of its work."""
    model = seeded(_llava)().double()
    batch = {name: t.double() if t.is_floating_point() else t for name, t in picture_batch().items()}
    with exact_float64():
        plan = autopar.plan(model, f"cpu:{ranks}", hints=hints, example_inputs=batch)
        special = specialize(model, plan, (), batch)
        report = compare(model, special, (), batch)
    assert report.ok and report.max_error < 1e-10, report
    at = special.assignment.mesh.names.index("tp")
    split: dict[bool, set[str | None]] = {True: set(), False: set()}
    for op in special.operators:
        if op.call.target in ATTENTION:
            split["vision" in op.node.meta["module"]].add(special.assignment.strategies[op.node][at].factor)
    assert split[False] <= HEADS and not split[True] & HEADS and None not in split[True], split
    assert report.flops_share < 1.1 / ranks, report
