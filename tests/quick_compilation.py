"""How XLA compiles programs that run once. Nearly all of the tests' time is compilation: without these options it takes
thrice as long. They leave alone what XLA does to a program and only make its machine code worse.
"""

from importlib.metadata import version

OPTIONS: dict[str, int | bool] = {"xla_backend_optimization_level": 0}
if version("jaxlib").startswith("0.10."):  # later ones do not know it, and refuse to run
    OPTIONS["xla_cpu_use_fusion_emitters"] = False
FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
