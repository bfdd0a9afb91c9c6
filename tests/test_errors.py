"""One clear error each: of the right type, saying what was expected, what was found and what to change."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dist import small_models as models
from torch import Tensor, nn

import autopar
from autopar import Hints, Workload
from autopar.errors import (
    AutoparError,
    CaptureError,
    ClusterError,
    HintError,
    InfeasibleError,
    InputError,
    OptimizerError,
    PlanError,
    WorkloadError,
)

X = torch.linspace(-1, 1, 64).view(4, 16)  # a batch for models.mlp()
TOKENS = models.tokens()
CLUSTER = "cpu:4"


def raised(kind: type[AutoparError], call: Callable[[], Any]) -> AutoparError:
    """The error that ``call`` raises: exactly of ``kind``, with all its parts, and in its text all of them."""
    with pytest.raises(AutoparError) as caught:
        call()
    error = caught.value
    assert type(error) is kind, error
    for part in (error.what, error.expected, error.found, error.change):
        assert part and part in str(error), error
    return error


def check(error: AutoparError, *, what: str = "", expected: str = "", found: str = "", change: str = "") -> None:
    """Every part says what it has to (regular expressions)."""
    for name, pattern in {"what": what, "expected": expected, "found": found, "change": change}.items():
        assert re.search(pattern, getattr(error, name)), f"{name} lacks {pattern!r}:\n{error}"


def plan(model: nn.Module | None = None, cluster: Any = CLUSTER, **arguments: Any) -> autopar.Plan:
    """A plan, of the tiny Llama on four CPUs unless said otherwise."""
    return autopar.plan(models.llama(num_hidden_layers=1) if model is None else model, cluster, **arguments)


# ---- models ----


class Branching(nn.Module):
    """Looks at the value of a tensor, inside a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 16]."""
        return self.inner(x)


class Inner(nn.Module):
    """Where it looks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 16]."""
        y = self.linear(x)
        if y.sum() > 0:
            return y
        return -y


class Leaving(Inner):
    """Leaves PyTorch."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 16]."""
        return torch.from_numpy(self.linear(x).detach().numpy())


class Selecting(Inner):
    """Has a result whose shape depends on values."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [?, 16]."""
        return self.linear(x)[x[:, 0] > 0]


class Detaching(Inner):
    """Keeps every gradient from its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, 16] -> [B, 16]."""
        return self.linear(x).detach()


def line_of(function: Callable[..., Any], text: str) -> int:
    """The number of the source line of ``function`` that contains ``text``."""
    lines, first = inspect.getsourcelines(function)
    return first + next(i for i, line in enumerate(lines) if text in line)


def test_data_dependent_branch() -> None:
    """Names the operator, the module, the file, the line and its text."""
    error = raised(CaptureError, lambda: plan(Branching(), example_inputs=X))
    line = line_of(Inner.forward, "if y.sum() > 0:")
    check(error, what=r"Branching cannot be traced .*aten\._local_scalar_dense\.default.* module inner \(Inner\) at "
                      rf".*test_errors\.py:{line}: if y\.sum\(\) > 0:",
          expected="do not depend on the values of tensors", change=r"torch\.where")  # fmt: skip


def test_shape_that_depends_on_values() -> None:
    """As a branch."""
    error = raised(CaptureError, lambda: plan(Selecting(), example_inputs=X))
    line = line_of(Selecting.forward, "self.linear")
    check(error, what=rf"aten\.nonzero\.default.*test_errors\.py:{line}", expected="shapes do not depend")


def test_model_that_fails_while_traced() -> None:
    """Another failure says what failed and where, and does not advise against branches that are not there."""
    error = raised(CaptureError, lambda: plan(Leaving(), example_inputs=X))
    line = line_of(Leaving.forward, "self.linear")
    check(error, what=rf"Leaving .* fails in Leaving at .*test_errors\.py:{line}", found=r"RuntimeError: \.numpy\(\)",
          change=r"without autopar.*numpy")  # fmt: skip
    error = raised(CaptureError, lambda: plan(models.mlp(), example_inputs=torch.ones(4, 15)))
    check(error, what=r"module 0 \(Linear\)", found=r"\[4, 15\] X \[16, 24\]", expected="of these shapes and dtypes")


