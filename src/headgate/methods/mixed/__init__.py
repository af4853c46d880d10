"""Mixed batching: decodes and prompt chunks share each step."""
