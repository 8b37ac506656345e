"""A mesh from a string, and from logical axis names to mesh axes."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec

# Logical axis of a parameter -> mesh axis that it is split over. Other logical axes are never split.
TENSOR_RULES = {"vocab": "tensor", "kv_heads": "tensor", "intermediate": "tensor"}


def parse_mesh(text: str, allowed: tuple[str, ...]) -> dict[str, int]:
    """ "tensor=2" gives {"tensor": 2}. Raises InputError for other axes, repeats, and sizes below 1."""
    axes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if name not in allowed:
            raise InputError(f"mesh axis {name!r} is not known here; write {','.join(a + '=N' for a in allowed)}")
        if name in axes:
            raise InputError(f"mesh axis {name!r} is given twice in {text!r}")
        if not size.isdecimal() or int(size) < 1:
            raise InputError(f"mesh axis {name!r} needs a whole number of at least 1, not {size!r}")
        axes[name] = int(size)
    return axes


def make_mesh(axes: dict[str, int]) -> Mesh:
    """A mesh over the first devices. Raises InputError where there are too few."""
    needed, there = math.prod(axes.values()), jax.device_count()
    if needed > there:
        text = ",".join(f"{name}={size}" for name, size in axes.items())
        raise InputError(f"mesh {text} needs {needed} devices; this machine has {there}")
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[:needed],
    )


def parameter_sharding(mesh: Mesh, spec: ParameterSpec) -> NamedSharding:
    """Splits each axis that `TENSOR_RULES` names, where its size is a multiple of the mesh axis.

    Other axes stay whole on every device: with 3 KV heads over 2 devices attention is replicated while the MLP
    and the vocabulary are still split, which is right, only less of a saving.
    """
    parts = []
    for size, logical in zip(spec.shape, spec.axes, strict=True):
        axis = TENSOR_RULES.get(logical)
        parts.append(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*parts))
