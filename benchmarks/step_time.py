"""Step time of emitted programs against the same parallelism written by hand in PyTorch, in the same processes.

    python benchmarks/step_time.py                        # all cases that this number of cores allows, as a table
    python benchmarks/step_time.py --json out.json        # rows with name, ratio, low, high, collectives of both
    python benchmarks/step_time.py --cases ddp-2 fsdp-2   # some cases; --list names all

Every case starts its own Gloo processes. Both programs train the same Llama on the same batch (``moe``: a Mixtral, with
its experts spread over the ranks of the data; ``long``: one sequence of 2,048 tokens, split, with heads split inside
attention: `by_hand_spread`); forward and backward of
one are timed right after those of the other, in alternating order, from a barrier to the last rank's end. A ratio is
the median over pairs of autopar's time over PyTorch's, with a bootstrap interval of 95 %; ``cpu`` is the same of the
CPU seconds that rank 0 takes, which other programs on the machine disturb less. Collectives are counted in one step of
each, with the bytes of the whole tensors that they move, and messages between pipeline stages, those of all ranks.
``eager-1`` is the untouched model on one process, ``-compiled`` are Inductor's programs of both.

Where the batch is split, autopar issues one collective of two numbers that PyTorch's programs lack: the loss and the
number of tokens that count in it. It returns the loss of the global batch, exact where ranks have different numbers of
tokens; theirs return the loss of their own samples. Nothing else can carry it: who calls the model may read the loss
before its backward, and after the loss no forward communicates. All together are no more than theirs: DDP broadcasts
the model's buffers, which here follow from its configuration, and FSDP2 reduces the gradients of embedding, last norm
and head by themselves, which here go with those of the first layer. From the last stage of a pipeline the loss goes
back with the last gradients, one more message of a number to every stage; theirs has it on the ranks of the last stage
alone. That all ranks were given alike batches is compared in the first steps, when shapes or modes change, and every
hundredth step, before the forward, by one more collective of two integers (with local batches in each).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import by_hand_spread as spread
import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar import Hints

#: Large enough that a step is mostly matrix products, small enough that twenty pairs take a minute.
LAYERS, HIDDEN, HEADS, VOCABULARY, SEQUENCE = 4, 256, 8, 1024, 128
SAMPLES, MICRO_BATCHES = 8, 8
PAIRS, WARM_UP = 24, 3

Step = Callable[[], Tensor]


def llama() -> LlamaForCausalLM:
    """The model of all cases, the same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        use_cache=False,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def batch() -> dict[str, Tensor]:
    """The global batch."""
    ids = torch.randint(0, VOCABULARY, (SAMPLES, SEQUENCE), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


# -- by hand -----------------------------------------------------------------------------------------------------------


def _own(data: DeviceMesh | None) -> dict[str, Tensor]:
    """A rank's part of the global batch."""
    if data is None:
        return batch()
    rank, n = data.get_local_rank(), data.size()
    return {name: t.chunk(n)[rank] for name, t in batch().items()}


def _step(model: nn.Module, own: dict[str, Tensor]) -> Step:
    def step() -> Tensor:
        loss: Tensor = model(**own).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step


def eager(compiled: bool) -> tuple[nn.Module, Step]:
    """The model itself."""
    model = llama()
    return model, _step(torch.compile(model) if compiled else model, batch())


def ddp(compiled: bool) -> tuple[nn.Module, Step]:
    """`DistributedDataParallel`."""
    model = nn.parallel.DistributedDataParallel(llama())
    used = torch.compile(model) if compiled else model
    return model, _step(used, _own(init_device_mesh("cpu", (dist.get_world_size(),))))


def fsdp(compiled: bool, *, reshard: bool = True) -> tuple[nn.Module, Step]:
    """`fully_shard` of every layer and of the rest."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama()
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    return model, _step(model, _own(mesh))


def _tensor_parallel(model: LlamaForCausalLM, mesh: DeviceMesh) -> None:
    """Megatron's split of attention and MLP; the vocabulary in the embedding and in the head."""
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
        **{f"model.layers.*.self_attn.{n}_proj": ColwiseParallel() for n in "qkv"},
        "model.layers.*.self_attn.o_proj": RowwiseParallel(),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)


def tp(compiled: bool) -> tuple[nn.Module, Step]:
    """`parallelize_module`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = llama()
    _tensor_parallel(model, mesh)
    used = torch.compile(model) if compiled else model
    return model, _step(used, _own(None))


def fsdp_tp(compiled: bool) -> tuple[nn.Module, Step]:
    """`fully_shard` over half of the ranks, `parallelize_module` over two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = llama()
    _tensor_parallel(model, mesh["tp"])
    for layer in model.model.layers:
        if compiled:
            layer.compile()
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, _step(model, _own(mesh["dp"]))