def test_model_without_gradients() -> None:
    """Nothing to split, or detached."""
    check(raised(CaptureError, lambda: plan(nn.ReLU(), example_inputs=X)), what="ReLU has no parameters")
    check(raised(CaptureError, lambda: plan(Detaching(), example_inputs=X)), what="no parameter gets a gradient")


class Rebinding(nn.Module):
    """Replaces a buffer in its forward where it should change it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        return self.linear(x) * self.steps


def test_model_that_replaces_a_buffer() -> None:
    """A trace would forget it, and every step would start from the first value: refused, with its name."""
    error = raised(CaptureError, lambda: plan(Rebinding(), example_inputs=X))
    check(error, what="replaces steps by another tensor", found="assignment to steps", change="in place")



def test_plain_module_without_example_inputs() -> None:
    """Nothing is known of its inputs."""
    error = raised(WorkloadError, lambda: plan(models.mlp()))
    check(error, what="Sequential needs example inputs", expected="example_inputs=", found="none",
          change="example_inputs=")  # fmt: skip


@pytest.mark.parametrize("given", ["text", [X], 3])
def test_example_inputs_of_an_unknown_kind(given: Any) -> None:
    """Neither dict, tuple nor tensor."""
    error = raised(InputError, lambda: plan(models.mlp(), example_inputs=given))
    check(error, expected="a dict, a tuple or a tensor", found=f"^{type(given).__name__}$", change="tuple of tensors")


def test_example_inputs_without_a_tensor() -> None:
    """There is no batch in them."""
    check(raised(InputError, lambda: plan(models.mlp(), example_inputs=(3,))), what="no tensor", found=r"\(3,\)")


def test_inputs_of_the_wrong_structure() -> None:
    """An unknown keyword and a missing input, at planning time and at a step."""
    unknown = {"ids": TOKENS["input_ids"], "labels": TOKENS["labels"], "mask": X}
    error = raised(InputError, lambda: plan(models.transformer(), example_inputs=unknown))
    check(error, what="unexpected keyword argument 'mask'", expected="ids, labels", found="ids, labels, mask")
    error = raised(InputError, lambda: plan(models.transformer(), example_inputs={"ids": TOKENS["input_ids"]}))
    check(error, what="missing a required argument: 'labels'", expected="ids, labels", found="^ids$")

    parallel = autopar.parallelize(models.mlp(), example_inputs=X)
    check(raised(InputError, lambda: parallel(X, mask=X)), what="unexpected keyword argument 'mask'",
          found="1 positional, mask")  # fmt: skip
    check(raised(InputError, lambda: parallel()), what="missing a required argument: 'input'", found="nothing")
    check(raised(InputError, lambda: parallel(X, X)), what="too many positional arguments", found="2 positional")


def test_empty_batch() -> None:
    """No sample, no token, and an empty batch at a step."""
    for empty in ({k: v[:0] for k, v in TOKENS.items()}, {k: v[:, :0] for k, v in TOKENS.items()}):
        error = raised(InputError, lambda batch=empty: plan(example_inputs=batch))
        check(error, what="the batch is empty", expected="at least one", found=r"\(0, 8\)|\(4, 0\)", change="drop_last")
    parallel = autopar.parallelize(models.mlp(), example_inputs=X)
    check(raised(InputError, lambda: parallel(X[:0])), what="the batch is empty", found=r"\(0, 16\)")


def test_workload_and_example_inputs_disagree() -> None:
    """Each size by name."""
    error = raised(WorkloadError, lambda: plan(example_inputs=TOKENS, workload=Workload(global_batch=8)))
    check(error, what="disagree on global_batch", expected="global_batch=8", found=r"\(4, 8\)", change="global_batch")
    error = raised(WorkloadError, lambda: plan(example_inputs=TOKENS, workload=Workload(seq_len=16)))
    check(error, what="disagree on seq_len", expected="seq_len=16", found=r"\(4, 8\)", change="seq_len")


def test_model_whose_batch_is_unknown() -> None:
    """A transformers model that does not take input_ids and labels."""
    from transformers import BertModel

    model = BertModel(models.bert().config)
    error = raised(WorkloadError, lambda: plan(model))
    check(error, what="BertModel does not take input_ids and labels", found="input_ids", change="example_inputs")


# ---- clusters, hints, arguments ----


def test_unknown_cluster() -> None:
    """The nearest presets, and the form."""
    error = raised(ClusterError, lambda: plan(cluster="h100-smx:1x8"))
    check(error, what="'h100-smx'", found="h100-smx", change="did you mean h100-sxm")
    error = raised(ClusterError, lambda: plan(cluster="h100-sxm"))
    check(error, expected="PRESET:HOSTSxDEVICES", change="h100-sxm:16x8")


def test_typo_in_a_cluster_file(tmp_path: Path) -> None:
    """The file, the key and the nearest one are named, of the file itself, of its device, and of the preset."""
    file = tmp_path / "mine.toml"
    for text, what, found, change in (
        ('preset = "h100-sxm"\nhosts = 2\ndevice_per_host = 8', "mine.toml", "device_per_host", "devices_per_host"),
        ('preset = "h100-sxm"\nhosts = 2\ndevices_per_host = 8\n[device]\nmemory_gb = 70', "mine.toml: device",
         "memory_gb", "memory_gib"),
        ('preset = "h100-sxn"\nhosts = 2\ndevices_per_host = 8', "h100-sxn", "h100-sxn", "h100-sxm"),
        ('preset = "h100-sxm"\nhosts = "2"\ndevices_per_host = 8', "mine.toml", "'2'", "hosts"),
    ):
        file.write_text(text)
        error = raised(ClusterError, lambda: plan(cluster=autopar.Cluster.load(file)))
        check(error, what=what, found=found, change=change)


@pytest.mark.parametrize(("name", "value", "kind", "found"), [
    ("cluster", 4, ClusterError, "int: 4"),
    ("workload", {"seq_len": 8}, WorkloadError, "dict"),
    ("hints", {"tp": 2}, HintError, "dict"),
])  # fmt: skip
def test_arguments_of_the_wrong_type(name: str, value: Any, kind: type[AutoparError], found: str) -> None:
    """What people try: a number of devices, dicts."""
    check(raised(kind, lambda: plan(**{name: value})), what=name, found=found, change="pass for instance")


def test_plan_that_is_a_path() -> None:
    """The path of a plan in place of the plan."""
    error = raised(PlanError, lambda: autopar.parallelize(models.mlp(), plan="plan.json"))  # type: ignore[arg-type]
    check(error, what="plan", expected="Plan", found="'plan.json'", change=r"Plan\.load")


def test_hint_that_matches_nothing() -> None:
    """The nearest names, with the pattern's own wildcard."""
    hints = Hints(shard={"model.layers.*.mlp.down_prj.weight": {"tp": 1}})
    error = raised(HintError, lambda: plan(hints=hints, example_inputs=TOKENS))
    check(error, what=r"down_prj\.weight.* matches no parameter", found="down_prj",
          change=r"did you mean model\.layers\.\*\.mlp\.down_proj\.weight")  # fmt: skip


