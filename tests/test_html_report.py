"""The HTML report: its figures are the plan's, it is whole and needs nothing, and a browser opens it without errors."""

from __future__ import annotations

import html
import itertools
import json
import math
import os
import re
import shutil
import subprocess
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_samples import GIB, sample_plan
from torch import nn
from typer.testing import CliRunner

import autopar
from autopar.cli import app
from autopar.cluster import Cluster
from autopar.cost_model.simulate import COMPUTE, Task, run
from autopar.cost_model.step import BEGIN, END, Repeated, Timing
from autopar.errors import PlanError
from autopar.hints import Hints
from autopar.plan import Collective, LayerCosts, LayerSummary, Plan
from autopar.replan import Question
from autopar.report.explain import Decision, Option
from autopar.report.html import framed
from autopar.report.html.breakdown import exposed_by_axis, lost_by_axis, parts_of
from autopar.report.html.figures import count_text, mfu, work_of
from autopar.report.html.markup import Markup, tag
from autopar.report.html.mesh import axes_of
from autopar.report.html.timeline import path, segments
from autopar.report.timeline import simulated
from autopar.report.what_if import WhatIf, questions
from autopar.solver.layer_costs import flops_by_dtype
from autopar.solver.spmd import read
from autopar.specialize import capture_batch
from autopar.workload import Workload

VOID = {"meta", "link", "input", "br", "col"}


