"""The figures of a set of predictions, as plain values and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from published import fit, score
from published.predict import Prediction

#: What a pick may take longer than the best to count as good as it.
REGRET = 0.05
_HEAD = f"{'':28}  rows | time: median   mean    p90  ratio | memory: median    p90  ratio | ranked"


def summary(found: Sequence[Prediction], judged: Sequence[Prediction]) -> dict[str, Any]:
    """The figures of one set of rows: ``judged`` are the timed ones, ``found`` all."""
    times, memory, ranked = score.time_errors(judged), score.memory_errors(found), score.concordance(judged)
    return {
        "step_time": None if times is None else asdict(times),
        "memory": None if memory is None else asdict(memory),
        "out_of_memory": score.out_of_memory(found),
        "concordance": None if ranked is None else ranked.share,
        "concordance_interval": None if ranked is None else [ranked.low, ranked.high, ranked.pairs],
        "coverage": score.coverage(found),
    }


def figures(found: Sequence[Prediction], leave_one_out: bool) -> dict[str, Any]:
    """All figures; with ``leave_one_out`` every family's times are those of chips whose level others gave."""
    judged: list[Prediction] = score.timed(found)
    levels: dict[str, dict[str, float]] = {}
    if leave_one_out:
        judged, levels = fit.leave_one_out(found, fit.best_level, fit.with_level)
    peers, _ = fit.leave_one_out(fit.peer(found), fit.best_slowdown, fit.with_level)
    lost = score.regrets(judged)
    regret = {
        "groups": len(lost),
        "within_5_percent": sum(r.regret <= REGRET for r in lost),
        "worst": [asdict(r) for r in lost[:5]],
    }
    parts = {}
    for name, column in (("by_family", "source_family"), ("by_hardware", "hardware")):
        every, timed = score.by(found, column), score.by(judged, column)
        parts[name] = {part: summary(these, timed.get(part, [])) for part, these in every.items()}
    return {**summary(found, judged), "regret": regret, "peer": summary(peers, peers), "levels": levels, **parts}


def text(values: dict[str, Any]) -> str:
    """The report for people."""
    lines = [_HEAD, _line("all", values), _line("peer: one utilisation a chip", values["peer"])]
    for name in ("by_family", "by_hardware"):
        lines += ["", *(_line(part, of_part) for part, of_part in values[name].items())]
    lines.append("")
    if values["concordance_interval"]:
        low, high, pairs = values["concordance_interval"]
        lines.append(f"concordance {values['concordance']:.3f} ({low:.3f} to {high:.3f}) of {pairs} pairs")
    regret, oom, covered = values["regret"], values["out_of_memory"], values["coverage"]
    worst = ", ".join(f"{r['group']} {r['regret']:.0%}" for r in regret["worst"]) or "none"
    lines.append(f"regret within 5 % in {regret['within_5_percent']} of {regret['groups']} groups; worst: {worst}")
    lines.append(f"out of memory: {oom['predicted']} predicted, {oom['missed']} missed; {oom['false']} ran")
    lines.append(f"covered: {covered['predicted']} of {covered['rows']} rows")
    lines += [f"  {count:4}  {reason}" for reason, count in covered["reasons"].items()]
    return "\n".join(lines)


def _line(name: str, values: dict[str, Any]) -> str:
    times, memory, share = values["step_time"], values["memory"], values["concordance"]
    parts = [f"{name:28} {times['count'] if times else 0:5}"]
    if times:
        parts.append(f" {times['median']:12.1%} {times['mean']:6.1%} {times['p90']:6.1%} {times['ratio']:6.2f}")
    else:
        parts.append(" " * 34)
    if memory:
        parts.append(f" {memory['median']:14.1%} {memory['p90']:6.1%} {memory['ratio']:6.2f}")
    else:
        parts.append(" " * 29)
    parts.append("" if share is None else f" {share:.2f}")
    return " | ".join(parts).rstrip(" |")