def test_hints_that_contradict_each_other() -> None:
    """Both are named, whether they contradict each other or the cluster."""
    error = raised(HintError, lambda: plan(hints=Hints(dp=4, tp=2), example_inputs=TOKENS))
    check(error, what="dp=4, tp=2 .* 4 ranks", expected="dp x tp, one of 1, 2, 4", found="dp x tp = 8",
          change="correct one")
    error = raised(HintError, lambda: Hints(zero=0, shard={"*.weight": {"dp": 0}}))
    check(error, what=r"zero=0 and shard\['\*\.weight'\] contradict", expected="at least 1",
          change="zero=1, 2 or 3")  # fmt: skip
    twice = {"model.layers.*.mlp.down_proj.weight": {"tp": 1}, "*.down_proj.weight": {"tp": 0}}
    error = raised(HintError, lambda: plan(hints=Hints(tp=2, shard=twice), example_inputs=TOKENS))
    check(error, what="disagree on how tp splits model.layers.0.mlp.down_proj.weight",
          found=r"dim 1 in shard\['model.*dim 0 in shard\['\*\.down_proj", change="remove one")  # fmt: skip
    error = raised(HintError, lambda: plan(hints=Hints(tp=3), example_inputs=TOKENS))
    check(error, what="tp=3 does not divide a cluster of 4", expected="1, 2, 4")