class Page(HTMLParser):
    """A page as elements: (tag, attributes), their texts, and rows of tables by the captions of these. Every element is
    closed where it should be, else an assertion fails."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        if name not in VOID:
            self.open.append(name)
        if name == "table":
            self.rows = []
        elif name == "tr":
            self.rows.append([])
        elif name in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            return
        self.texts.append(data)
        if "caption" in self.open:
            self.tables[data] = self.rows
        elif {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    @property
    def text(self) -> str:
        """All that a reader reads, blanks as one."""
        return " ".join(" ".join(self.texts).split())

    def of(self, name: str, **attributes: str) -> list[dict[str, str | None]]:
        """The attributes of the elements of a name that have these."""
        return [a for n, a in self.elements if n == name and attributes.items() <= a.items()]


def pipeline_plan(**changes: Any) -> Plan:
    """Two ranks of a pipeline under 1F1B, four micro-batches, in each of which the forward takes 1 s and the backward
    2 s; then 0.5 s of an all-reduce over dp and 0.1 s of the optimizer. 5 x 3 + 0.6 s (Narayanan et al., 2021)."""
    work = {"F": 1.0, "B": 2.0}
    programs = (
        (),
        *((Repeated(1, (Task(COMPUTE, seconds, (), kind="forward"),)),) for seconds in work.values()),
        (Repeated(1, (Task("dp", 0.5, (), "all_reduce", "gradients"),)),),
    )
    both = {kind: (place, place) for place, kind in enumerate((BEGIN, "F", "B", END))}
    timing = Timing(programs, both, (0.0, 0.0), (0.0, 0.0), (0.0, 0.0), (0.1, 0.1), 1.0)
    entries: dict[str, Any] = {
        "degrees": {"pp": 2, "dp": 2, "cp": 1, "tp": 2},
        "schedule": "1f1b",
        "num_micro_batches": 4,
        "stages": (("model.layers.0",), ("model.layers.1",)),
        "peaks": ({"parameters": 10 * GIB, "activations": 20 * GIB}, {"parameters": 10 * GIB, "activations": 10 * GIB}),
        "step_time": 15.6,
        "breakdown": {"compute": 12.0, "exposed communication": 0.5, "bubble": 3.0, "optimizer": 0.1},
        "parameters": {},
        "timing": timing,
    }
    return sample_plan(**{**entries, **changes})


def costly_plan(**changes: Any) -> Plan:
    """The sample with costs of layers and a decision: half of the FLOPs in bfloat16, a quarter of the peak in all."""
    peak = Cluster.parse("h100-sxm:1x8").device.peak_flops
    device_seconds = 8 * 0.412
    gather = Collective("all_gather", "dp", "parameters", 120, 6 * GIB, 4 * GIB, 0.031)
    costs = (
        LayerCosts("model.layers.*.self_attn", 30, 2_000_000, 1e15, 0.05, ()),
        LayerCosts("model.layers.*.mlp", 30, 9_500_000, 3e15, 0.25, (gather,)),
        LayerCosts("lm_head", 1, 4096, 0.0, 0.001, ()),
    )
    option = Option("dim 0 over tp", 0.0, 0.031, 3 * GIB, "")
    name = "model.layers.*.mlp.up.weight"
    decision = Decision(name, "model.layers.*.mlp.up", "parameter", "0-29", 0, 2, (option,))
    flops = {"bfloat16": 0.2 * device_seconds * peak["bf16"], "float32": 0.05 * device_seconds * peak["fp32"]}
    return sample_plan(**{"costs": costs, "flops": flops, "decisions": (decision,), **changes})


# Figures.


def test_the_numbers_at_the_top() -> None:
    """131072 tokens in 0.412 s on 8 devices; 0.2 of the peak for bfloat16 and 0.05 of that for float32."""
    plan = costly_plan()
    assert work_of(plan) == (131072, "tokens")
    assert mfu(plan) == pytest.approx(0.25)
    page = Page(plan.report("html"))
    for words in ("412 ms", "318k tokens/s", "39.8k a device", "That is 25% of what",
                  "20.5 GiB", "58.6 GiB to spare of the 79.1 GiB of the device", "≤ 0.7%"):  # fmt: skip
        assert words in page.text
    assert mfu(sample_plan()) is None and "MFU" not in Page(sample_plan().report("html")).text


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (7, "7"), (999, "999"), (999.6, "1k"), (131072, "131k"),
                                             (8.388608e6, "8.39M"), (1.42e18, "1.42E")])  # fmt: skip
def test_counts_have_three_digits(count: float, text: str) -> None:
    assert count_text(count) == text


def test_a_batch_without_a_sequence_is_of_samples() -> None:
    plan = sample_plan(workload={"global_batch": 64, "optimizer": "sgd"})
    assert work_of(plan) == (64, "samples") and "155 samples/s" in Page(plan.report("html")).text
    assert work_of(sample_plan(workload={})) == (0, "samples")


def test_the_breakdown_adds_up_to_the_step() -> None:
    page = Page(sample_plan().report("html"))
    assert page.tables["Seconds of a step by part"] == [
        ["part", "seconds", "of the step", ""],
        ["compute", "340 ms", "83%", "kernels, what is made again among them"],
        ["exposed communication", "62 ms", "15%", "communication that nothing hides"],
        ["bubble", "0", "0%", "waiting for other ranks of the pipeline"],
        ["optimizer", "10 ms", "2.4%", "the step of the optimizer"],
    ]
    plan = pipeline_plan()
    assert exposed_by_axis(plan) == {"dp": pytest.approx(0.5)}
    assert sum(seconds for _, _, seconds, _ in parts_of(plan)) == pytest.approx(plan.step_time)
    assert simulated(plan)[2].breakdown == pytest.approx(plan.breakdown)


def test_lost_seconds_are_those_of_the_axis_that_runs() -> None:
    """2 s of kernels beside 1 s of dp at half their speed: 0.5 s are lost. Then dp and tp run alone for 1 s, tp for one
    more: 0.5 s of dp, 1.5 s of tp. In all 4.5 s."""
    tasks = [Task("dp", 1.0), Task(COMPUTE, 2.0), Task("dp", 1.0, (1,)), Task("tp", 2.0, (2,))]
    ran = run(tasks, 0.5)
    assert ran.seconds == pytest.approx(4.5)
    assert lost_by_axis(tasks, ran, 0.5) == {"dp": pytest.approx(1.0), "tp": pytest.approx(1.5)}


def test_memory_is_drawn_to_scale() -> None:
    """Bars are as wide as 79.1 GiB and 2% more; the device's limit is a line at 1 / 1.02."""
    page = Page(sample_plan().report("html"))
    widths = {a["title"]: a["style"] for a in page.of("span") if "title" in a and "style" in a}
    assert widths["activations: 11.5 GiB"] == f"width:{100 * 11.5 / (79.1 * 1.02):.2f}%"
    assert widths["optimizer: 4 GiB"] == f"width:{100 * 4 / (79.1 * 1.02):.2f}%"
    lines = [a for a in page.of("i") if (a["class"] or "").startswith("mark")]
    assert [(a["class"], a["style"]) for a in lines] == [("mark device", "left:98.04%")]
    hinted = Page(sample_plan(hints={"memory_limit": "40GiB"}).report("html"))
    lines = [a for a in hinted.of("i") if (a["class"] or "").startswith("mark")]
    assert [(a["class"], a["style"]) for a in lines] == [
        ("mark device", "left:98.04%"),
        ("mark limit", f"left:{100 * 40 / (79.1 * 1.02):.2f}%"),
    ]
    rows = page.tables["Memory of the fullest device by kind"]
    assert rows[1][:4] == ["parameters", "2 GiB", "2.5%", "2 GiB"] and rows[-1][:3] == ["total", "20.5 GiB", "26%"]


