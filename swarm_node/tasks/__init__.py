"""Prompts and safe checkers: any machine regenerates a task from its name; no answer is ever executed."""
