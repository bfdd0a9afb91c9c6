"""Golden plans: for models and clusters that people know well, what a person who knows Megatron, FSDP and the Llama 3
paper would choose, argued in bytes and seconds before the planner was asked.

Every case has properties on which experts agree, and where one was published the expert's own plan, pinned by hints and
priced by the same planner: what the search finds must not be slower, and may be more than 15 % faster only by the
mechanism that the test names. Predicted seconds stay between what the chip cannot beat (`CEILING` of its peak) and what
was published. Published step times are rows of benchmarks/data/published_runs.csv, named by run_id; the Llama 3 paper
is arXiv:2407.21783, table 4. Where the planner showed an expectation to be wrong, the docstring says so.

Bytes a parameter, with fp32 masters used in bf16: 4 (master) + 8 (AdamW) + 4 (gradient, added up in fp32) + 2 (copy in
bf16) = 18. Activations of a Llama block that nothing is recomputed of: about 34 s b h bytes (Korthikanti et al.,
arXiv:2205.05198, without the attention matrix).
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import autopar
from autopar import Cluster, Hints, Workload
from autopar.errors import InfeasibleError
from autopar.plan import Plan
from autopar.solver.outer import ORDINARY

#: Of the peak of a chip, what no published run of a dense model in bf16 has reached in a whole step (the best are at
#: 0.62: dgxc-114).
CEILING = 0.8

#: What the search may gain over an expert's plan without a word, and how far predictions may be from published times.
UNEXPLAINED, PREDICTED = 1.15, 0.2

#: Llama 3's shapes (arXiv:2407.21783, table 3).
SHAPES: dict[str, dict[str, int]] = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}


def llama(vocab_size: int = 128256, **shape: int) -> torch.nn.Module:
    """An untied Llama in fp32 on meta."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocab_size, max_position_embeddings=131072, tie_word_embeddings=False, use_cache=False,
        **{"num_key_value_heads": 8, **shape},
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@dataclass(frozen=True)
class Case:
    """A Llama 3 in bf16 with fp32 masters, compiled, on H100s: ``batch`` sequences of 8192 tokens a step."""

    shape: str
    cluster: str
    batch: int
    seq_len: int = 8192

    @property
    def fastest(self) -> float:
        """Seconds of a step at `CEILING` of the peak: 6 FLOPs a token and weight but those of the embedding, and
        6 h s a layer and token of causal attention."""
        s = SHAPES[self.shape]
        h, f, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
        kv = 8 * h // s["num_attention_heads"]
        weights = layers * (2 * h * h + 2 * h * kv + 3 * h * f) + 128256 * h
        flops = 6 * (weights + layers * h * self.seq_len) * self.batch * self.seq_len
        return flops / (Cluster.parse(self.cluster).size * 989e12 * CEILING)


@functools.cache
def planned(case: Case, hints: Hints | None = None) -> Plan:
    """What the planner finds, freely or under hints."""
    workload = Workload(global_batch=case.batch, seq_len=case.seq_len, param_dtype="bfloat16")
    return autopar.plan(llama(**SHAPES[case.shape]), case.cluster, workload=workload, hints=hints, compile=True)


def state_ranks(plan: Plan) -> int:
    """Over how many ranks what rests (parameters and optimizer state) is split, of a pipeline stage."""
    over = (plan.zero_group_size or plan.degrees["dp"]) * plan.degrees["cp"] if plan.zero else 1
    return over * plan.degrees["tp"]


def tp_is_inside_a_host(plan: Plan) -> bool:
    """The ranks of tp are neighbours, so it is enough that there are as many as divide a host."""
    return Cluster.from_dict(plan.cluster).devices_per_host % plan.degrees["tp"] == 0


def check_plausible(case: Case, plan: Plan, published: float) -> None:
    """It fits, its parts add up, it is neither faster than a chip can be nor slower than what people reached, and says
    what came second."""
    assert plan.peak_memory <= Cluster.parse(case.cluster).device.memory_bytes
    assert sum(plan.breakdown.values()) == pytest.approx(plan.step_time, rel=1e-6)
    assert case.fastest <= plan.step_time <= published * (1 + PREDICTED)
    factors = [float(x) for a in plan.alternatives for x in re.findall(r"([\d.]+)x", a.reason)]
    assert plan.alternatives and max(factors, default=1.0) < 100  # of what is next to nothing no multiple is said


