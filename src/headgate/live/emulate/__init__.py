"""An OpenAI-compatible vLLM without a GPU: the simulator's engine on a wall clock."""

from headgate.live.emulate.expected import answer, chat_answer
from headgate.live.emulate.options import Options
from headgate.live.emulate.server import Emulators, emulated

__all__ = ["Emulators", "Options", "answer", "chat_answer", "emulated"]
