"""Tiny data sets in the standard files, as the papers' jobs read them."""

import struct

import numpy as np


def write_images(folder, samples):
    """Write MNIST, CIFAR-10 and CIFAR-100 with few samples; an MNIST image determines its label."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, size=samples).astype(np.uint8)
    pixels = rng.integers(0, 256, size=(samples, 3072)).astype(np.uint8)
    digits = (labels[:, None, None] * 25 + rng.integers(0, 5, size=(samples, 28, 28))).astype(np.uint8)
    for name in ("mnist", "cifar-10-batches-bin", "cifar-100-binary"):
        (folder / name).mkdir()
    for split in ("train", "t10k"):
        for kind, array in (("images-idx3", digits), ("labels-idx1", labels)):
            head = struct.pack(f">4B{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
            (folder / f"mnist/{split}-{kind}-ubyte").write_bytes(head + array.tobytes())
    ten = np.concatenate([labels[:, None], pixels], axis=1).tobytes()
    for name in (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"):
        (folder / f"cifar-10-batches-bin/{name}.bin").write_bytes(ten)
    hundred = np.concatenate([labels[:, None] // 5, labels[:, None], pixels], axis=1).tobytes()
    for name in ("train", "test"):
        (folder / f"cifar-100-binary/{name}.bin").write_bytes(hundred)
