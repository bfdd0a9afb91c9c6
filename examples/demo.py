"""Fine-tunes a real pretrained model in one process and under two plans of autopar, and compares the numbers.

``make demo`` runs this file with plain python: it prepares the model and starts itself again under torchrun, with four
processes on CPU (Gloo), or one for each of up to four CUDA devices (NCCL). Once the model is prepared,
``torchrun --nproc-per-node 4 examples/demo.py`` does the same.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import smollm2
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import autopar

STEPS, BATCH, SEQ_LEN = 5, 4, 256
LEARNING_RATE = 1e-4
PROMPT = "Write one sentence about why a train needs several wagons."

# Of float32, one process against several. Adam divides each gradient by its own size, so rounding in gradients close
# to zero moves weights by a part of the learning rate: hence the looser bound on how far training moved them.
LOSS_BOUND, MOVE_BOUND = 1e-4, 5e-2

Batch = dict[str, torch.Tensor]
Weights = dict[str, torch.Tensor]


def main() -> None:
    if "RANK" not in os.environ:
        launch()
    device = start()
    tokenizer = smollm2.load_tokenizer()
    batches = [{k: v.to(device) for k, v in b.items()} for b in smollm2.batches(tokenizer, STEPS, BATCH, SEQ_LEN)]
    workload = autopar.Workload(global_batch=BATCH, seq_len=SEQ_LEN)

    losses: dict[str, list[float]] = {}
    weights: dict[str, Weights] = {}
    losses["one process"], weights["one process"] = reference(batches, device)

    for name, hints in plans().items():
        say(f"\n[bold]{name}[/]: planning, and rewriting the model")
        began = time.perf_counter()
        model = autopar.parallelize(smollm2.load_model(), workload=workload, hints=hints)
        say(f"ready in {time.perf_counter() - began:.0f} s\n")
        if dist.get_rank() == 0:
            print(model.plan.report(), flush=True)
        show_bytes(name, model.parameters(), device)
        losses[name] = train(model, batches)
        weights[name] = gather(model)
        del model

    agree = dist.get_rank() != 0 or (compare_losses(losses) & compare_weights(weights))
    if dist.get_rank() == 0:
        last, trained = list(weights.items())[-1]
        say(f"\nThe weights trained under [bold]{last}[/], gathered to an ordinary model, answer:")
        say(f"  [dim]{PROMPT}[/]\n  {generate(trained, tokenizer)}\n")
    dist.barrier()
    dist.destroy_process_group()
    if not agree:
        sys.exit("The plans do not give the numbers of one process.")


def plans() -> dict[str, autopar.Hints | None]:
    """What is trained besides the reference: autopar's own choice, and one in which weights are really cut."""
    tp = min(2, dist.get_world_size())
    return {"free": None, f"tp={tp}, zero=3": autopar.Hints(tp=tp, zero=3)}


# ---- processes ----


def launch() -> None:
    """Prepare the model, then become torchrun. Does not return."""
    if not smollm2.is_prepared():
        print("Preparing SmolLM2-135M-Instruct in .demo/ (once, half a minute)", flush=True)
        smollm2.prepare()
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 4
    processes = 4 if devices >= 4 else 2 if devices >= 2 else 1  # a power of two, so that the batch divides
    if not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), __file__]
    print("$ torchrun", *command[2:-1], "examples/demo.py", flush=True)
    os.execv(sys.executable, [sys.executable, *command])


def start() -> torch.device:
    """Join the process group and say what it runs on. Returns this rank's device."""
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    # Long, since the other ranks wait while rank 0 trains the reference alone.
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(minutes=30),
                            device_id=device if device.type == "cuda" else None)
    say(f"{dist.get_world_size()} processes on {device.type}, {dist.get_backend()}; PyTorch {torch.__version__}")
    if dist.get_world_size() == 1:
        say("With one device there is nothing to split: the plans below are trivial.")
    return device


def say(text: str) -> None:
    """Print for a person, on rank 0 only."""
    if dist.get_rank() == 0:
        console().print(text, highlight=False)


def console() -> Console:
    """The terminal's own width where there is one, wide enough for the tables where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=120)


# ---- training ----


def train(model: torch.nn.Module, batches: Iterable[Batch]) -> list[float]:
    """The plain loop, the same for an ordinary and a parallel module. Returns the loss before each update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step, batch in enumerate(batches, 1):
        began = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        say(f"  step {step}: loss {losses[-1]:.6f}  ({time.perf_counter() - began:.1f} s)")
    return losses