def test_every_rank_of_a_pipeline_has_its_memory() -> None:
    page = Page(pipeline_plan().report("html"))
    said = [a["aria-label"] for a in page.of("span", role="img")]
    assert said == ["rank 0 · stage 0: 30 GiB, 38% of the budget", "rank 1 · stage 1: 20 GiB, 25% of the budget"]


def test_axes_join_the_devices_that_they_should() -> None:
    """pp 2 x dp 2 x tp 2 on 4 hosts of 2: tp inside of a host, dp between two, pp between hosts 0 and 2."""
    plan = pipeline_plan(cluster=Cluster(Cluster.parse("h100-sxm:8").device, 4, 2).to_dict())
    found = {axis.name: (axis.size, axis.stride, axis.group.hosts) for axis in axes_of(plan)}
    assert found == {"pp": (2, 4, 2), "dp": (2, 2, 2), "tp": (2, 1, 1)}
    page = Page(plan.report("html"))
    drawn: dict[str, list[int]] = {}
    for name, attributes in page.elements:
        if name == "svg" and "mesh" in (attributes.get("class") or ""):
            places = drawn.setdefault(str(attributes["class"]), [])
        elif name == "rect" and attributes.get("class") in ("on", "off"):
            places.append(int(attributes["class"] == "on"))
    joined = {name: [i for i, on in enumerate(places) if on] for name, places in drawn.items()}
    assert joined == {"mesh a-pp": [0, 4], "mesh a-dp": [0, 2], "mesh a-tp": [0, 1]}
    rows = page.tables["Collectives over tp in one step"]
    assert rows[1] == ["all-reduce", "activations", "64", "640 MiB", "4.5 ms"]
    assert "Inside of one host: nvlink4, 450 GB/s a device." in page.text
    assert "one rank in each of 2 hosts: rdma, 50 GB/s a device." in page.text


def test_what_ranks_do_when() -> None:
    """1F1B on two ranks: rank 1 begins after the first forward of rank 0, and never waits until its end."""
    rows = segments(*simulated(pipeline_plan()))
    assert [(s.kind, s.micro_batch, s.start) for s in rows[1] if s.micro_batch is not None] == [
        (kind, m, pytest.approx(1.0 + 3 * m + (kind == "B"))) for m in range(4) for kind in "FB"
    ]
    assert [(s.kind, s.micro_batch) for s in rows[0]][:4] == [("F", 0), ("F", 1), ("B", 0), ("F", 2)]
    for row in rows:
        assert Counter(s.kind for s in row) == {"F": 4, "B": 4, END: 1, "optimizer": 1}
        assert all(b.start >= a.start + a.seconds - 1e-9 for a, b in itertools.pairwise(row))
    last = rows[0][-1]
    assert last.start + last.seconds == pytest.approx(15.6)
    assert [s.exposed for s in rows[0] if s.kind == END] == [pytest.approx(0.5)]


