"""Tensors of numpy (and of torch, where it is there with a GPU) through examples/dlpack/lib.rs, without a copy.

    python3 examples/dlpack/demo.py LIBRARY
"""
import ctypes
import sys

import numpy as np

VERSIONED, USED = b"dltensor_versioned", b"used_dltensor_versioned"
library, api = ctypes.CDLL(sys.argv[1]), ctypes.pythonapi
library.squares.restype, library.squares.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 2
library.row.restype, library.row.argtypes = ctypes.c_void_p, [ctypes.c_size_t] * 3
library.scale.restype, library.scale.argtypes = ctypes.c_bool, [ctypes.c_void_p, ctypes.c_float]
api.PyCapsule_New.restype = ctypes.py_object
api.PyCapsule_New.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
api.PyCapsule_GetPointer.restype = ctypes.c_void_p
api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
api.PyCapsule_SetName.argtypes = [ctypes.py_object, ctypes.c_char_p]


class Tensor:
    """A tensor of the library, for `from_dlpack`."""

    def __init__(self, pointer, device):
        assert pointer, "the library has printed why"
        self.pointer, self.device = pointer, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        return api.PyCapsule_New(self.pointer, VERSIONED, None)


def scale(tensor, factor):
    """Multiplies a tensor in place. A capsule is consumed once: its name tells."""
    capsule = tensor.__dlpack__(max_version=(1, 0))
    pointer = api.PyCapsule_GetPointer(capsule, VERSIONED)
    api.PyCapsule_SetName(capsule, USED)
    done = library.scale(pointer, factor)
    try:
        api.PyCapsule_GetPointer(capsule, VERSIONED)
        raise AssertionError("a capsule was consumed twice")
    except ValueError:
        return done


CPU, CUDA = (1, 0), (2, 0)
try:
    import torch

    has_gpu = torch.cuda.is_available()
except ImportError:
    has_gpu = False

if has_gpu:
    x = torch.from_dlpack(Tensor(library.squares(2, 3), CUDA))
    assert x.tolist() == [[0, 1, 4], [9, 16, 25]] and x.is_cuda
    assert scale(x, 2.0) and x.tolist() == [[0, 2, 8], [18, 32, 50]], x
    assert torch.from_dlpack(Tensor(library.row(2, 3, 1), CUDA)).tolist() == [9, 16, 25]
    own = torch.arange(1000, dtype=torch.float32, device="cuda")
    torch.cuda.synchronize()
    assert scale(own, 3.0) and own[999].item() == 2997
    print("torch: a tensor of this crate is torch's, and one of torch was multiplied in place")
else:
    x = np.from_dlpack(Tensor(library.squares(2, 3), CPU))
    assert x.tolist() == [[0, 1, 4], [9, 16, 25]] and x.dtype == np.float32 and x.shape == (2, 3), x
    row = np.from_dlpack(Tensor(library.row(2, 3, 1), CPU))
    assert row.tolist() == [9, 16, 25] and not row.flags.writeable, "a part of a buffer is read-only"
    own = np.arange(1000, dtype=np.float32)
    address = own.ctypes.data
    assert scale(own, 3.0) and own[999] == 2997 and own.ctypes.data == address
    assert scale(own.reshape(10, 100), 0.5) and own[999] == 1498.5, "a view shares its array's memory"
    assert scale(own[10:20], 2.0) and own[10] == 30 and own[20] == 30 and own[9] == 13.5, "a part of an array"
    # Each is refused, with a reason on stderr, and nothing is written.
    integers, strided = np.arange(4), np.arange(8, dtype=np.float32)
    assert not scale(integers, 2.0) and integers.tolist() == [0, 1, 2, 3]
    assert not scale(strided[::2], 2.0) and strided[2] == 2
    own.setflags(write=False)
    try:
        written = scale(own, 2.0)
    except (BufferError, ValueError):
        written = False
    assert not written and own[999] == 1498.5, "a read-only array was written"
    del x
    print("numpy: a tensor of this crate is numpy's, and arrays of numpy were multiplied in place")