def reference(batches: list[Batch], device: torch.device) -> tuple[list[float], Weights]:
    """Losses and trained weights of the untouched model in eager PyTorch, on rank 0; empty elsewhere."""
    losses: list[float] = []
    weights: Weights = {}
    if dist.get_rank() == 0:
        say("\n[bold]one process[/]: the untouched model in eager PyTorch, the other ranks wait")
        threads = torch.get_num_threads()
        if device.type == "cpu":
            torch.set_num_threads(os.cpu_count() or 1)
        model = smollm2.load_model().to(device)
        losses = train(model, batches)
        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        torch.set_num_threads(threads)
    dist.barrier()
    return losses, weights


def show_bytes(name: str, parameters: Iterable[Any], device: torch.device) -> None:
    """Print the bytes of parameters that ranks hold; each parameter is a DTensor."""
    parameters = list(parameters)
    local = sum(p.to_local().nbytes for p in parameters)
    every = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(every, torch.tensor([local], dtype=torch.int64, device=device))
    whole = sum(p.numel() * p.element_size() for p in parameters)
    ranks = ", ".join(f"{int(b) / 1e6:.1f}" for b in every)
    say(f"Bytes of parameters on each rank under {name}: {ranks} MB; the whole model has {whole / 1e6:.1f} MB")


def gather(model: torch.nn.Module) -> Weights:
    """Every parameter whole, by its own name: {fqn: tensor} on the CPU of rank 0, empty elsewhere."""
    weights: Weights = {}
    for name, parameter in model.named_parameters():
        whole = parameter.detach().full_tensor()  # a collective: every rank takes part
        if dist.get_rank() == 0:
            weights[name] = whole.cpu()
    return weights


# ---- what a person sees at the end ----


def compare_losses(losses: dict[str, list[float]]) -> bool:
    """Print the losses side by side; True where they agree to ``LOSS_BOUND``."""
    table = Table("step", title="\nLoss, step by step", title_justify="left")
    for name in losses:
        table.add_column(name, justify="right")
    for step, row in enumerate(zip(*losses.values(), strict=True), 1):
        table.add_row(str(step), *(f"{loss:.7f}" for loss in row))
    truth, *others = (torch.tensor(column, dtype=torch.float64) for column in losses.values())
    worst = [float(((other - truth) / truth).abs().max()) for other in others]  # a NaN stays a NaN, and disagrees
    table.add_section()
    table.add_row("largest relative difference", "", *(f"{w:.1e}" for w in worst))
    console().print(table)
    return all(w <= LOSS_BOUND for w in worst)


def compare_weights(weights: dict[str, Weights]) -> bool:
    """Print how far trained weights differ from the reference's; True where all moved alike (``MOVE_BOUND``).

    Five steps change weights little, so the difference is set against two things: the weights, and how far training
    moved them. An untrained model would look close by the first and be off by 1 in the second.
    """
    before = dict(smollm2.load_model().named_parameters())
    truth, *_ = weights.values()
    names = list(truth)
    size = torch.stack([truth[k].norm() for k in names])
    moved = torch.stack([(truth[k] - before[k].detach()).norm() for k in names]).clamp(min=1e-12)
    table = Table("plan", "largest relative difference of a tensor", "the same, over how far training moved it",
                  title="\nTrained weights, against one process", title_justify="left")
    agree = True
    for name, trained in list(weights.items())[1:]:
        if trained.keys() != truth.keys():
            sys.exit(f"The parameters under {name} have other names: {sorted(trained.keys() ^ truth.keys())[:5]}")
        off = torch.stack([(trained[k] - truth[k]).norm() for k in truth])
        of_weight, of_move = off / size, off / moved
        table.add_row(name, *(f"{float(x.max()):.1e}  ({names[int(x.argmax())]})" for x in (of_weight, of_move)))
        agree &= float(of_move.max()) <= MOVE_BOUND
    console().print(table)
    return agree


def generate(weights: Weights, tokenizer: Any) -> str:
    """What an ordinary transformers model with these weights answers to ``PROMPT``, greedily."""
    model = smollm2.load_model().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=48, do_sample=False)[0, prompt["input_ids"].shape[1]:]
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


if __name__ == "__main__":
    main()