def test_the_timeline_is_drawn_to_scale() -> None:
    """1080 units a step, after 76 for names: the forward of 1 s of 15.6 s is 69.2 wide."""
    page = Page(pipeline_plan().report("html"))
    targets = page.of("rect", **{"class": "target"})
    words, numbers = json.loads(str(targets[1]["data-row"]))
    begin, width, said, micro_batch = numbers[:4]
    assert (begin, width) == (round(10 * (76 + 1080 / 15.6)), round(10 * 1080 / 15.6))
    assert (words[said], micro_batch) == ("forward, stage 1, 1 s", 0)
    assert len(targets) == 2 and "waiting for other ranks" in page.text


def test_narrow_neighbours_are_one_line() -> None:
    drawn = path([(10.0, 0.5), (10.6, 0.5), (20.0, 6.6)], 0, 8, "forward")
    assert drawn == '<path d="M0 4m10 0h1.1m8.9 0h6" stroke-width="8" class="k-forward"></path>'


def test_a_long_pipeline_is_enlarged_at_its_beginning_and_not_large() -> None:
    """4 ranks x 256 micro-batches: 2048 actions, each less than 4 units wide."""
    plan = pipeline_plan()
    assert plan.timing is not None
    kinds = {kind: (place,) * 4 for place, kind in enumerate((BEGIN, "F", "B", END))}
    none = (0.0,) * 4
    timing = replace(plan.timing, actions=kinds, up=none, down=none, shared=none, optimizer=(0.1,) * 4)
    degrees = {"pp": 4, "dp": 2, "cp": 1, "tp": 1}
    stages = tuple((f"model.layers.{i}",) for i in range(4))
    plan = replace(plan, degrees=degrees, num_micro_batches=256, stages=stages, peaks=plan.peaks * 2, timing=timing)
    text = replace(plan, step_time=777.6).report("html")
    assert "The first 77.8 s, enlarged" in text and "enlarged" not in pipeline_plan().report("html")
    assert len(text) < 150_000


def test_layers_have_their_costs_and_below_them_their_decisions() -> None:
    rows = Page(costly_plan().report("html")).tables["Layers with layouts, costs and collectives"]
    found = {row[0]: row[1:] for row in rows}
    assert found["model.layers.*.mlp"] == ["30", "batch over dp; ffn over tp", "9.5M", "3P 75%", "3 GiB", "250 ms",
                                           "31 ms", "all-gather over dp, 4 GiB of parameters"]  # fmt: skip
    assert found["model.layers.*.self_attn"][3] == "1P 25%"
    below = found["up.weight parameter"]
    assert below[:2] == ["30", "dim 0 over tp"] and below[4:7] == ["3 GiB", "", "31 ms"]
    assert below[7] == "chosen: the only option (of 3 options)"


def test_runner_ups_say_why_they_lost() -> None:
    rows = Page(sample_plan().report("html")).tables["Plans that lost, and why"]
    assert [row[4:] for row in rows[1:]] == [
        ["412 ms", "", "20.5 GiB", "chosen"],
        ["536 ms", "30%", "40 GiB", "1.3x slower: exposed communication"],
        ["300 ms", "-27%", "92 GiB", "needs 12.9 GiB more than fits"],
    ]


WHAT_IFS = (
    WhatIf("links half as fast", 1, "dp 8", (("tp", "2", "1"), ("dp", "4", "8")), 0.515, 30 * GIB, ""),
    WhatIf("twice the batch", 2, "dp 4 x tp 2", (), 0.824, 20 * GIB, ""),
    WhatIf("20% more memory", 1, "", (), None, None, "No plan fits."),
)


