"""autopar: decides how to split a PyTorch model over a cluster and emits the sharded program."""

from autopar.api import parallelize, plan, verify
from autopar.cluster import Cluster
from autopar.hints import Hints
from autopar.ops.constrain import constrain
from autopar.plan import Plan
from autopar.runtime.checkpoint import TrainingState, latest_checkpoint
from autopar.runtime.module import ParallelModule
from autopar.runtime.optimizers import WholeOptimizer
from autopar.runtime.verify import VerifyReport
from autopar.workload import Workload

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Hints",
    "ParallelModule",
    "Plan",
    "TrainingState",
    "VerifyReport",
    "WholeOptimizer",
    "Workload",
    "constrain",
    "latest_checkpoint",
    "parallelize",
    "plan",
    "verify",
]
