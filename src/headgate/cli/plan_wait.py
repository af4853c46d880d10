"""`headgate plan wait`: thresholds of WAIT and Nested WAIT, and the memory they need."""

from __future__ import annotations

import sys

from headgate.advisor.settings import WaitSettings
from headgate.cli.flags import takes_settings
from headgate.cli.pages import Json, Outputs, Report, tell
from headgate.experiment.settings import Experiment

EXAMPLES = """Thresholds of WAIT and Nested WAIT, and the memory they need.

Prints the fluid equilibrium, thresholds per stage (fractional and, where
they fit, whole), segments for outputs nobody can predict, and the memory
that is enough with probability 1 - MISS. Types are the classes of a mix.
Needs a rate: --rate, a trace's own times, or --load.

\b
Examples:
  headgate plan wait --card pub-a100-llama-7b --prompt 60 --output 200 \\
      --rate 20
  headgate plan wait --trace azure-conv --scale-rate 2 --types 3 --every 60s
  headgate plan wait --prompt 512 --output 256 --load 0.8 --segments 4
"""


@takes_settings
def wait(
    words: Experiment,
    wishes: WaitSettings,
    json: Json = None,
    report: Report = None,
) -> None:
    """Plan it."""
    from headgate.advisor.wait.plan import plan_wait
    from headgate.experiment.assumed import arrivals_said, assumed
    from headgate.experiment.probe import MIXED, outside_said
    from headgate.report.plans.wait import wait_page

    outputs = Outputs(json, report).checked()
    found = plan_wait(words, wishes)
    setup = assumed(words, arrivals_said(words, "a share of what the card carries"), run=False)
    outside = outside_said(words, MIXED, min(found.mix.rate, found.most))
    page = wait_page(found, sys.argv[1:])
    tell(page, found.as_dict(), outputs, setup, found.lost, [outside, found.alarm])


wait.__doc__ = EXAMPLES
