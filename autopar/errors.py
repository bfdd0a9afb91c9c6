"""Every error a user can meet, each saying what was expected, what was found and what to change."""

from __future__ import annotations


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose.

    ``what`` names the problem in one sentence; ``expected``, ``found`` and ``change`` complete it. The parts stay
    available as attributes so that tools can show them separately.
    """

    def __init__(self, what: str, *, expected: str = "", found: str = "", change: str = "") -> None:
        self.what, self.expected, self.found, self.change = what, expected, found, change
        lines = [what]
        lines += [
            f"  {label}: {text}"
            for label, text in (("expected", expected), ("found", found), ("change", change))
            if text
        ]
        super().__init__("\n".join(lines))


class CaptureError(AutoparError):
    """The model cannot be traced to one graph; names the module, the operator and the source line."""


class ClusterError(AutoparError):
    """A cluster specification, file or preset is unknown or malformed."""


class WorkloadError(AutoparError):
    """A workload is inconsistent or cannot be derived from the model."""


class HintError(AutoparError):
    """A hint matches nothing, has a bad value, or contradicts another hint or the cluster."""


class InfeasibleError(AutoparError):
    """No plan fits; says which budget, by how many bytes, and the nearest plan that would fit."""


class PlanError(AutoparError):
    """A plan cannot be read, or does not belong to this model or world."""


class MicroBatchError(AutoparError):
    """A model or batch that cannot run in micro-batches."""


class WeightsError(AutoparError):
    """A directory of weights cannot be read or written, or holds those of another model."""


class InputError(AutoparError):
    """A batch has the wrong structure, shape or dtype for the model."""


class CompilerError(AutoparError):
    """Emitted graphs cannot be compiled on this machine."""


class OptimizerError(AutoparError):
    """An optimizer holds parameters that are not the parallel module's."""


class CommandError(AutoparError):
    """What a command of the command line was given cannot be used: a model that cannot be made, a missing script."""


class RuntimeFailure(AutoparError):
    """Ranks disagree, or one of them failed during a step."""
