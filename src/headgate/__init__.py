"""headgate decides when the prefill and decode work of an LLM run on a GPU."""

__version__ = "0.1.0"
