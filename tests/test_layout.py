"""Parameters in their tensors: any part that is read equals that part of the whole, and splitting undoes joining."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from convert import layout
from convert.load import on_devices
from convert.names import Entry, leaves_of, tree_of
from convert.stored import Tensors, all_finite, common_dtype
from poss_jax import sharding
from poss_jax.errors import InputError
from poss_jax.llama import ParameterSpec

GROUP, SIZE = 3, 4
LAYOUTS = {
    "Same": (layout.Same(), (6, 5)),
    "Same, one axis": (layout.Same(), (7,)),
    "Transposed": (layout.Transposed(), (6, 5)),
    "QueryKeyValue": (layout.QueryKeyValue(GROUP, SIZE), (5, 3, GROUP + 2, SIZE)),
    "QueryKeyValueBias": (layout.QueryKeyValueBias(GROUP, SIZE), (3, GROUP + 2, SIZE)),
    "AttentionOutput": (layout.AttentionOutput(GROUP, SIZE), (2, GROUP, SIZE, 5)),
    "GateUp": (layout.GateUp(), (5, 2, 6)),
    "GateUpBias": (layout.GateUpBias(), (2, 6)),
}
NEVER_SPLIT = {
    "QueryKeyValue": (2, 3),
    "QueryKeyValueBias": (1, 2),
    "AttentionOutput": (1, 2),
    "GateUp": (1,),
    "GateUpBias": (0,),
}


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def in_tensors(name, joined=False):
    """A parameter of random numbers in a checkpoint, and the tensors that it lies in."""
    kind, shape = LAYOUTS[name]
    tensors = {f"t{n}": numbers(*part) for n, part in enumerate(layout.part_shapes(kind, shape))}
    whole = kind.join(*tensors.values())
    if joined:
        tensors = {"t0": np.concatenate(list(tensors.values()))}
    entry = Entry((name,), ParameterSpec(shape, (None,) * len(shape)), kind, tuple(tensors))
    return Tensors(tensors, Path("model")).parameter(entry), whole, tensors


@pytest.mark.parametrize("name", LAYOUTS)
def test_splitting_undoes_joining(name):
    kind, shape = LAYOUTS[name]
    parts = [numbers(*part) for part in layout.part_shapes(kind, shape)]
    whole = kind.join(*parts)
    assert whole.shape == shape
    for one, other in zip(kind.split(whole), parts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("piece_bytes", [1, 100, 2**20])
@pytest.mark.parametrize("joined", [False, True])
@given(name=st.sampled_from(sorted(LAYOUTS)), data=st.data())
def test_any_part_equals_that_part_of_the_whole(joined, piece_bytes, name, data):
    parameter, whole, _ = in_tensors(name, joined)
    bounds = []
    for axis, size in enumerate(whole.shape):
        start = 0 if axis in NEVER_SPLIT.get(name, ()) else data.draw(st.integers(0, size - 1))
        stop = size if axis in NEVER_SPLIT.get(name, ()) else data.draw(st.integers(start + 1, size))
        bounds.append(slice(start, stop))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PIECE_BYTES", piece_bytes)
        np.testing.assert_array_equal(parameter[tuple(bounds)], whole[tuple(bounds)])
        np.testing.assert_array_equal(np.asarray(parameter), whole)
        np.testing.assert_array_equal(parameter[(slice(None),) * whole.ndim], whole)


class Counted:
    """A tensor that counts how much of it is read."""

    def __init__(self, array):
        self.array, self.shape, self.dtype, self.read = array, array.shape, array.dtype, 0

    def __getitem__(self, index):
        part = self.array[index]
        self.read += part.size
        return part


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        (name, axis)
        for name, (_, shape) in LAYOUTS.items()
        for axis in range(len(shape))
        if axis not in NEVER_SPLIT.get(name, ())
    ],
)
def test_a_host_reads_only_what_its_devices_hold(name, axis):
    kind, shape = LAYOUTS[name]
    tensors = {f"t{n}": Counted(numbers(*part)) for n, part in enumerate(layout.part_shapes(kind, shape))}
    entry = Entry((name,), ParameterSpec(shape, (None,) * len(shape)), kind, tuple(tensors))
    parameter = Tensors(tensors, Path("model")).parameter(entry)
    assert sum(tensor.read for tensor in tensors.values()) == 0
    part = parameter[tuple(slice(0, 1) if n == axis else slice(None) for n in range(len(shape)))]
    assert sum(tensor.read for tensor in tensors.values()) == part.size == np.prod(shape) // shape[axis]


@pytest.mark.parametrize(
    ("mesh", "axes"),
    [
        pytest.param("data=4,fsdp=1,tensor=2", 2, marks=pytest.mark.devices(8)),
        pytest.param("data=8", 1, marks=pytest.mark.devices(8)),
        pytest.param("fsdp=2,tensor=2", 4, marks=pytest.mark.devices(4)),
    ],
)
def test_devices_that_hold_the_same_part_share_one_reading(mesh, axes):
    tensor, spec = Counted(numbers(8, 16)), ParameterSpec((16, 8), ("hidden", "intermediate"))
    parameter = Tensors({"t": tensor}, Path("model")).parameter(Entry(("p",), spec, layout.Transposed(), ("t",)))
    placed = on_devices("float32", sharding.training_mesh(mesh))(parameter, spec)
    np.testing.assert_array_equal(placed, tensor.array.T)
    assert len({str(shard.index) for shard in placed.addressable_shards}) == axes
    assert tensor.read == tensor.array.size


def test_attention_matrices_are_fused_by_head():
    kind = layout.QueryKeyValue(group=2, head_dim=1)
    query, key, value = np.array([[1.0], [2], [3], [4]]), np.array([[5.0], [6]]), np.array([[7.0], [8]])
    assert kind.join(query, key, value)[0, :, :, 0].tolist() == [[1, 2, 5, 7], [3, 4, 6, 8]]


def test_pieces_follow_each_other_and_hold_at_least_a_row():
    kind, index = layout.Transposed(), (slice(0, 4), slice(2, 9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "PIECE_BYTES", 3 * 4 * 4)
        got = list(layout.pieces(kind, index, 4))
        assert got == [(slice(0, 4), slice(start, stop)) for start, stop in ((2, 5), (5, 8), (8, 9))]
        patch.setattr(layout, "PIECE_BYTES", 1)
        assert len(list(layout.pieces(kind, index, 4))) == 7


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_parameter_is_read_in_the_dtype_asked_for_rounded_as_numpy_does(dtype):
    parameter, whole, _ = in_tensors("GateUp")
    read = np.asarray(parameter.astype(dtype))
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, whole.astype(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_found(dtype, bad):
    values = np.array([0.0, -0.0, 1.0, float(ml_dtypes.finfo(dtype).max), float(ml_dtypes.finfo(dtype).min)], dtype)
    assert all_finite(values)
    for place in range(len(values)):
        assert not all_finite(np.where(np.arange(len(values)) == place, np.array(bad, dtype), values).astype(dtype))


@pytest.mark.parametrize("joined", [False, True])
def test_a_value_that_is_no_number_is_refused_naming_the_tensor(joined):
    parameter, _, tensors = in_tensors("QueryKeyValue", joined)
    last = list(tensors)[-1]
    tensors[last][-1, -1] = np.nan
    with pytest.raises(InputError, match=f"model: tensor '{last}' holds values that are not finite numbers"):
        np.asarray(parameter)


def test_trees_and_their_leaves():
    leaves = {("a",): 1, ("layers", 0, "x"): 2, ("layers", 1, "x"): 3, ("b", "c"): 4}
    tree = {"a": 1, "layers": [{"x": 2}, {"x": 3}], "b": {"c": 4}}
    assert tree_of(leaves) == tree
    assert leaves_of(tree) == leaves


@pytest.mark.parametrize(
    ("dtypes", "common"),
    [
        ("float16", "float16"),
        ("bfloat16", "bfloat16"),
        ("float16 bfloat16", "float32"),
        ("bfloat16 float32", "float32"),
        ("float16 bfloat16 float32", "float32"),
        ("float16 bfloat16 float64", "float64"),
    ],
)
def test_the_common_type_holds_the_values_of_all(dtypes, common):
    assert common_dtype(map(np.dtype, dtypes.split())) == common