def test_degrees_that_the_batch_or_the_sequence_does_not_have() -> None:
    """A batch smaller than dp, and a sequence that cp does not divide: both sizes are named."""
    error = raised(HintError, lambda: plan(hints=Hints(dp=4), workload=Workload(global_batch=2, seq_len=8)))
    check(error, what="dp=4 leaves ranks without a sample", expected="dp of at most 2", found="global_batch=2",
          change="dp of at most 2, or a larger global_batch")  # fmt: skip
    error = raised(HintError, lambda: plan(hints=Hints(cp=2), workload=Workload(global_batch=4, seq_len=7)))
    check(error, what="cp=2 does not divide the sequence", expected="that 2 divides", found="seq_len=7",
          change="cp that divides 7, or pad")  # fmt: skip
    error = raised(HintError, lambda: plan(hints=Hints(pp=1, tp=1), workload=Workload(global_batch=2, seq_len=7)))
    check(error, what="cannot be kept together", expected="pp x dp x cp x tp = 4 .* batch and sequence divide",
          found="a global batch of 2, sequences of 7 ", change="degrees that divide .* batch and sequence")  # fmt: skip
    fixed = Hints(pp=1, cp=1, tp=1)  # which leaves dp=4
    error = raised(HintError, lambda: plan(hints=fixed, workload=Workload(global_batch=2, seq_len=8)))
    check(error, what="cannot be kept together", found="cp=1, tp=1 and pp=1 cannot be kept together; without any one",
          change="drop a hint")  # fmt: skip


# ---- memory ----


def bytes_of(pattern: str, text: str) -> int:
    """The number of bytes that ``text`` names."""
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1])


@pytest.mark.parametrize("degrees", [
    {},
    *(pytest.param(d, marks=pytest.mark.slow)
      for d in ({"tp": 1, "zero": 0}, {"tp": 1}, {"dp": 2, "tp": 2, "zero": 3})),
], ids=str)  # fmt: skip
@pytest.mark.parametrize(("model", "batch", "limit"), [
    pytest.param(models.mlp, X, 1000, id="mlp"),
    pytest.param(lambda: models.llama(num_hidden_layers=1), TOKENS, 10_000, id="llama", marks=pytest.mark.slow),
])  # fmt: skip
def test_model_that_does_not_fit(
    model: Callable[[], nn.Module], batch: Any, limit: int, degrees: dict[str, int]
) -> None:
    """The bytes that the error asks for are enough, the bytes missing are the difference, and the plan that it names is
    one that comes out; with one byte less nothing comes out that needs more."""
    def made(**hints: Any) -> autopar.Plan:
        return plan(model(), hints=Hints(**hints), example_inputs=batch)

    error = raised(InfeasibleError, lambda: made(memory_limit=limit, **degrees))
    check(error, what="no plan fits", expected=f"at most {limit} bytes a device .*memory_limit", found="too many")
    needed = bytes_of(r"raise the limit to (\d+) bytes", error.change)
    missing = bytes_of(r"(\d+) bytes .* too many", error.found)
    assert needed == limit + missing
    fitting = made(memory_limit=needed, **degrees)
    assert fitting.peak_memory <= needed
    named = re.search(r"smallest plan that the hints allow is ((?:\w+=\d+, )*\w+=\d+) with (\d+) bytes", error.found)
    assert named is not None
    assert int(named[2]) == needed
    axes = {axis: int(n) for axis, n in re.findall(r"(\w+)=(\d+)", named[1])}
    assert {"dp", "tp"} <= axes.keys()
    as_named: dict[str, int] = {**degrees, **axes, "memory_limit": needed}
    assert made(**as_named).peak_memory <= needed
    try:  # a plan that keeps more may have a lower peak
        assert made(**{**degrees, "memory_limit": needed - 1}).peak_memory < needed
    except InfeasibleError as failed:
        assert bytes_of(r"(\d+) bytes .* too many", failed.found) == 1


@pytest.mark.parametrize(("model", "batch"), [
    (models.mlp, X), pytest.param(models.llama, TOKENS, marks=pytest.mark.slow)])  # fmt: skip