class Piece(nn.Module):
    """A stage of the model, cut by hand: ids [B, S] or hidden states [B, S, H] in, hidden states or logits out."""

    def __init__(self, whole: LlamaForCausalLM, stage: int, stages: int) -> None:
        super().__init__()
        model, per_stage = whole.model, LAYERS // stages
        self.embed = model.embed_tokens if stage == 0 else None
        self.layers = model.layers[stage * per_stage : (stage + 1) * per_stage]
        self.rotary = model.rotary_emb
        self.norm, self.head = (model.norm, whole.lm_head) if stage == stages - 1 else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        """One micro-batch."""
        x = self.embed(x) if self.embed is not None else x
        angles = self.rotary(x, torch.arange(x.shape[1])[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=angles)
        return self.head(self.norm(x)) if self.head is not None else x


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all tokens but the first of each sample."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def pipeline(compiled: bool, *, kind: Any) -> tuple[nn.Module, Step]:
    """`torch.distributed.pipelining` with a schedule of ``kind``, one stage a rank."""
    rank, n = dist.get_rank(), dist.get_world_size()
    model = Piece(llama(), rank, n)
    if compiled:
        model.compile()
    stage = pipelining.PipelineStage(model, rank, n, torch.device("cpu"))
    schedule = kind(stage, MICRO_BATCHES, loss_fn=next_token_loss)

    def step() -> Tensor:
        losses: list[Tensor] = []
        given = (batch()["input_ids"],) if rank == 0 else ()
        schedule.step(*given, target=batch()["labels"] if rank == n - 1 else None, losses=losses)
        return n * torch.stack(losses).mean().detach() if losses else torch.zeros(())

    return model, step


# -- cases -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One parallelism on so many processes: by hand, and the hints that ask autopar for it; of ``build()`` on
    ``given()``."""

    processes: int
    by_hand: Callable[[bool], tuple[nn.Module, Step]]
    hints: Hints
    compiled: bool = False
    build: Callable[[], nn.Module] = llama
    given: Callable[[], dict[str, Tensor]] = batch


def cases() -> dict[str, Case]:
    """All cases by name."""
    found = {"eager-1": Case(1, eager, Hints())}
    for n in (2, 4):
        found[f"ddp-{n}"] = Case(n, ddp, Hints(dp=n, zero=0))
        found[f"fsdp-{n}"] = Case(n, fsdp, Hints(dp=n, zero=3))
        keeps = partial(fsdp, reshard=False)
        found[f"fsdp-no-reshard-{n}"] = Case(n, keeps, Hints(dp=n, zero=3, reshard_after_forward=False))
        found[f"tp-{n}"] = Case(n, tp, Hints(tp=n))
    found["fsdp-tp-4"] = Case(4, fsdp_tp, Hints(dp=2, tp=2, zero=3))
    for n in (2, 4):
        for name, kind in (("1f1b", pipelining.Schedule1F1B), ("gpipe", pipelining.ScheduleGPipe)):
            hints = Hints(pp=n, schedule=name, micro_batch_size=SAMPLES // MICRO_BATCHES)
            found[f"{name}-{n}"] = Case(n, partial(pipeline, kind=kind), hints)
    for n in (2, 4):
        experts = Hints(dp=n, ep=n, zero=0)
        found[f"moe-{n}"] = Case(n, spread.moe, experts, build=spread.mixtral, given=spread.short_batch)
        heads = Hints(cp=n, zero=0, attention="heads")
        found[f"long-{n}"] = Case(n, spread.ulysses, heads, build=spread.long_llama, given=spread.long_batch)
    for name in ("eager-1", "ddp-2", "fsdp-2", "fsdp-no-reshard-2", "tp-2", "fsdp-tp-4", "1f1b-2", "gpipe-2"):
        found[f"{name}-compiled"] = replace(found[name], compiled=True)
    return found


@dataclass(frozen=True)
class Traffic:
    """Collectives of one step on the rank that has most, and the bytes of the whole tensors that they move; messages
    from stage to stage and their bytes, of all ranks."""

    count: int
    bytes: int
    sends: int
    sent: int


@dataclass(frozen=True)
class Row:
    """The ratio of a case with its interval, that of CPU seconds, both median times in seconds, and what both
    communicate."""

    name: str
    ratio: float
    low: float
    high: float
    cpu: float
    autopar_seconds: float
    by_hand_seconds: float
    autopar: Traffic
    by_hand: Traffic
    pairs: int


class _Count(TorchDispatchMode):
    """Counts collectives and messages, whichever way they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.bytes, self.sends, self.sent = 0, 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        space, _, operator = name.partition("::")
        if space not in ("c10d", "_c10d_functional"):
            return out
        if operator == "send":
            self.sends += 1
            self.sent += _nbytes(args)
        elif not any(word in operator for word in ("wait", "barrier", "recv")):
            self.count += 1
            given, made = _nbytes(args), _nbytes(out)
            self.bytes += given if "reduce_scatter" in operator else max(made, given if "all_reduce" in operator else 0)
        return out


def _nbytes(values: Any) -> int:
    return sum(t.nbytes for t in torch.utils._pytree.tree_leaves(values) if isinstance(t, Tensor))


def _clear(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = None


def _timed(model: nn.Module, step: Step) -> tuple[float, float]:
    """Seconds of a forward and backward, until the last rank is done, and this rank's CPU seconds."""
    _clear(model)
    dist.barrier()
    began = time.perf_counter(), time.process_time()
    step()
    busy = time.process_time() - began[1]
    dist.barrier()
    return time.perf_counter() - began[0], busy


def _traffic(model: nn.Module, step: Step) -> Traffic:
    _clear(model)
    with _Count() as counter:
        step()
    found = torch.tensor([counter.count, counter.bytes, counter.sends, counter.sent])
    dist.all_reduce(found[:2], dist.ReduceOp.MAX)
    dist.all_reduce(found[2:])
    return Traffic(*found.tolist())


def measure(name: str, case: Case) -> Row:
    """Time one case in this process group; every rank gets rank 0's row."""
    theirs, their_step = case.by_hand(case.compiled)
    own = case.given()
    mine: Any = autopar.parallelize(case.build(), hints=case.hints, example_inputs=own, compile=case.compiled)
    my_step = _step(mine, own) if mine.plan.schedule is None else lambda: mine.train_step(**own)
    losses = [float(step()) for step in (my_step, their_step)]
    for _ in range(WARM_UP):
        _timed(mine, my_step), _timed(theirs, their_step)
    pairs, busy = np.empty((2, PAIRS, 2))
    for i in range(PAIRS):
        order = ((0, mine, my_step), (1, theirs, their_step))
        for k, model, step in order if i % 2 == 0 else reversed(order):
            pairs[i, k], busy[i, k] = _timed(model, step)
    counts = [_traffic(mine, my_step), _traffic(theirs, their_step)]
    _check(name, losses)
    ratios = pairs[:, 0] / pairs[:, 1]
    generator = np.random.default_rng(0)
    medians = np.median(generator.choice(ratios, (2000, PAIRS)), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    cpu = float(np.median(busy[:, 0] / busy[:, 1]))
    seconds = np.median(pairs, axis=0)
    return Row(name, float(np.median(ratios)), float(low), float(high), cpu, *map(float, seconds), *counts, PAIRS)


def _check(name: str, losses: list[float]) -> None:
    """Both programs compute the same: over all ranks their mean losses agree."""
    found = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(found)
    mine, theirs = (found / dist.get_world_size()).tolist()
    if abs(mine - theirs) > 1e-4 * abs(theirs):
        raise RuntimeError(f"{name}: the losses differ, {mine} and {theirs}: the two programs do different things")


def worker(name: str, path: str) -> None:
    """One process of a case."""
    dist.init_process_group("gloo")
    row = measure(name, cases()[name])
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(asdict(row)))
    dist.destroy_process_group()


def run(name: str) -> dict[str, Any]:
    """A case in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                   str(cases()[name].processes), __file__, "--worker", name, str(path)]  # fmt: skip
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        row: dict[str, Any] = json.loads(path.read_text())
        return row


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table("case", "ratio", "95 %", "cpu", "autopar", "by hand", "collectives", "MiB", "messages", "MiB")
    for row in rows:
        mine, theirs = row["autopar"], row["by_hand"]
        table.add_row(
            row["name"],
            f"{row['ratio']:.3f}",
            f"{row['low']:.3f} to {row['high']:.3f}",
            f"{row['cpu']:.3f}",
            f"{row['autopar_seconds'] * 1e3:.0f} ms",
            f"{row['by_hand_seconds'] * 1e3:.0f} ms",
            f"{mine['count']} / {theirs['count']}",
            f"{mine['bytes'] / 2**20:.1f} / {theirs['bytes'] / 2**20:.1f}",
            f"{mine['sends']} / {theirs['sends']}",
            f"{mine['sent'] / 2**20:.1f} / {theirs['sent'] / 2**20:.1f}",
        )
    Console(width=120).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=cases(), default=list(cases()), metavar="CASE")
    parser.add_argument("--list", action="store_true", help="name the cases and end")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too, after every case")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker)
        return
    if options.list:
        print("\n".join(cases()))
        return
    rows: list[dict[str, Any]] = []
    for name in options.cases:
        began = time.monotonic()
        rows.append(run(name))
        print(f"{name}: ratio {rows[-1]['ratio']:.3f}, in {time.monotonic() - began:.0f} s", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)


if __name__ == "__main__":
    main()