def exchanges(plan: Plan) -> float:
    """Seconds a step of the collectives over tp and cp that activations go through: autopar issues them whole, between
    the operators that need them, so that all of them are exposed."""
    return sum(c.seconds for c in plan.collectives if c.purpose == "activations" and c.axis in ("tp", "cp"))


def check_expert(plan: Plan, expert: Plan, published: float | None = None, hidden: bool = False) -> None:
    """What was found is at least as fast as an expert's plan, up to what the planner gives away for a plan without a
    pipeline, and not faster than the expert's by more than is explained. The expert's plan is priced as published;
    where the expert's system has `exchanges` ``hidden`` behind products and attention, without these."""
    ordinary = plan.schedule is None and expert.schedule is not None
    assert plan.step_time <= expert.step_time * (1 + ORDINARY if ordinary else 1 + 1e-9)
    seconds = expert.step_time - (exchanges(expert) if hidden else 0.0)
    assert seconds <= plan.step_time * UNEXPLAINED
    if published is not None:
        assert seconds == pytest.approx(published, rel=PREDICTED)


# ---- Llama 3 on H100s ----

SMALL = Case("8B", "h100-sxm:1x8", 128)
MIDDLE = Case("8B", "h100-sxm:8x8", 1024)
LARGE = Case("8B", "h100-sxm:64x8", 512)
SEVENTY = Case("70B", "h100-sxm:8x8", 128)
HUGE = Case("405B", "h100-sxm:128x8", 512)
WHOLE = Case("405B", "h100-sxm:2048x8", 2048)


@pytest.mark.slow
def test_8b_on_8() -> None:
    """One host, 128 sequences. 8.03 B parameters take 145 GB a replica with everything (18 bytes each), a device has
    85: state has to be split. Over 8 ranks it is 16 GB (2 bytes of the copy beside), and the sums of gradients at most
    32: no pipeline is needed, whose bubble would be a loss; tensor parallelism is not needed either, and each of its
    exchanges (4 a layer of 67 MB a sequence, over NVLink about 0.15 ms each, 20 ms a sequence of 750) stands in the
    way of the compute where those of data parallelism are behind it. So: pp 1, tp 1, what rests split over all 8.
    Whether sequences are split (cp 2) or some blocks are recomputed to make room for activations (32 x 34 x 8192 x 4096
    = 36 GB a sequence) experts differ about: NVIDIA takes cp 2 with ZeRO-1 (dgxc-001, 12.91 s, dgxc-114, 12.27 s),
    torchtitan FSDP with selective recomputation (titan-001)."""
    plan = planned(SMALL)
    assert (plan.degrees["pp"], plan.degrees["tp"]) == (1, 1)
    assert plan.zero >= 1 and state_ranks(plan) == 8
    assert plan.recompute != "full"
    check_plausible(SMALL, plan, 12.91)


@pytest.mark.slow
def test_8b_on_64() -> None:
    """Eight hosts, eight times the batch: each device does what it did on one host, and its share of the network takes
    little (32 GB of gradients once a step, over 8 NICs of a host at 50 GB/s: 0.16 s of 13). NVIDIA's plan and time
    stay (dgxc-004, 13.08 s, against 12.91 on one host). So again pp 1 and tp 1; state over at least a host. ZeRO-3
    over all 64 with small micro-batches would gather 16 GB twice a micro-batch at 400 GB/s a host and reduce 32 (0.16 s
    beside 0.75 of compute a sequence): hidden, so it is not excluded. A step is not more than 3 % slower than on one
    host."""
    plan = planned(MIDDLE)
    assert (plan.degrees["pp"], plan.degrees["tp"]) == (1, 1)
    assert plan.zero >= 1 and state_ranks(plan) >= 8
    assert plan.recompute != "full"
    assert plan.step_time <= 1.03 * planned(SMALL).step_time
    check_plausible(MIDDLE, plan, 13.08)


