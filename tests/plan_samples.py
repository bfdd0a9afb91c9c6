"""Plans written by hand, for the tests of plans and reports."""

from __future__ import annotations

from typing import Any

from autopar.cluster import Cluster
from autopar.plan import Alternative, Collective, LayerSummary, ParameterPlan, Plan, ReplicatedOperator
from autopar.sharding.layout import Layout

MIB, GIB = 2**20, 2**30


def sample_plan(**changes: Any) -> Plan:
    """A plan of a Llama on 8 GPUs, dp 4 x tp 2, ZeRO 3, with ``changes`` in place of its entries."""
    entries: dict[str, Any] = {
        "model": "LlamaForCausalLM",
        "structure": "5f0c",
        "degrees": {"pp": 1, "dp": 4, "cp": 1, "tp": 2},
        "zero": 3,
        "zero_group_size": None,
        "micro_batch_size": 8,
        "num_micro_batches": 2,
        "schedule": None,
        "stages": (("model.embed_tokens", "model.layers.0", "model.norm"),),
        "recompute": "selective",
        "step_time": 0.412,
        "breakdown": {"compute": 0.340, "exposed communication": 0.062, "bubble": 0.0, "optimizer": 0.010},
        "memory": {"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB,
                   "activations": 12 * GIB + 512 * MIB},
        "peaks": ({"parameters": 2 * GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB,
                   "activations": 11 * GIB + 512 * MIB, "transients": 1 * GIB},),
        "gap": 0.007,
        "gap_space": "every split of every operator on this mesh",
        "parameters": {
            "model.embed_tokens.weight": ParameterPlan((128, 32), Layout((("tp", "dp"), ()))),
            "model.layers.0.mlp.down_proj.weight": ParameterPlan((32, 64), Layout((("dp",), ("tp",)))),
            "model.norm.weight": ParameterPlan((32,), Layout((("dp",),))),
        },
        "operators": {"einsum_default": {"dp": "a", "tp": "d"}},
        "layers": (LayerSummary("model.layers.*.self_attn", 30, (("batch", "dp"), ("heads", "tp"))),
                   LayerSummary("model.layers.*.mlp", 30, (("batch", "dp"), ("ffn", "tp"))),
                   LayerSummary("lm_head", 1, (("batch", "dp"),))),
        "collectives": (Collective("all_gather", "dp", "parameters", 120, 6 * GIB, 4 * GIB + 512 * MIB, 0.031),
                        Collective("all_reduce", "tp", "activations", 64, 640 * MIB, 640 * MIB, 0.0045)),
        "replicated": (ReplicatedOperator("aten.cumsum", ("dp", "tp"), 3, 0.0, 0.021, "no rule"),
                       ReplicatedOperator("autopar.attention", ("tp",), 30, 0.123, 0.05, "nothing divides")),
        "alternatives": (Alternative({"pp": 1, "dp": 8, "tp": 1}, 3, None, 2, None, "full", 0.5356, 40 * GIB,
                                     "1.3x slower: exposed communication"),
                         Alternative({"pp": 1, "dp": 8, "tp": 1}, 0, None, 1, None, "none", 0.3, 92 * GIB,
                                     "needs 12.9 GiB more than fits")),
        "cluster": Cluster.parse("h100-sxm:1x8").to_dict(),
        "workload": {"global_batch": 64, "seq_len": 2048, "optimizer": "adamw"},
        "hints": {"tp": 2},
        "flops_share": 0.1304,
    }
    return Plan(**{**entries, **changes})
