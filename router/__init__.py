"""warmroute: a cache-aware gateway for LLM inference."""

__version__ = "0.1.0"