def test_what_ifs_are_in_all_reports() -> None:
    """0.412 s / 0.515 s is 20% slower; twice the work in twice the time is as fast."""
    plan = sample_plan(what_ifs=WHAT_IFS)
    assert [w.speed(plan) for w in WHAT_IFS] == [pytest.approx(0.8), pytest.approx(1.0), None]
    page = Page(plan.report("html")).text
    first = "With links half as fast another plan 20% slower 515 ms a step, 30 GiB a device tp: 2 to 1 dp: 4 to 8"
    assert first in page
    assert "With twice the batch the same plan as fast as now 824 ms a step" in page
    assert "With 20% more memory no plan No plan fits." in page
    text = plan.report()
    assert "What would change the decision" in text and "0.80x" in text and "No plan fits." in text
    assert Plan.from_dict(json.loads(plan.report("json"))) == plan
    assert "plan.what_if()" in Page(sample_plan().report("html")).text


# The page.


def test_the_page_is_whole_and_loads_nothing() -> None:
    for plan in (sample_plan(), pipeline_plan(), costly_plan(what_ifs=WHAT_IFS), sample_plan(
            layers=(), collectives=(), replicated=(), alternatives=(), hints={}, workload={})):  # fmt: skip
        text = plan.report("html")
        page = Page(text)
        ids = [a["id"] for _, a in page.elements if "id" in a]
        assert len(ids) == len(set(ids))
        links = [a[key] for _, a in page.elements for key in ("href", "src") if key in a]
        assert all(link and (link == "data:," or (link[0] == "#" and link[1:] in ids)) for link in links)
        assert not re.search(r"https?:|@import|url\(", text.replace("url(#bubble)", ""))
        assert {a["aria-controls"] for a in page.of("button") if "aria-controls" in a} <= set(ids)
        assert [n for n, _ in page.elements].count("script") == 1 and "default-src 'none'" in html.unescape(text)


def test_the_same_plan_has_the_same_page() -> None:
    first = costly_plan(what_ifs=WHAT_IFS).report("html")
    assert Plan.from_dict(json.loads(costly_plan(what_ifs=WHAT_IFS).report("json"))).report("html") == first


def test_whatever_comes_from_a_model_is_text() -> None:
    evil = "<script>alert(\"1\")</script>&'<b>"
    costs = (LayerCosts(evil, 1, 1, 1.0, 1.0, (Collective(evil, "dp", evil, 1, 1, 1, 1.0),)),)
    plan = costly_plan(
        model=evil, gap_space=evil, costs=costs, layers=(LayerSummary(evil, 1, ((evil, "tp"),)),),
        alternatives=(replace(sample_plan().alternatives[0], reason=evil),), hints={"shard": {evil: {"tp": 0}}},
        what_ifs=(WhatIf(evil, 1, evil, ((evil, evil, evil),), 1.0, 1, ""),),
        replicated=(replace(sample_plan().replicated[0], operator=evil, reason=evil),),
        decisions=(Decision(evil, evil, evil, "", 0, 0, (Option(evil, 1.0, 1.0, 1, evil),)),),
    )  # fmt: skip
    text = plan.report("html")
    page, plain = Page(text), Page(costly_plan(what_ifs=WHAT_IFS[:1]).report("html"))
    assert evil not in text and page.text.count(evil) >= 10
    assert [n for n, _ in page.elements].count("script") == 1 and not page.of("b", **{"class": "evil"})
    assert {key for _, a in page.elements for key in a} <= {key for _, a in plain.elements for key in a}


def test_in_a_notebook_the_page_has_a_frame_of_its_own() -> None:
    plan = sample_plan()
    shown = Page(plan._repr_html_())
    [frame] = shown.of("iframe")
    assert frame["srcdoc"] == plan.report("html") and frame["sandbox"] == "allow-scripts"
    assert Page(framed("<p>\"'&", "a \"title\"")).of("iframe")[0]["srcdoc"] == "<p>\"'&"


