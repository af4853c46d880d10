"""SLAI: decodes wait for prompts as long as their promise allows."""