@pytest.mark.slow
def test_8b_on_512() -> None:
    """Llama 3's first batch, 4 M tokens: 512 sequences on 512 devices, one each, so that nothing amortises the exchange
    of a step. Its compute is 0.75 s. Whole gradients reduced and copies gathered over all 512 move 32 + 16 GB through a
    host's 8 NICs (400 GB/s): 0.12 s, and a ring of 512 takes 511 steps of some microseconds for each of its hundred
    collectives, 0.2 s in all; within hosts (hybrid ZeRO) gathers cost a tenth and 8 hosts' worth less latency, and an
    eighth of the gradient each device reduces across (4 GB twice over one NIC of 50 GB/s: 0.16 s). Both fit behind the
    compute for the most part, and tensor or pipeline parallelism would only add exchanges that do not. So pp 1, tp 1,
    state over at least a host, and a step at most 1.25 times that of one host for the same tokens a device (torchtitan
    loses 2 % from 8 to 128 with two sequences a device: titan-003 and titan-006)."""
    plan = planned(LARGE)
    assert (plan.degrees["pp"], plan.degrees["tp"]) == (1, 1)
    assert plan.zero >= 1 and state_ranks(plan) >= 8
    assert plan.step_time <= 1.25 / 16 * planned(SMALL).step_time
    check_plausible(LARGE, plan, 12.91 / 16 * 1.1)


@pytest.mark.slow
def test_70b_on_64() -> None:
    """70.6 B parameters take 1.27 TB; 64 devices have 5.4. NVIDIA takes tp 4, pp 4 with 5 stages a rank, cp 2 and
    ZeRO-1 (dgxc-011, 14.72 s: nothing recomputed); FSDP over all 64 alone with 8192 tokens a device at a time was as
    fast (dgxc-089, Llama 2: 1170 tokens/s a device of sequences of 4096 against 1113). So experts differ about pipeline
    or ZeRO-3. They agree that tp stays inside a host, and that blocks are not all recomputed: that costs a third of the
    compute (3 s), and state split over 64 ranks leaves 65 GB a device. Tensor parallelism of 8 over a host with its
    four exchanges a layer is not needed at this size: tp at most 4.

    The last but one was wrong. With a sequence of 8192 a device at a time every block keeps 2.3 GB, 182 in all; what
    FSDP over 64 has room for is a few blocks, so 77 of 80 are recomputed, and as it exchanges nothing that is exposed
    it still is level with NVIDIA's pipeline, as dgxc-089 is: 7.0 s for sequences of half the length, which is 14 s here
    and 14.5 with attention over twice the length."""
    plan = planned(SEVENTY)
    assert plan.degrees["tp"] <= 4 and tp_is_inside_a_host(plan)
    assert state_ranks(plan) * plan.degrees["pp"] >= 32
    assert plan.recompute != "full"
    check_plausible(SEVENTY, plan, 14.5)


@pytest.mark.slow
def test_405b_on_1024() -> None:
    """405.9 B parameters take 7.3 TB. Without a pipeline every device computes 4096 tokens' worth of all 126 layers at
    once, however batch, sequence and matrices are split: 34 x 4096 x 16384 x 126 = 287 GB of activations, so nearly all
    would be recomputed (a third of 20 s), or with micro-batches the shards of 810 GB gathered again and again over the
    network. A pipeline holds one sequence over its depth: with tp 8, cp 2 36 GB, beside 42 of state. So tp 4 or 8
    inside a host, pp at least 4, no full recomputation; and as a rank has few micro-batches for pp stages, interleaved
    or zero-bubble, not 1F1B. NVIDIA's plan: tp 8, pp 8 with 8 stages a rank, cp 2, ZeRO-1, 512 sequences (dgxc-140,
    19.84 s).

    That was an expectation of a system that has tp's exchanges beside its products, as theirs does (`HIDDEN`). Where
    they are issued whole a pipeline with tp 8 takes 27.7 s, and ZeRO-3 over 512 ranks with tp 2 and 110 of 126 blocks
    made again 21.7: a third of the compute again, but little that is exposed. Without its exchanges the pipeline would
    be level with that, so of what is found is expected: tp inside a host, what rests split over at least 512 ranks, not
    all blocks made again, and no more than an eighth between it and NVIDIA's plan without exchanges."""
    plan, expert = planned(HUGE), planned(HUGE, EXPERTS["NVIDIA's 405B on 1024"][1])
    check_plausible(HUGE, plan, 19.84)
    assert tp_is_inside_a_host(plan) and state_ranks(plan) * plan.degrees["pp"] >= 512
    assert plan.recompute != "full"
    assert expert.step_time - exchanges(expert) == pytest.approx(plan.step_time, rel=1 / 8)


