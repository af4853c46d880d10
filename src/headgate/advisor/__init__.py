"""Answers to a planner's questions."""
