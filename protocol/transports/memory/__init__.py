"""A network in one process, on a virtual clock: for tests and simulations."""