@pytest.mark.slow
def test_405b_on_16384() -> None:
    """The Llama 3 paper's run: 2048 sequences of 8192 on 16,384 devices: tp 8, pp 16, dp 128, 400 TFLOP/s a device of
    its count of FLOPs, which is 6.5 s. A device has 1024 tokens' worth of all layers: 72 GB of activations without
    recomputation, beside 6 GB or more of state: nearly, but not quite, enough for no pipeline. Gathering shards of tp 8
    (101 GB over one NIC of 50 GB/s: 2 s a direction, and 4 s of gradients in fp32) beside 5 s of compute is no better
    than a bubble. So experts use a pipeline; tp 4 or 8 inside a host, pp at least 4; what rests is split over dp as
    well; not all is recomputed."""
    plan = planned(WHOLE)
    assert plan.degrees["tp"] in (4, 8) and plan.degrees["pp"] >= 4
    assert plan.zero >= 1 and plan.recompute != "full"
    check_plausible(WHOLE, plan, 6.5)


#: Plans that people run: the case, what they choose, and the seconds of a step that they published.
EXPERTS = {
    "NVIDIA's 8B on 8": (SMALL, Hints(pp=1, tp=1, cp=2, zero=1, micro_batch_size=1), 12.91),  # dgxc-001
    "torchtitan's 8B on 8": (SMALL, Hints(pp=1, tp=1, cp=1, zero=3, recompute="selective"), None),
    "NVIDIA's 8B on 64": (MIDDLE, Hints(pp=1, tp=1, cp=2, zero=1, micro_batch_size=1), 13.08),  # dgxc-004
    "FSDP of 8B on 512": (LARGE, Hints(pp=1, tp=1, cp=1, zero=3), None),
    "HSDP of 8B on 512": (LARGE, Hints(pp=1, tp=1, cp=1, zero=3, zero_group_size=8), None),
    "NVIDIA's 70B on 64": (
        SEVENTY, Hints(pp=4, tp=4, cp=2, zero=1, micro_batch_size=1, schedule="interleaved"), 14.72,  # dgxc-011
    ),
    "FSDP of 70B on 64": (SEVENTY, Hints(pp=1, tp=1, cp=1, zero=3), 14.5),  # dgxc-089, see test_70b_on_64
    "NVIDIA's 405B on 1024": (
        HUGE, Hints(pp=8, tp=8, cp=2, zero=1, micro_batch_size=1, schedule="interleaved"), 19.84,  # dgxc-140
    ),
    "Meta's 405B on 16384": (WHOLE, Hints(pp=16, tp=8, cp=1), 6.5),  # the Llama 3 paper, table 4
}  # fmt: skip


#: Whose published runs have the exchanges of activations over tp and cp beside products and attention: Transformer
#: Engine cuts both into pieces (user buffers, ``ub_tp_comm_overlap`` on in dgxc-011; its ring attention over cp).
#: autopar emits them whole, and does not promise what its runtime does not do: as emitted these plans take 16.3, 19.1
#: and 27.7 s where 12.91, 14.72 and 19.84 were published, of which 1.1, 3.7 and 5.9 s are such exchanges. What is left
#: over the published times is that sums of gradients are added up beside the products instead of in them (1 s in the
#: first, 1.1 in the second), and operators that are made again where activations are a third more (first and last).
HIDDEN = ("NVIDIA's 8B on 8", "NVIDIA's 8B on 64", "NVIDIA's 70B on 64", "NVIDIA's 405B on 1024")


