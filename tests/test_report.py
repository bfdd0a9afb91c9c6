"""The report: the facts are in it, in plain text, and the words for what an assignment splits are right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from plan_samples import GIB, MIB, sample_plan
from torch import fx, nn
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.capture import Captured, capture
from autopar.plan import LayerSummary, ReplicatedOperator
from autopar.report.describe import describe_layers, describe_replicated
from autopar.report.units import bytes_text, seconds_text, share_text
from autopar.sharding.assignment import Assignment
from autopar.sharding.layout import Mesh
from autopar.sharding.operators import Operator, Operators, read_operators
from autopar.sharding.rule import Choice, Strategy, strategies


def lines_of(report: str) -> list[str]:
    """The lines of a report with runs of blanks made one."""
    return [" ".join(line.split()) for line in report.splitlines()]


def test_the_report_has_the_facts() -> None:
    assert lines_of(sample_plan().report()) == """\
Plan LlamaForCausalLM on h100-sxm:1x8 (8 ranks)
Workload global_batch 64, seq_len 2048, optimizer adamw
Hints tp=2
Degrees pp 1 x dp 4 x cp 1 x tp 2
Storage ZeRO 3: parameters, gradients and optimizer state rest split over dp
Micro-batches 2 of 8 sequences
Recompute selective
Step time 412 ms: compute 340 ms, exposed communication 62 ms, bubble 0, optimizer 10 ms
Limits compute: devices twice as fast would save 175 ms (42%); memory: 12.9 GiB more would
save 112 ms (27%)
Work one rank does at most 13% of the model's FLOPs
Gap at most 0.7% slower than the best of: every split of every operator on this mesh

What is split
tokens batch over dp
model.layers.*.self_attn x30 heads over tp
model.layers.*.mlp x30 ffn over tp
lm_head only the tokens

Memory a device
at most at the peak
parameters 2 GiB 2 GiB
gradients 2 GiB 2 GiB
optimizer 4 GiB 4 GiB
activations 12.5 GiB 11.5 GiB
transients 0 1 GiB
total 20.5 GiB 26% of the 79.1 GiB of the device

Collectives of one step, a rank
kind axis of count tensors sent time
all_gather dp parameters 120 6 GiB 4.5 GiB 31 ms
all_reduce tp activations 64 640 MiB 640 MiB 4.5 ms

Operators whose work is repeated
operator over count of FLOPs of bytes because
aten.cumsum dp, tp 3 0% 2.1% no rule
autopar.attention tp 30 12% 5% nothing divides

