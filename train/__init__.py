"""Training of drafters."""

import time

# When the process began, as nearly as Python code can tell: `python -m train.run` imports this package before its own
# module, whose imports take seconds, and --minutes counts them too. So nothing else may be imported here.
STARTED = time.monotonic()