@pytest.mark.slow
@pytest.mark.parametrize("name", list(EXPERTS))
def test_experts(name: str) -> None:
    """An expert's plan is priced as it was published, and what the search finds is not slower, nor faster by more than
    15 %; without the exchanges that the expert's system hides and this one does not (`HIDDEN`). What experts leave open
    is left to the planner, for the expert's best."""
    case, hints, published = EXPERTS[name]
    check_expert(planned(case), planned(case, hints), published, name in HIDDEN)


# ---- small clusters ----


def test_gpt2_on_four_cpus() -> None:
    """GPT-2 (124 M parameters, fp32) on four processes of one host that exchange over Gloo, 32 samples of 1024 tokens.
    Data parallelism reduces 0.5 GB of gradients a step (at about 1 GB/s 0.75 s, beside a minute of compute); tensor
    parallelism exchanges 4 activations of 100 MB a layer, 4.8 GB; a pipeline waits in its bubble, and context
    parallelism exchanges keys and values (12 layers of 200 MB) for nothing. State of 2 GB fits beside 4 GiB's rest if
    micro-batches keep the logits (206 MB a sample, some times) small; splitting it saves 0.4 s of optimizer and costs
    0.6 s in slower reduce-scatters: DDP, as everybody does it."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device("meta"):
        model = GPT2LMHeadModel(GPT2Config(use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    plan = autopar.plan(model, "cpu:4", workload=Workload(global_batch=32, seq_len=1024))
    assert plan.degrees == {"pp": 1, "dp": 4, "cp": 1, "tp": 1}
    assert plan.zero == 0 and plan.recompute == "none"
    assert plan.num_micro_batches > 1


CARD = Cluster.parse("rtx4090:1")
LONG = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8, "num_attention_heads": 16}


def of_a_long_sequence(cluster: Cluster, hints: Hints | None = None) -> Plan:
    """One sequence of 40,960 tokens and 445 M parameters in 8 blocks."""
    model = llama(vocab_size=8192, **LONG, num_key_value_heads=16)
    workload = Workload(global_batch=1, seq_len=40960, param_dtype="bfloat16")
    return autopar.plan(model, cluster, workload=workload, hints=hints)


def blocks_again(plan: Plan) -> int:
    """How many of the 8 blocks are made again."""
    mode, _, count = plan.recompute.partition(":")
    assert mode == "full"
    return int(count or 8)


def test_fits_only_with_recomputation() -> None:
    """One card of 25 GB, one sequence of 40,960 tokens, 445 M parameters. State 8 GB. Activations of 38 h = 78 kB a
    token and block (16 h + 8 f bytes in bf16) are 25 GB for 8 blocks; with only cheap operators made again (inputs of
    matrix products and attention stay: 11 h + 4 f = 22 h) 15 GB; logits of 8192 words and what the loss makes of them
    take about 14 bytes each, 4.7 GB. Neither fits. Full recomputation keeps 2 h a token and block and one block's own
    while it runs: 8 + 1.3 + 3.2 + 4.7 + 1 of context = 18 GB. So blocks are recomputed, not fewer than 4 of 8, and none
    that need not be."""
    plan = of_a_long_sequence(CARD)
    assert blocks_again(plan) in range(4, 9)
    assert plan.peak_memory <= CARD.device.memory_bytes


@pytest.mark.slow
def test_no_more_is_recomputed_than_has_to_be() -> None:
    """Nothing less than what `test_fits_only_with_recomputation` finds fits, and a block that is recomputed costs its
    forward again, a third of its step at most, over what the same card with more memory would take."""
    plan = of_a_long_sequence(CARD)
    for less in ("none", "selective", f"full:{blocks_again(plan) - 2}"):
        with pytest.raises(InfeasibleError):
            of_a_long_sequence(CARD, Hints(recompute=less))
    table = CARD.to_dict()
    roomy = of_a_long_sequence(Cluster.from_dict({**table, "device": {**table["device"], "memory_gib": 100}}))
    assert roomy.recompute == "none"
    assert 1 < plan.step_time / roomy.step_time < 1 + blocks_again(plan) / 8 / 3


@pytest.mark.slow
def test_fits_only_with_zero_3() -> None:
    """Sixteen cards of 25 GB in two hosts and data parallelism alone (what an FSDP user has), 10.8 B parameters in 12
    blocks. What ZeRO-2 keeps whole is the copy in bf16, 21.6 GB, beside 10.8 of the rest: too much. ZeRO-1 keeps
    gradients too, and ZeRO-0 all. ZeRO-3 keeps 10.8 GB, and the block in use and the next one (1.7 GB each) with the
    gradient of one (5 GB): about 20. Split inside hosts only (groups of 8) it would be 21.6 and those: too much as
    well, so all 16 share."""
    shape = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 12, "num_attention_heads": 64}
    model = llama(vocab_size=32000, **shape)
    workload = Workload(global_batch=16, seq_len=1024, param_dtype="bfloat16")
    plan = autopar.plan(model, "rtx4090:2x8", workload=workload, hints=Hints(pp=1, cp=1, tp=1))
    assert plan.zero == 3 and plan.zero_group_size is None and state_ranks(plan) == 16
    assert all(p.copy == "use" for p in plan.parameters.values())
    for less in ({"zero": 2}, {"zero": 3, "zero_group_size": 8}):
        with pytest.raises(InfeasibleError):
            autopar.plan(model, "rtx4090:2x8", workload=workload, hints=Hints(pp=1, cp=1, tp=1, **less))


def ethernet(hosts: int, devices: int) -> Cluster:
    """H100s in hosts with NVLink, each device's share of the network 10 Gb/s."""
    table: dict[str, Any] = Cluster.parse(f"h100-sxm:{hosts}x{devices}").to_dict()
    return Cluster.from_dict({**table, "device": {**table["device"], "network_gbs": 1.25}})


