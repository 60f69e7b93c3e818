"""From an OpenAI request body to the tokens an engine will read, and the keys of their blocks."""

from router.serving.prompt.load import load_prompts
from router.serving.prompt.parity import Parity, check
from router.serving.prompt.prepare import EngineTokenize, ModelPrompts, PromptLimits

__all__ = ["EngineTokenize", "ModelPrompts", "Parity", "PromptLimits", "check", "load_prompts"]