def test_markup_escapes_what_is_none() -> None:
    assert tag("p", "<&>", Markup("<b></b>"), None, ["a", 1], class_='"', hidden=True, title=None, x=1.50) == (
        '<p class="&quot;" hidden x="1.5">&lt;&amp;&gt;<b></b>a1</p>'
    )


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save_html(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == plan.report("html")
    with pytest.raises(PlanError, match=r"Cannot write the report to .*nowhere"):
        plan.save_html(tmp_path / "nowhere" / "report.html")
    with pytest.raises(PlanError, match=r"There is no report format 'htm'(.*\n)+.*html"):
        plan.report("htm")
    assert os.listdir(tmp_path) == ["report.html"]


# What if, and the command line.


def test_questions_are_about_one_thing_each() -> None:
    cluster = Cluster.parse("h100-sxm:8")
    inputs = {"ids": torch.empty(8, 16, device="meta"), "scale": torch.empty(3, device="meta")}
    asked = Question(cluster, Workload(global_batch=8, seq_len=16), Hints(memory_limit="40GiB"), inputs, None, False)
    slow, batch, length, memory = (question for _, _, question in questions(asked))
    assert slow.cluster.device.scale_up.bandwidth == 225e9 and slow.cluster.device.network.bandwidth == 25e9
    assert slow.cluster.device.memory_bytes == cluster.device.memory_bytes and slow.workload == asked.workload
    assert (batch.workload.global_batch, batch.workload.seq_len, batch.cluster) == (16, 16, cluster)
    assert batch.example_inputs["ids"].shape == (16, 16) and batch.example_inputs["scale"].shape == (3,)
    assert (length.workload.global_batch, length.workload.seq_len) == (8, 32)
    assert length.example_inputs["ids"].shape == (8, 32)
    assert memory.cluster.device.memory_bytes == pytest.approx(1.2 * cluster.device.memory_bytes)
    assert memory.hints.memory_bytes == 48 * GIB and memory.workload == asked.workload
    work = {text: work for text, work, _ in questions(asked)}
    assert work["twice the batch"] == work["sequences twice as long"] == 2
    work = {text: work for text, work, _ in questions(asked, by_token=True)}  # of a generation: a token of each sample
    assert work["twice the batch"] == 2 and work["contexts twice as long"] == 1
    unknown = replace(asked, workload=Workload(global_batch=8))
    assert [text for text, _, _ in questions(unknown)] == ["links half as fast", "twice the batch", "20% more memory"]


@pytest.fixture(scope="module")
def planned() -> Iterator[tuple[nn.Module, Plan]]:
    """A small model with its plan."""
    model = nn.Sequential(OrderedDict(up=nn.Linear(16, 32), relu=nn.ReLU(), down=nn.Linear(32, 16)))
    yield model, autopar.plan(model, "cpu:2", hints=Hints(tp=2), example_inputs=torch.zeros(8, 16))


def test_costs_of_layers_add_up(planned: tuple[nn.Module, Plan]) -> None:
    """Either product: 2 x 8 x 16 x 32 FLOPs forward and as many for the weight; of the second also for the input."""
    plan = planned[1]
    product = 2 * 8 * 16 * 32
    flops = {layer.name: layer.flops for layer in plan.costs if layer.flops}
    assert flops == {"up": 2 * product, "down": 3 * product} and plan.flops == {"float32": 5 * product}
    elements = {layer.name: layer.parameters for layer in plan.costs if layer.parameters}
    assert elements == {"up": 16 * 32 + 32, "down": 32 * 16 + 16}
    issued: Counter[tuple[str, str, str]] = Counter()
    for layer in plan.costs:
        issued.update({(c.kind, c.axis, c.purpose): c.count for c in layer.collectives})
    assert dict(issued) == {(c.kind, c.axis, c.purpose): c.count for c in plan.collectives} and issued
    kernels = sum(layer.seconds for layer in plan.costs)
    assert kernels == pytest.approx(plan.breakdown["compute"], rel=1e-6)


class Attending(nn.Module):
    """4 heads of 4 features over a batch of vectors of 16."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.Linear(16, 48, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.parts(x).view(*x.shape[:2], 3, 4, 4).permute(2, 0, 3, 1, 4)
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_flops_are_those_that_mfu_counts() -> None:
    """4 samples of 8 vectors. 4 for a parameter and a vector, whose gradient nobody asks for, and 12 s h a vector for
    attention (Chowdhery et al., 2022, appendix B): that the backward makes its scores again counts for nothing."""
    with torch.device("meta"):
        model, x = Attending(), torch.empty(4, 8, 16)
    operators = read(capture_batch(model, (x,), {}))
    assert sum(op.flops for op in operators) > 4 * 8 * (4 * 16 * 48 + 12 * 8 * 16)
    assert flops_by_dtype(operators) == {"float32": pytest.approx(4 * 8 * (4 * 16 * 48 + 12 * 8 * 16))}


@pytest.mark.slow
def test_what_if_searches_again(planned: tuple[nn.Module, Plan]) -> None:
    model, plan = planned
    asked = plan.what_if()
    assert [w.question for w in asked.what_ifs] == ["links half as fast", "twice the batch", "20% more memory"]
    slow, batch, memory = asked.what_ifs
    assert replace(asked, what_ifs=()) == plan and not any(w.error for w in asked.what_ifs)
    assert slow.step_time is not None and slow.step_time >= plan.step_time
    assert memory.step_time == pytest.approx(plan.step_time) and not memory.changes
    twice = autopar.plan(model, "cpu:2", hints=Hints(tp=2), example_inputs=torch.zeros(16, 16))
    assert (batch.step_time, batch.peak_memory) == (pytest.approx(twice.step_time), twice.peak_memory)
    assert asked.with_hints(Hints(tp=1, dp=2)).degrees["dp"] == 2  # it is known as the one that it was made from
    with pytest.raises(PlanError, match="not known in this process"):
        Plan.from_dict(plan.to_dict()).what_if()


def ran(*args: str | Path) -> tuple[int, str, str]:
    """A command: its exit code, and what it printed."""
    result = CliRunner().invoke(app, [str(arg) for arg in args])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_writes_the_page_of_a_plan(tmp_path: Path) -> None:
    plan = costly_plan()
    plan.save(tmp_path / "plan.json")
    code, out, err = ran("report", tmp_path / "plan.json", "--html", tmp_path / "report.html")
    assert code == 0 and out.rstrip() == plan.report() and f"the report is in {tmp_path / 'report.html'}" in err
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == plan.report("html")
    code, out, err = ran("report", tmp_path / "plan.json", "--html", tmp_path / "nowhere" / "report.html")
    assert code == 1 and out == "" and "Cannot write the report" in err


@pytest.mark.slow
def test_the_command_asks_what_if_where_it_writes_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny_here.py").write_text(
        "import torch\ndef mlp():\n    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), "
        "torch.nn.Linear(32, 16)), torch.zeros(8, 16)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for options, count in ((("--html", "r.html"), 3), (("--html", "r.html", "--no-what-if"), 0), (("--what-if",), 3)):
        code, out, err = ran("plan", "tiny_here:mlp", "--cluster", "cpu:2", "-o", "p.json", *options)
        plan = Plan.load("p.json")
        assert code == 0 and len(plan.what_ifs) == count, err
        assert ("What would change the decision" in out) == bool(count)
        if "--html" in options:
            assert Path("r.html").read_text(encoding="utf-8") == plan.report("html") and "r.html" in err


# A browser.

#: What is done with the page, and what is seen then; errors are caught from the first line on.
WATCH = """<script>
window.seen = {errors: []};
window.addEventListener("error", (e) => seen.errors.push(String(e.message)));
document.addEventListener("securitypolicyviolation", (e) => seen.errors.push(e.violatedDirective));
for (const kind of ["error", "warn"]) console[kind] = (...all) => seen.errors.push(all.join(" "));
</script>"""
DRIVE = """<script>
const names = () => Array.from(document.querySelectorAll("#layers-table tbody:not(.details)"))
  .filter((body) => !body.hidden).map((body) => body.rows[0].cells[0].textContent);
const head = (title) => Array.from(document.querySelectorAll("#layers-table thead th"))
  .find((th) => th.textContent === title);
const state = () => Array.from(document.querySelectorAll("#layers-table thead th"))
  .map((th) => th.getAttribute("aria-sort")).filter((sort) => sort !== "none");
const press = (title) => { head(title).querySelector("button").click(); return [names(), state()]; };
const type = (text) => {
  const box = document.getElementById("filter");
  box.value = text;
  box.dispatchEvent(new Event("input"));
  return [names(), document.getElementById("shown").textContent];
};
seen.first = names();
seen.kernels = press("kernels");
seen.again = press("kernels");
seen.layer = press("layer");
seen.filtered = type("over tp ffn");
seen.inside = type("up.weight");
seen.nothing = type("nonesuch");
seen.cleared = type("");
const opener = document.querySelector("button.open");
const below = document.getElementById(opener.getAttribute("aria-controls"));
const shows = () => [opener.getAttribute("aria-expanded"), getComputedStyle(below).display];
seen.closed = shows();
opener.click();
seen.opened = shows();
document.documentElement.style.scrollBehavior = "auto";
document.querySelector('nav a[href="#timeline"]').click();
seen.followed = [location.hash, document.activeElement.id,
                 Math.round(document.getElementById("timeline").getBoundingClientRect().top) < 80];
window.scrollTo(0, 0);
const theme = document.getElementById("theme");
seen.light = getComputedStyle(document.body).backgroundColor;
theme.click();
seen.dark = getComputedStyle(document.body).backgroundColor;
const row = document.querySelector(".target");
const box = row.getBoundingClientRect();
const at = {clientX: box.left + 0.02 * box.width, clientY: box.top + 2, bubbles: true};
row.dispatchEvent(new PointerEvent("pointermove", at));
seen.tip = document.getElementById("tip").textContent;
seen.wide = document.documentElement.scrollWidth - window.innerWidth;
document.body.textContent = "";
const told = document.createElement("pre");
told.id = "told";
told.textContent = JSON.stringify(seen);
document.body.append(told);
</script>"""


def chromium() -> str | None:
    """A Chromium or Chrome of this machine."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
    return next((found for name in names if (found := shutil.which(name))), None)


@pytest.mark.slow
@pytest.mark.skipif(chromium() is None, reason="no Chromium or Chrome on this machine")
@pytest.mark.parametrize("size", ["1600,1000", "1000,800", "420,900"])
def test_a_browser_opens_sorts_and_filters_it(tmp_path: Path, size: str) -> None:
    """Headless, without a network; nothing is wider than the window on a screen or a telephone."""
    page = pipeline_plan(costs=costly_plan().costs, decisions=costly_plan().decisions, flops=costly_plan().flops)
    text = page.report("html").replace("<title>", WATCH + "<title>").replace("</body>", DRIVE + "</body>")
    (tmp_path / "report.html").write_text(text, encoding="utf-8")
    found = subprocess.run(
        [str(chromium()), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
         f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={size}", "--enable-logging=stderr", "--dump-dom",
         f"file://{tmp_path / 'report.html'}"],
        capture_output=True, text=True, timeout=120)  # fmt: skip
    told = re.search(r'<pre id="told">(.*?)</pre>', found.stdout, re.DOTALL)
    assert told is not None, found.stderr[-2000:]
    seen = json.loads(html.unescape(told[1]))
    assert seen["errors"] == [] and "CONSOLE" not in found.stderr
    attention, mlp, head = "model.layers.*.self_attn", "model.layers.*.mlp", "lm_head"
    assert seen["first"] == [attention, mlp, head]
    assert seen["kernels"] == [[mlp, attention, head], ["descending"]]
    assert seen["again"] == [[head, attention, mlp], ["ascending"]]
    assert seen["layer"] == [[head, mlp, attention], ["ascending"]]
    assert seen["filtered"] == [[mlp], "1 of 3 layers"] == seen["inside"]
    assert seen["nothing"] == [[], "0 of 3 layers"] and seen["cleared"] == [[head, mlp, attention], "3 layers"]
    assert seen["closed"] == ["false", "none"] and seen["opened"] == ["true", "table-row-group"]
    assert seen["followed"] == ["", "timeline", True]
    assert seen["light"] != seen["dark"] and seen["tip"] == "rank 0, micro-batch 0: forward, stage 0, 1 s"
    assert seen["wide"] <= 0 and math.isfinite(seen["wide"])
