"""`headgate plan wait`."""

from __future__ import annotations

import sys

from headgate.cli.flags import takes_settings
from headgate.cli.output import Json, Outputs, Report, tell
from headgate.experiment.settings import Experiment
from headgate_papers.wait.plan import WaitSettings


@takes_settings
def wait(words: Experiment, wishes: WaitSettings, json: Json = None, report: Report = None) -> None:
    """Thresholds of WAIT and Nested WAIT, and the memory they need.

    Prints the fluid equilibrium, fractional thresholds per stage, segments for outputs that cannot be
    predicted, and the memory that is enough with probability 1 - MISS. Types are the classes of a mix. Needs
    a rate: --rate, a trace's own times, or --load.

    Examples:
      headgate plan wait --card pub-a100-llama-7b --prompt 60 --output 200 --rate 20
      headgate plan wait --trace azure-conv --scale-rate 2 --types 3
      headgate plan wait --prompt 512 --output 256 --load 0.8 --segments 4
    """
    from headgate.experiment.run import MIXED, arrivals_said, assumed, outside_said
    from headgate_papers.wait.page import wait_page
    from headgate_papers.wait.plan import plan_wait

    outputs = Outputs(json, report)
    found = plan_wait(words, wishes)
    setup = assumed(words, arrivals_said(words, "a share of what the card carries"), run=False)
    outside = outside_said(words, MIXED, min(found.mix.rate, found.most))
    page = wait_page(found, sys.argv[1:])
    tell(page, found.as_dict(), outputs, setup, found.lost, [outside, found.alarm])