def test_model_that_fits_without_hints(model: Callable[[], nn.Module], batch: Any) -> None:
    """Where only the hints are in the way, the plan that fits without them is named, and fits."""
    def made(hints: Hints) -> autopar.Plan:
        return plan(model(), hints=hints, example_inputs=batch)

    least = bytes_of(r"raise the limit to (\d+) bytes",
                     raised(InfeasibleError, lambda: made(Hints(memory_limit=1000))).change)  # fmt: skip
    error = raised(InfeasibleError, lambda: made(Hints(tp=1, zero=0, memory_limit=least)))
    check(error, change=r"drop hints: .*dp=\d, (cp=\d, )?tp=\d with \d+ bytes .*fits")
    assert made(Hints(memory_limit=least)).peak_memory <= least


def test_model_that_does_not_fit_the_device() -> None:
    """Without a hint the device itself is named: a 70B Llama, from meta, on one 24 GB card."""
    with torch.device("meta"):
        model = models.llama(hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_key_value_heads=8,
                             num_hidden_layers=2, vocab_size=128256, tie_word_embeddings=False)  # fmt: skip
    workload = Workload(global_batch=1, seq_len=128)
    error = raised(InfeasibleError, lambda: plan(model, "rtx4090:1", workload=workload))
    check(error, expected="one rtx4090", found=r"GiB\) too many", change="more devices")


# ---- parallelize and verify ----


def test_optimizer_made_before() -> None:
    """Refused while it exists, accepted once it is gone."""
    model = models.mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    error = raised(OptimizerError, lambda: autopar.parallelize(model, example_inputs=X))
    check(error, what=r"an optimizer \(AdamW\) holds the parameters", expected="after parallelize", found="before",
          change=r"model = autopar\.parallelize\(model\), then optimizer")  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # makes a cycle with it
    del optimizer, scheduler, error
    other = torch.optim.SGD(models.mlp().parameters())
    parallel = autopar.parallelize(model, example_inputs=X)
    torch.optim.SGD(parallel.parameters())
    del other


def test_parallelize_twice() -> None:
    """A parallel module is no model to plan, to parallelize or to verify."""
    parallel = autopar.parallelize(models.mlp(), example_inputs=X)
    for call in (lambda: autopar.parallelize(parallel, example_inputs=X), lambda: plan(parallel, example_inputs=X),
                 lambda: autopar.verify(parallel, CLUSTER, example_inputs=X)):  # fmt: skip
        check(raised(PlanError, call), what="parallel already", found="DTensor", change="the original model")


def test_world_size_that_does_not_match() -> None:
    """A plan for four ranks in a world of one."""
    made = plan(models.mlp(), example_inputs=X)
    error = raised(PlanError, lambda: autopar.parallelize(models.mlp(), plan=made))
    check(error, what="for 4 ranks and 1 are running", expected=r"dp=\d x tp=\d = 4 ranks", found="a world of 1",
          change="torchrun with 4 processes")  # fmt: skip


def test_plan_for_another_model() -> None:
    """Says which parameters are not the plan's, by name or by shape."""
    made = plan(models.mlp(), "cpu:1", example_inputs=X)
    error = raised(PlanError, lambda: autopar.parallelize(models.transformer(), plan=made))
    check(error, what=r"another model \(Sequential\)", found=r"blocks\..* only in the model", change="plan this model")
    wider = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    error = raised(PlanError, lambda: autopar.parallelize(wider, plan=made))
    check(error, found=r"0\.weight: \(32, 16\) here, \(24, 16\) in the plan")


@pytest.mark.parametrize("steps", [0, -1])
def test_verify_without_steps(steps: int) -> None:
    """Nothing would be compared."""
    error = raised(InputError, lambda: autopar.verify(models.mlp(), CLUSTER, example_inputs=X, steps=steps))
    check(error, what="nothing to verify", expected="at least 1", found=str(steps), change="steps=1")


def test_meta_model_that_cannot_initialise_itself() -> None:
    """The module without reset_parameters is named."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.scale = nn.Linear(16, 16), nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) * self.scale

    with torch.device("meta"):
        model = nn.Sequential(Scaled())
    error = raised(CaptureError, lambda: autopar.parallelize(model, example_inputs=X))
    check(error, what="module 0 is on the meta device", found="Scaled without", change="reset_parameters")
