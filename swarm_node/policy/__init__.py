"""The node's own language model: loading, sampling, log-probabilities, weights."""

import logging
import sys

if "kernels" not in sys.modules:  # with that package, transformers and bitsandbytes fetch code from the hub and run it
    sys.modules["kernels"] = None  # type: ignore[assignment]
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it would ask the user to install the package
