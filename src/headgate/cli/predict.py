"""What other people's routers and autoscalers ask: `headgate predict` and `headgate watch`."""

from __future__ import annotations

from headgate.cli.flags import takes_settings
from headgate.core.errors import InputError
from headgate.live.emulate.options import PredictOptions
from headgate.live.scaling import WatchOptions

EXAMPLES = """Predict TTFT and TPOT for llm-d's router from a card.

Drop-in for llm-d's latency predictor: point PREDICTION_SERVER_URL and TRAINING_SERVER_URL of its router
here. Answers from the first call on, and corrects itself by what the router measures.
See docs/autoscaling.md.

\b
Examples:
  headgate predict --card cal-h200-qwen3-8b
  headgate predict --card my-card.json --slots 512 --budget 16384 --host 0.0.0.0 --port 8001
  headgate predict --policy keep --tbt 100ms --output 400
"""


@takes_settings
def predict(options: PredictOptions) -> None:
    """Check the settings and serve."""
    try:
        from headgate.live.predict import run
    except ImportError as error:
        raise _missing("predict", error) from None
    run(options, lambda line: print(f"headgate predict: {line}", flush=True))


predict.__doc__ = EXAMPLES


WATCH_EXAMPLES = """Say how many engines a fleet needs, for an autoscaler.

For fleets without headgate's router, which says the same. Reads the metrics of vLLM or SGLang engines and
serves headgate_engines_needed{model,pool} on /metrics, for KEDA or a HorizontalPodAutoscaler.
See docs/autoscaling.md.

\b
Examples:
  headgate watch --engine http://a:8000 --engine http://b:8000 --card cal-h200-qwen3-8b
  headgate watch --prometheus http://prometheus:9090 --autoscale plan:ceiling=40,start=3min
"""


@takes_settings
def watch(options: WatchOptions) -> None:
    """Check the settings and serve."""
    try:
        from headgate.live.watch import run
    except ImportError as error:
        raise _missing("watch", error) from None
    run(options, lambda line: print(f"headgate watch: {line}", flush=True))


watch.__doc__ = WATCH_EXAMPLES


def _missing(command: str, error: ImportError) -> InputError:
    return InputError(f"{command} needs package {error.name}; pip install headgate, in a clone pip install .")