Runner-up plans
degrees storage micro-batches recompute step time memory why it lost
dp 8 ZeRO 3 2 full 536 ms 40 GiB 1.3x slower: exposed communication
dp 8 ZeRO 0 1 none 300 ms 92 GiB needs 12.9 GiB more than fits""".splitlines()


def test_the_report_is_the_same_wherever_it_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    first = sample_plan().report()
    for name, value in (("FORCE_COLOR", "1"), ("COLUMNS", "40"), ("TERM", "xterm-256color"), ("JPY_PARENT_PID", "1")):
        monkeypatch.setenv(name, value)
    assert sample_plan().report() == first
    assert first.isascii() and "\x1b" not in first


def test_long_text_goes_on_below_and_nothing_is_lost() -> None:
    name, reason = "model." + "very_long_name." * 9 + "mlp", "slower because " + "of this and that, " * 9 + "and so on"
    plan = sample_plan(layers=(LayerSummary(name, 2, ()),),
                       alternatives=(replace(sample_plan().alternatives[0], reason=reason),))
    report = plan.report()
    assert max(map(len, report.splitlines())) <= 100
    squeezed = "".join(report.split())
    assert "".join(reason.split()) in squeezed
    assert all(part in squeezed for part in ("very_long_name.very_long_name", "nothing"))


def test_an_empty_plan_says_none() -> None:
    plan = sample_plan(layers=(), collectives=(), replicated=(), alternatives=(), hints={}, workload={}, zero=0)
    lines = lines_of(plan.report())
    assert lines.count("none") == 3
    assert "tokens nothing" in lines
    assert "Storage ZeRO 0: parameters, gradients and optimizer state rest whole on every dp rank" in lines
    assert not any(line.startswith(("Hints", "Workload")) for line in lines)


def test_what_not_all_layers_split_is_said_for_each() -> None:
    plan = sample_plan(layers=(LayerSummary("a", 1, (("batch", "dp"), ("ffn", "tp"))), LayerSummary("b", 1, ())))
    lines = lines_of(plan.report())
    assert "a batch over dp; ffn over tp" in lines and "b nothing" in lines
    assert "tokens not the same in all layers" in lines
    plan = sample_plan(layers=(LayerSummary("a", 1, (("ffn", "tp"),)), LayerSummary("b", 1, ())))
    assert "tokens nothing" in lines_of(plan.report())


@pytest.mark.parametrize(("limit", "said"), [("40GiB", "51% of the 40 GiB of the hint memory_limit"),
                                             ("90GiB", "26% of the 79.1 GiB of the device")])
def test_memory_is_compared_with_the_lower_limit(limit: str, said: str) -> None:
    assert f"total 20.5 GiB {said}" in lines_of(sample_plan(hints={"memory_limit": limit}).report())


def test_memory_of_every_rank_of_a_pipeline() -> None:
    """Ranks of a pipeline differ: a row for each, neighbours that are alike in one; no rows without a pipeline."""
    first = {"parameters": GIB, "activations": 4 * GIB, "workspace": GIB, "slack": GIB // 2}
    middle = {"parameters": GIB}
    last = {"parameters": 3 * GIB, "activations": 1536 * MIB}
    plan = sample_plan(degrees={"pp": 4, "dp": 2, "cp": 1, "tp": 1}, schedule="1f1b",
                       peaks=(first, middle, middle, last), stages=(("a",), ("b",), ("c",), ("d",)))  # fmt: skip
    lines = lines_of(plan.report())
    at = lines.index("Memory of the ranks of pp, of each at its peak")
    assert lines[at + 1 : at + 6] == [
        "pp rank parameters activations other total",
        "0 1 GiB 4 GiB 1.5 GiB 6.5 GiB",
        "1 to 2 1 GiB 0 0 1 GiB",
        "3 3 GiB 1.5 GiB 0 4.5 GiB",
        "",
    ]
    assert plan.peak == first and plan.peak_memory == 6 * GIB + GIB // 2
    assert "total 6.5 GiB 8.2% of the 79.1 GiB of the device" in lines
    assert not any("ranks of pp" in line for line in sample_plan().report().splitlines())


def test_memory_of_ranks_is_not_wider_than_the_report() -> None:
    """All kinds at once, with the widest numbers there are."""
    kinds = ("parameters", "gradients", "optimizer", "activations", "copies", "transients", "workspace", "slack")
    peaks = tuple(dict.fromkeys(kinds, int((1.11 + 0.01 * rank) * GIB)) for rank in range(16))
    plan = sample_plan(degrees={"pp": 16, "dp": 1, "cp": 1, "tp": 1}, schedule="1f1b", peaks=peaks,
                       stages=tuple((f"layers.{i}",) for i in range(16)))  # fmt: skip
    report = plan.report()
    assert max(map(len, report.splitlines())) <= 100
    assert "15 1.26 GiB 1.26 GiB 1.26 GiB 1.26 GiB 1.26 GiB 1.26 GiB 2.52 GiB 10.1 GiB" in lines_of(report)


def test_markup_in_names_is_text() -> None:
    assert "[red]Net[/red] on" in sample_plan(model="[red]Net[/red]").report()


def test_units() -> None:
    assert [bytes_text(n) for n in (0, 1, 1023, 1024, 1536, 12 * GIB + 512 * MIB, 80 * GIB, 2**40 - 1, 2**50)] == [
        "0", "1 B", "1023 B", "1 KiB", "1.5 KiB", "12.5 GiB", "80 GiB", "1 TiB", "1024 TiB"]
    assert [seconds_text(s) for s in (0, 1.5e-9, 2e-6, 0.0123, 0.4127, 0.9999, 61, 4000.0)] == [
        "0", "1.5 ns", "2 us", "12.3 ms", "413 ms", "1 s", "61 s", "4000 s"]
    assert [share_text(s) for s in (0, 1e-6, 0.007, 0.0211, 0.1234, 1, 2.5)] == [
        "0%", "<0.01%", "0.7%", "2.1%", "12%", "100%", "250%"]


# What is split, in words.

MESH = Mesh((("dp", 2), ("tp", 2)))


@pytest.fixture(scope="module")
def llama() -> tuple[Captured, Operators]:
    """A Llama of two layers with two KV heads for four heads, untied."""
    config = LlamaConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, vocab_size=128, tie_word_embeddings=False)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    tokens = torch.zeros(4, 16, dtype=torch.long)
    return read(capture(model, (), {"input_ids": tokens, "labels": tokens}))


def read(captured: Captured) -> tuple[Captured, Operators]:
    tangents = {o.tangent: o.node for o in captured.outputs if o.tangent is not None}
    return captured, read_operators(captured.graph, dict.fromkeys(captured.inputs, 0), tangents)


def assign(operators: Operators, wanted: dict[str, dict[str, str | None]], mesh: Mesh = MESH) -> Assignment:
    """The batch over dp wherever there is one; over tp what ``wanted`` says by the last component of the module, for
    forward products, attention and embeddings. What the rules do not allow runs replicated."""

    def strategy(op: Operator) -> Strategy:
        factors = wanted.get(op.node.meta["module"].rpartition(".")[2], {}) if described(op) else {}
        batch = sorted(f for f in operators.batch_factors[op.node] if f not in op.rule.fixed)
        chosen = {"dp": batch[0] if batch else None, **factors}
        found = tuple(Choice(chosen.get(axis)) for axis in mesh.names)
        return found if found in strategies(op.rule, mesh) else strategies(op.rule, mesh)[0]

    return Assignment(mesh, {op.node: strategy(op) for op in operators}, {}, (), {})


def described(op: Operator) -> bool:
    embedding = op.call.target is torch.ops.aten.embedding.default
    return not op.backward and (op.is_heavy or embedding)


MEGATRON: dict[str, dict[str, str | None]] = {
    "embed_tokens": {"tp": "v"}, "lm_head": {"tp": "d"}, "self_attn": {"tp": "g"},
    "q_proj": {"tp": "d"}, "k_proj": {"tp": "d"}, "v_proj": {"tp": "d"}, "o_proj": {"tp": "c"},
    "gate_proj": {"tp": "d"}, "up_proj": {"tp": "d"}, "down_proj": {"tp": "c"},
}


def test_megatron_in_words(llama: tuple[Captured, Operators]) -> None:
    captured, operators = llama
    assert describe_layers(captured, operators, assign(operators, MEGATRON)) == (
        LayerSummary("model.embed_tokens", 1, (("batch", "dp"), ("vocabulary", "tp"))),
        LayerSummary("model.layers.*.self_attn", 2, (("batch", "dp"), ("heads", "tp"))),
        LayerSummary("model.layers.*.mlp", 2, (("batch", "dp"), ("ffn", "tp"))),
        LayerSummary("lm_head", 1, (("batch", "dp"), ("vocabulary", "tp"))),
    )


def test_sequence_and_hidden_in_words(llama: tuple[Captured, Operators]) -> None:
    captured, operators = llama
    wanted = {"embed_tokens": {"tp": "h"}, "q_proj": {"tp": "c"}, "gate_proj": {"tp": "b"}, "down_proj": {"tp": "d"},
              "lm_head": {"tp": "b"}}
    found = {layer.name: layer.splits for layer in describe_layers(captured, operators, assign(operators, wanted))}
    assert found == {
        "model.embed_tokens": (("batch", "dp"), ("hidden", "tp")),
        "model.layers.*.self_attn": (("batch", "dp"), ("hidden", "tp")),
        "model.layers.*.mlp": (("batch", "dp"), ("sequence", "tp"), ("hidden", "tp")),
        "lm_head": (("batch", "dp"), ("sequence", "tp")),
    }


def test_an_axis_of_degree_one_splits_nothing(llama: tuple[Captured, Operators]) -> None:
    captured, operators = llama
    assignment = assign(operators, MEGATRON, Mesh((("dp", 1), ("tp", 2))))
    found = {layer.name: layer.splits for layer in describe_layers(captured, operators, assignment)}
    assert found["model.layers.*.mlp"] == (("ffn", "tp"),)
    assert {axis for r in describe_replicated(operators, assignment) for axis in r.axes} == {"tp"}


class Stack(nn.Module):
    """Two linear layers of one size, then one that widens and one that narrows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.second(self.first(x)))))