@pytest.mark.slow
def test_slow_network_keeps_tp_inside_hosts() -> None:
    """Four hosts of two H100s over 10 Gb/s a device; 4 blocks of an 8B, 8 sequences of 2048. Compute is about 0.05 s,
    so the network decides. Tensor parallelism over all 8: four all-reduces a block of 134 MB at 2.5 GB/s a host (the
    ring leaves and enters it once): 16 x 0.09 = 1.5 s. Data parallelism across hosts: 7.7 GB of gradients (half of that
    with tp 2): 4.6 s and more. A pipeline across hosts sends 17 MB a micro-batch and direction: 8 x 2 x 0.013 = 0.2 s
    for each cut, and they overlap. So: pp 4 or 8, no data parallelism across hosts, tp at most 2, the ranks of a host;
    and at least three times as fast as tp 8.

    pp 4 with tp 2 inside hosts is within 15 % of what is found: its ranks send half of every activation each, split by
    sequence at the cut, as Megatron scatters it over tp before it is sent (arXiv:2104.04473, section 4.1). With dp 2
    inside hosts each rank sends half of the micro-batches, as much in all, but waits longer for the first of them."""
    model = llama(**{**SHAPES["8B"], "num_hidden_layers": 4})
    workload = Workload(global_batch=8, seq_len=2048, param_dtype="bfloat16")

    def made(hints: Hints | None = None) -> Plan:
        return autopar.plan(model, ethernet(4, 2), workload=workload, hints=hints, compile=True)

    plan = made()
    assert plan.degrees["tp"] <= 2 and plan.degrees["pp"] >= 4
    expert = made(Hints(pp=4, tp=2))
    check_expert(plan, expert)
    data = made(Hints(pp=4, dp=2))
    assert data.timing is not None and expert.timing is not None
    assert (data.num_micro_batches, expert.num_micro_batches) == (4, 8)
    assert expert.timing.up[0] < 0.6 * data.timing.up[0]  # a micro-batch of either is one sample
    assert made(Hints(tp=8)).step_time >= 3 * plan.step_time
    assert made(Hints(pp=1, tp=2, cp=1)).step_time >= 3 * plan.step_time
