"""Commands that need more than a call of `runtime`: a module for each."""