def test_where_nothing_is_known_the_words_are_features() -> None:
    with torch.device("meta"):
        captured, operators = read(capture(Stack(), (torch.zeros(4, 8),)))
    nodes: dict[str, fx.Node] = {op.node.meta["module"]: op.node for op in operators if described(op)}
    wanted: dict[str, dict[str, str | None]] = {}
    for module, role in (("first", "output"), ("second", "input"), ("up", "output"), ("down", "input")):
        rule = operators.by_node[nodes[module]].rule
        batch = operators.batch_factors[nodes[module]]
        names = [f for f in rule.sizes if f not in batch and (f in rule.reduced) == (role == "input")]
        wanted[module] = {"tp": names[0]}
    assert describe_layers(captured, operators, assign(operators, wanted)) == (
        LayerSummary("first", 1, (("batch", "dp"), ("output features", "tp"))),
        LayerSummary("second", 1, (("batch", "dp"), ("input features", "tp"))),
        LayerSummary("up", 1, (("batch", "dp"), ("ffn", "tp"))),
        LayerSummary("down", 1, (("batch", "dp"), ("ffn", "tp"))),
    )


# What is not split.

def test_everything_split_leaves_nothing_heavy_to_name(llama: tuple[Captured, Operators]) -> None:
    _, operators = llama
    assignment = assign(operators, {}, Mesh((("dp", 4), ("tp", 1))))
    assert describe_replicated(operators, assignment) == ()


