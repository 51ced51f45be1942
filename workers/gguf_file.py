"""Read-only view of a GGUF file: metadata and tensors, dequantized by parts.

NOTE: `gguf.GGUFReader` makes several numpy views per vocabulary entry (2 s and tens of MB for the
default model); this reads the same header with `struct`. Quantization itself is gguf's.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spectrue.workers.errors import ModelLoadError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
CHUNK_ROWS = 4096  # rows dequantized at once, so that the float32 copy stays small
SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


@dataclass(frozen=True, slots=True)
class TensorInfo:
    shape: tuple[int, ...]  # as torch has it, rows first
    type: int  # gguf.GGMLQuantizationType
    offset: int  # bytes from the start of the file


class _Header:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        size = self.scalar("Q")
        self.at += size
        return bytes(self.data[self.at - size : self.at]).decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item, count = self.scalar("I"), self.scalar("Q")
            if item in SCALARS:
                values = struct.unpack_from(f"<{count}{SCALARS[item]}", self.data, self.at)
                self.at += struct.calcsize(f"<{count}{SCALARS[item]}")
                return list(values)
            return [self.value(item) for _ in range(count)]
        return self.scalar(SCALARS[kind])


class GGUFFile:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._bytes: npt.NDArray[np.uint8] = np.memmap(path, dtype=np.uint8, mode="r")
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header()
        except (struct.error, KeyError, IndexError, MemoryError) as error:
            raise ModelLoadError(f"{path} is not a complete GGUF file: {error!r}") from error
        for name, info in self.tensors.items():
            if info.offset + self._nbytes(info) > len(self._bytes):
                raise ModelLoadError(f"{path} is cut short: tensor {name} ends after the file does")

    def _read_header(self) -> None:
        header = _Header(memoryview(self._bytes))  # type: ignore[arg-type]
        if bytes(header.data[:4]) != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file")
        header.at = 4
        version = header.scalar("I")
        if version not in VERSIONS:
            raise ModelLoadError(f"{self.path} has GGUF version {version}; supported: {VERSIONS}")
        num_tensors, num_keys = header.scalar("Q"), header.scalar("Q")
        for _ in range(num_keys):
            key = header.string()
            self.metadata[key] = header.value(header.scalar("I"))
        for _ in range(num_tensors):
            name = header.string()
            dims = [header.scalar("Q") for _ in range(header.scalar("I"))]
            kind, offset = header.scalar("I"), header.scalar("Q")
            self.tensors[name] = TensorInfo(tuple(reversed(dims)), kind, offset)
        align = self.metadata.get("general.alignment", 32)
        start = -(-header.at // align) * align
        self.tensors = {
            name: TensorInfo(info.shape, info.type, info.offset + start)
            for name, info in self.tensors.items()
        }

    def _block(self, info: TensorInfo) -> tuple[int, int]:
        """(elements, bytes) of one quantization block."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            elements, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.type)]
        except (ValueError, KeyError) as error:
            raise ModelLoadError(f"{self.path} has an unknown tensor type {info.type}") from error
        return int(elements), int(size)

    def _nbytes(self, info: TensorInfo) -> int:
        elements, size = self._block(info)
        return math.prod(info.shape) // elements * size

    def read_rows(self, name: str, start: int, stop: int) -> Iterator[npt.NDArray[np.float32]]:
        """Rows [start, stop) of a tensor in float32, in chunks of at most CHUNK_ROWS rows."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        info = self.tensors[name]
        elements, size = self._block(info)
        row = math.prod(info.shape[1:]) // elements * size
        if len(info.shape) == 1:  # a vector is one row for the quantization
            total = info.shape[0] // elements * size
            raw = self._bytes[info.offset : info.offset + total]
            yield dequantize(raw, GGMLQuantizationType(info.type))[start:stop]
            return
        for first in range(start, stop, CHUNK_ROWS):
            last = min(first + CHUNK_ROWS, stop)
            raw = self._bytes[info.offset + first * row : info.offset + last * row]
            yield dequantize(raw.reshape(-1, row), GGMLQuantizationType(info.type))
