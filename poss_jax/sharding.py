"""A mesh from a string, and from logical axis names to mesh axes."""

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec

# Logical axis of a parameter -> mesh axis that it is split over. Other logical axes are never split.
RULES = {"vocab": "tensor", "kv_heads": "tensor", "intermediate": "tensor", "hidden": "fsdp"}
ROW_AXES = ("data", "fsdp")  # mesh axes over which the rows of a training batch are spread
TRAINING_AXES = (*ROW_AXES, "tensor")


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
    """Splits each axis that `RULES` names, where its size is a multiple of the mesh axis.

    Other axes stay whole on every device: with 3 KV heads over 2 devices attention is replicated while the MLP
    and the vocabulary are still split, which is right, only less of a saving.
    """
    parts = []
    for size, logical in zip(spec.shape, spec.axes, strict=True):
        axis = RULES.get(logical)
        parts.append(axis if axis in mesh.shape and size % mesh.shape[axis] == 0 else None)
    return NamedSharding(mesh, PartitionSpec(*parts))


def training_mesh(text: str) -> Mesh:
    """The mesh of a text such as "data=2,fsdp=2,tensor=2"; axes that it leaves out have size 1. Raises InputError."""
    sizes = parse_mesh(text, TRAINING_AXES)
    return make_mesh({axis: sizes.get(axis, 1) for axis in TRAINING_AXES})


def row_groups(mesh: Mesh) -> int:
    """How many sets of devices hold rows of their own."""
    return math.prod(mesh.shape[axis] for axis in ROW_AXES)


def rows_sharding(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Spreads `axis` of an array, the rows of a batch, over the mesh."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, ROW_AXES))


def keep_rows_sharded(array: jax.Array, axis: int = 0) -> jax.Array:
    """Inside a program for a training mesh (`jax.set_mesh`): keeps rows spread and all other axes whole, so that the
    compiler gathers weights and not activations. Elsewhere the array as it is.
    """
    if not set(ROW_AXES) <= set(jax.sharding.get_abstract_mesh().axis_names):
        return array
    return jax.lax.with_sharding_constraint(array, PartitionSpec(*[None] * axis, ROW_AXES))