def test_repeated_work_is_named_with_its_share_and_the_reason(llama: tuple[Captured, Operators]) -> None:
    """Attention has 4 heads, in 2 groups: 8 ranks cannot split them, nor the batch of 4."""
    _, operators = llama
    assignment = assign(operators, {}, Mesh((("dp", 1), ("tp", 8))))
    found = {r.operator: r for r in describe_replicated(operators, assignment)}
    attention, einsum = found["autopar.attention"], found["aten.einsum"]
    assert (attention.axes, attention.count, attention.reason) == (("tp",), 2, "nothing divides")
    assert einsum.reason == "cheaper than splitting"
    # Forward: 2 layers, 2 products of 4 x 4 heads x 16 x 16 x 8 at 2 FLOPs a multiply-add, whole even where causal.
    total = sum(op.flops for op in operators)
    assert attention.flops_share == pytest.approx(2 * 2 * 2 * 4 * 4 * 16 * 16 * 8 / total)
    heavy = [r for r in describe_replicated(operators, assignment) if r.flops_share > 0]
    assert sum(r.flops_share for r in heavy) == pytest.approx(1.0)
    assert [r.flops_share for r in heavy] == sorted((r.flops_share for r in heavy), reverse=True)


def test_an_operator_without_a_rule_is_named(llama: tuple[Captured, Operators]) -> None:
    _, operators = llama
    mesh = Mesh((("dp", 2), ("tp", 2)))
    attention = next(op for op in operators if op.call.target is torch.ops.autopar.attention.default)
    ruleless = replace(operators, by_node={**operators.by_node, attention.node: replace(attention, has_rule=False)})
    strategy = {**assign(operators, MEGATRON, mesh).strategies, attention.node: (Choice(), Choice())}
    found = describe_replicated(ruleless, Assignment(mesh, strategy, {}, (), {}))
    named = [r for r in found if r.reason == "no rule"]
    assert [(r.operator, r.axes, r.count) for r in named] == [("autopar.attention", ("dp", "tp"), 1)]
    assert isinstance(named[0], ReplicatedOperator) and 0 < named[0].flops_share < 0.1


def test_what_the_batch_does_not_reach_is_named(llama: tuple[Captured, Operators]) -> None:
    """Behind an operator without a rule nobody knows which dim is the batch: that is the reason, not divisibility."""
    _, operators = llama
    mesh = Mesh((("dp", 2),))
    head = [op for op in operators if not op.backward and op.call.target is torch.ops.aten.einsum.default][-1]
    lost = replace(operators, batch_factors={**operators.batch_factors, head.node: frozenset()})
    strategies = assign(operators, {}, mesh).strategies | {head.node: (Choice(),)}
    reasons = {r.reason for r in describe_replicated(lost, Assignment(mesh, strategies, {}, (), {})) if r.flops_share}
    assert "the batch does not reach it" in reasons and "nothing divides" not in reasons
