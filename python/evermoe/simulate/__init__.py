"""A job on a failing cluster in simulated time: costs and losses of each way to survive.

The planners and the protocol of a session decide. Only the duration of their decisions is modelled, by `Constants`,
which `evermoe measure` writes.

    >>> from evermoe.simulate import Failure, Scenario, Workload, simulate
    >>> scenario = Scenario(Workload.preset("gpt-s-moe", step_seconds=1.0), nodes=10, days=1.0)
    >>> scenario = scenario.failing(Failure.poisson(mtbf_seconds=3600, repair_seconds=600))
    >>> outcome = simulate(scenario, "auto", seed=1)
    >>> 0.9 < outcome.ettr < 1.0
    True
"""

from evermoe.simulate.constants import Constants, read_constants, write_constants
from evermoe.simulate.engine import Outcome, Sample, simulate, simulate_seeds
from evermoe.simulate.scenario import Failure, Scenario
from evermoe.simulate.schemes import SCHEMES, SchemeName, keeps_owners
from evermoe.simulate.workload import Workload

__all__ = [
    "SCHEMES",
    "Constants",
    "Failure",
    "Outcome",
    "Sample",
    "Scenario",
    "SchemeName",
    "Workload",
    "keeps_owners",
    "read_constants",
    "simulate",
    "simulate_seeds",
    "write_constants",
]
